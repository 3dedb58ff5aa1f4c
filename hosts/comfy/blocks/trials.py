"""Results beside those that they are to equal, compared without a wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Trial:
    """One result beside the one that it is to equal.

    Attributes:
        error: the relative error, not read yet: NaN where any value is not finite.
        is_finite: whether the values that it is to equal are, not read yet.
    """

    error: torch.Tensor
    is_finite: torch.Tensor


def compared(found: Any, wanted: Any) -> Trial:
    """Hold what is found against what is wanted: tensors, or tuples and lists of tensors and None."""
    pairs = [(found, wanted)] if isinstance(wanted, torch.Tensor) else [*zip(found, wanted, strict=True)]
    results = [(one, other) for one, other in pairs if other is not None and one is not other]
    difference = size = torch.zeros((), dtype=torch.float32, device=results[0][1].device)
    for one, other in results:
        if one.shape != other.shape or one.dtype != other.dtype:
            difference = difference + torch.inf
        else:
            difference = difference + _square(one - other)
        size = size + _square(other)
    return Trial((difference / size.clamp_min(1e-30)).sqrt(), size.isfinite().float())


def read(trials: Sequence[Trial]) -> list[tuple[float, bool]]:
    """Error and whether what was wanted is finite, of each: one wait for all of them."""
    if not trials:
        return []
    found = torch.stack([torch.stack([trial.error, trial.is_finite]) for trial in trials]).tolist()
    return [(error, bool(is_finite)) for error, is_finite in found]


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all squares in fp32, without a copy: a VAE's features may fill a large part of the memory."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()
