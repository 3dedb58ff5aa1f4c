"""Averages of closeness: a mean of dB alone hides samples that are far off."""

from __future__ import annotations

from torch import Tensor


def mean(decibels: Tensor) -> float:
    return round(float(decibels.mean()), 3)


def median(decibels: Tensor) -> float:
    return round(float(decibels.float().quantile(0.5)), 3)


def pooled(decibels: Tensor) -> float:
    """PSNR of the mean of all samples' squared errors: the samples that are furthest off decide."""
    errors = 10.0 ** (-decibels.double() / 10.0)
    return round(float(-10.0 * errors.mean().log10()), 3)


def averages(decibels: Tensor) -> dict[str, float]:
    """As rows have them."""
    return {"psnr_db": mean(decibels), "median_db": median(decibels), "pooled_db": pooled(decibels)}
