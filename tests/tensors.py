"""How tests compare tensors."""

from __future__ import annotations

from torch import Tensor


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of what is wanted; both have the same shape."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())
