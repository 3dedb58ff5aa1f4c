"""How sure a mean of few measurements is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_AT_ONCE = 1 << 20  # drawn values held at once, 8 MB each for numbers and indices


@dataclass(frozen=True)
class Interval:
    """A mean, and the ends of its confidence interval; in the unit of what was measured."""

    mean: float
    low: float
    high: float


def paired_bootstrap(
    differences: Sequence[float] | Tensor,
    *,
    groups: Sequence[Hashable] | Tensor | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of the mean of paired differences, such as `with − without` of the same prompt and seed.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13. With `groups`, whole groups are drawn
    (the cluster bootstrap of Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8): what
    shares a prompt is alike, and would make the interval too narrow if each counted by itself. Below about 20
    differences or groups the interval is known to be somewhat too narrow.

    Args:
        differences: one finite number per pair, [N].
        groups: for each difference the group that it belongs to, such as its prompt.
        resamples: how often a set of the same size is drawn.
        confidence: share of such intervals that hold the true mean, between 0 and 1.
        seed: the same differences and seed give the same interval, but for rounding, on every machine.

    Returns:
        The differences' mean, and the interval's ends, linear between resampled means.

    Raises:
        ValueError: nothing can be said of these differences, or an argument is out of range.
    """
    values = _checked(differences)
    if resamples < 1 or not 0 < confidence < 1:
        raise ValueError(
            "A bootstrap needs at least 1 resample and a confidence between 0 and 1, got "
            f"{resamples} and {confidence}. 10000 and 0.95 are usual"
        )
    sums, counts = _by_group(values, groups)
    if len(sums) < 2:
        what = "difference" if groups is None else "group"
        raise ValueError(f"One {what} does not tell how much {what}s vary: measure at least two, better twenty")
    means = _resampled_means(sums, counts, resamples, seed)
    tail = (1 - confidence) / 2
    low, high = torch.quantile(means, means.new_tensor([tail, 1 - tail])).tolist()
    return Interval(values.mean().item(), low, high)


def _checked(differences: Sequence[float] | Tensor) -> Tensor:
    """Float64 [N] on the CPU."""
    if isinstance(differences, Tensor):
        values = differences.detach().cpu().double()  # in this order: some devices have no fp64
    else:
        values = torch.tensor(list(differences), dtype=torch.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"A bootstrap takes a list of differences, one for each pair, got shape {list(values.shape)}. "
            "Measure at least two pairs and give one number for each"
        )
    if not values.isfinite().all():
        number = int((~values.isfinite()).nonzero()[0])
        raise ValueError(
            f"Difference {number} is {values[number].item()}. Find out why that picture or latent is not finite; cap "
            "the infinite PSNR of identical ones with metrics.capped before differences are taken"
        )
    return values


def _by_group(values: Tensor, groups: Sequence[Hashable] | Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and number of each group's differences, float64 [G]; without groups each difference is one."""
    if groups is None:
        return values, torch.ones_like(values)
    if len(groups) != len(values):
        raise ValueError(f"{len(values)} differences, but {len(groups)} groups: give the group of each difference")
    names = groups.tolist() if isinstance(groups, Tensor) else groups  # a tensor's items are never equal as keys
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    numbers = torch.tensor([number_of[name] for name in names])
    empty = torch.zeros(len(number_of), dtype=torch.float64)
    return empty.index_add(0, numbers, values), empty.index_add(0, numbers, torch.ones_like(values))


def _resampled_means(sums: Tensor, counts: Tensor, resamples: int, seed: int) -> Tensor:
    """The mean of all differences in as many groups, drawn with replacement: float64 [resamples]."""
    generator = torch.Generator().manual_seed(seed)  # its own: the host's random numbers stay as they are
    at_once = max(1, _AT_ONCE // len(sums))
    means = []
    for start in range(0, resamples, at_once):
        shape = (min(at_once, resamples - start), len(sums))
        drawn = torch.randint(len(sums), shape, generator=generator)
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    return torch.cat(means)
