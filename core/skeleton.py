"""Modules without numbers: the shape of a model for export, at the memory of its largest tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Views start at distinct, aligned places: compilers merge constants of one address, and vector code wants 64 bytes.
_STEP_BYTES = 64


def hollow(build: Callable[[], torch.nn.Module], dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build a module whose parameters are contiguous views into one small buffer.

    A 5 GB UNet takes the memory of its largest tensor, exports and serialises like any module, and stays a real
    (not a fake) one, so that no tool needs to know. Its numbers mean nothing.

    Args:
        build: constructs the module; called with the meta device as default.
        dtype: floating-point parameters and buffers get it; others keep theirs.
        device: where the buffer lies.
    """
    with torch.device("meta"):
        module = build()
    module.requires_grad_(False).eval()
    # Tied tensors have several names; each place needs the view.
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for tensor_dtype in {_dtype_of(tensor, dtype) for _, tensor in named}:
        group = [(name, tensor) for name, tensor in named if _dtype_of(tensor, dtype) == tensor_dtype]
        _fill(module, group, tensor_dtype, device)
    return module


def _dtype_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _fill(
    module: torch.nn.Module, group: list[tuple[str, torch.Tensor]], dtype: torch.dtype, device: torch.device
) -> None:
    step = max(1, _STEP_BYTES // dtype.itemsize)
    largest = max(tensor.numel() for _, tensor in group)
    buffer = torch.zeros(largest + step * len(group), dtype=dtype, device=device)
    for index, (name, tensor) in enumerate(group):
        owner, _, leaf = name.rpartition(".")
        strides = torch.empty(tensor.shape, device="meta").stride()
        view = buffer.as_strided(tensor.shape, strides, index * step)
        _replace(module.get_submodule(owner), leaf, view)


def _replace(owner: torch.nn.Module, leaf: str, view: torch.Tensor) -> None:
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(view, requires_grad=False)
    else:
        owner._buffers[leaf] = view
