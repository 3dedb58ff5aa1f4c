"""A network in fp32 whose layers hold weights only while they compute, so that no fp32 copy of it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


def fill_while_computing(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Let every layer of a meta module hold its own part of `weights`, in fp32, while it computes."""
    for name, layer in model.named_modules():
        names = [own for own, tensor in layer._parameters.items() if tensor is not None]
        if names:
            own = {each: weights[f"{name}.{each}" if name else each] for each in names}
            fill_layer_while_computing(layer, functools.partial(dict, own))


def fill_layer_while_computing(layer: torch.nn.Module, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """
    Args:
        layer: on the meta device; its own parameters are filled, not those of its submodules.
        weights: the parameters by their names in the layer, of any floating dtype.
    """
    empty = {**layer._parameters}

    def fill(*_: Any) -> None:
        for name, tensor in weights().items():
            layer._parameters[name] = torch.nn.Parameter(tensor.detach().float(), requires_grad=False)

    def drain(*_: Any) -> None:
        layer._parameters.update(empty)

    layer.register_forward_pre_hook(fill)
    layer.register_forward_hook(drain)
