"""Placeholder modules: a model for export whose parameters share the memory of its largest tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

# Views start at distinct, aligned offsets: compilers merge constants of one address, and vector code wants 64 bytes.
_STEP_BYTES = 64


def placeholder_of(build: Callable[[], torch.nn.Module], dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build a module whose parameters are contiguous views into one small buffer.

    A 5 GB UNet takes the memory of its largest tensor, exports and serialises like any module, and stays a real
    (not a fake) one, so that no tool needs to know. The values of its parameters are zeros.

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
    views = views_of_one_buffer([tuple(tensor.shape) for _, tensor in group], dtype, device)
    for (name, _), view in zip(group, views, strict=True):
        owner, _, leaf = name.rpartition(".")
        _replace(module.get_submodule(owner), leaf, view)


def views_of_one_buffer(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Contiguous tensors of zeros, at different addresses, in the memory of the largest."""
    step = max(1, _STEP_BYTES // dtype.itemsize)
    largest = max((math.prod(shape) for shape in shapes), default=0)
    buffer = torch.zeros(largest + step * len(shapes), dtype=dtype, device=device)
    return [
        buffer.as_strided(shape, torch.empty(shape, device="meta").stride(), index * step)
        for index, shape in enumerate(shapes)
    ]


def _replace(owner: torch.nn.Module, leaf: str, view: torch.Tensor) -> None:
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(view, requires_grad=False)
    else:
        owner._buffers[leaf] = view
