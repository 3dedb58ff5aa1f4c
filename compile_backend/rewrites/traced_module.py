"""A traced program as a module, and the tensors of a module by their names in the state dict."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.export import ExportedProgram


def module_of(program: ExportedProgram) -> Any:
    """A `torch.fx.GraphModule`. Guards on inputs are checked by the engine itself; before torch 2.9 there were none."""
    unguarded = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
    return program.module(**unguarded)


def tensor_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


def assign(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Unlike `load_state_dict`, this reaches buffers that are not saved with the model."""
    owner, _, leaf = name.rpartition(".")
    target = module.get_submodule(owner)
    is_parameter = leaf in target._parameters
    setattr(target, leaf, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
