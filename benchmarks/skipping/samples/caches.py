"""EasyCache and LazyCache at a preset's time: which threshold takes how long is found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from .shelf import Made

TRIES = 3
"""For each wanted number of steps; what was tried for others counts too."""

_FEWEST = 1 / 3
"""About the share of steps that a cache computes at the highest threshold: it leaves the first and last ones alone."""
_ALIKE = 1.02
"""Thresholds whose ratio is below this are not parted any more."""
_EDGE = 0.15
"""How near to a known threshold the next one may be tried, in parts of the way between two."""

Tried = dict[float, int]
"""Computed steps by threshold."""
Item = TypeVar("Item")


def try_thresholds(
    run: Callable[[float], Made], steps: int, wanted: Iterable[int], ends: tuple[float, float]
) -> dict[float, Made]:
    """Runs with thresholds such that each wanted number of computed steps is met or exceeded by one, if it can be.

    Args:
        run: with a threshold.
        steps: of the full run.
        wanted: numbers of computed steps.
        ends: the thresholds between which is searched.
    """
    made: dict[float, Made] = {}
    for target in sorted({max(number, _fewest(steps)) for number in wanted}, reverse=True):
        for _ in range(TRIES):
            threshold = _next({each: run_.calls for each, run_ in made.items()}, steps, target, ends)
            if threshold is None:
                break
            made[threshold] = run(threshold)
    return made


def _next(tried: Tried, steps: int, target: int, ends: tuple[float, float]) -> float | None:
    """The threshold to try next, from a line through its neighbours; None where enough is known."""
    if target in tried.values() or target + 1 in tried.values():
        return None
    known = {ends[0]: steps, ends[1]: _fewest(steps), **tried}
    high = min((each for each, calls in known.items() if calls <= target), default=ends[1])
    low = max((each for each, calls in known.items() if calls > target and each < high), default=ends[0])
    if high / low < _ALIKE:
        return None
    part = (known[low] - target) / max(1, known[low] - known[high])
    threshold = low * (high / low) ** min(1 - _EDGE, max(_EDGE, part))
    rounded = float(f"{threshold:.3g}")
    return None if rounded in tried else rounded


def _fewest(steps: int) -> int:
    return max(1, round(_FEWEST * steps))


def nearest(runs: Iterable[Item], seconds: Callable[[Item], float], wanted: float) -> Item | None:
    """Of runs, the one that takes the time that is wanted, or nearly; of two as near the longer one."""
    return min(runs, key=lambda each: (round(abs(seconds(each) - wanted), 6), -seconds(each)), default=None)
