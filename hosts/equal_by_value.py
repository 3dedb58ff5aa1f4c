"""Whether what a network is given equals by value what it was given before."""

from __future__ import annotations

from typing import Any

import torch


def equal_by_value(one: Any, other: Any, holder: str | None = None) -> bool:
    """Compare tensors, plain values, and lists, tuples and dicts of these; all else is equal only if it is identical.

    Args:
        holder: objects that have this attribute are compared by it.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_form = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return same_form and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_by_value(one[key], other[key], holder) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal_by_value(*pair, holder) for pair in zip(one, other, strict=True))
    if holder is not None and hasattr(one, holder):
        return equal_by_value(getattr(one, holder), getattr(other, holder), holder)
    return isinstance(one, (bool, int, float, str)) and one == other
