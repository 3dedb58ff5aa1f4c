"""Seconds of a run, from its steps: what the device takes for each kind of step, as slopes between timed runs.

A run has a fixed cost besides (the latents' way to the device, the sampler's own preparations). Spread over the steps
it would be counted as the cost of skipped ones, so it is kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .protocol import NEAR, TIME_TOLERANCE

SHORT, LONG = 10, 20
"""Steps of the runs that are timed."""


@dataclass(frozen=True)
class Costs:
    """Seconds that the whole batch takes with one sampler at one CFG.

    Attributes:
        fixed: of a run, however many steps it has.
        computed: of a computed step, with the sampler's own arithmetic.
        skipped: of a step that a preset fills in.
        caches: by EasyCache's or LazyCache's node: of each step, whatever becomes of it, beside the computed ones.
    """

    fixed: float
    computed: float
    skipped: float
    caches: Mapping[str, float] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """For a row: to the microsecond."""
        own = {node: round(seconds, 6) for node, seconds in self.caches.items()}
        return {name: round(getattr(self, name), 6) for name in ("fixed", "computed", "skipped")} | {"caches": own}

    def of_preset(self, computed: int, steps: int) -> float:
        return self.fixed + computed * self.computed + (steps - computed) * self.skipped

    def of_plain(self, steps: int) -> float:
        return self.fixed + steps * self.computed

    def of_cache(self, node: str, computed: int, steps: int) -> float:
        return self.of_plain(computed) + steps * self.caches[node]

    def affordable(self, seconds: float) -> int:
        """The most plain steps in that time, at least 2. The tolerance is in the rival's favour."""
        return max(2, self._most(seconds - self.fixed))

    def affordable_by_cache(self, node: str, seconds: float, steps: int) -> int:
        """The most steps that a cache may compute of so many, less than 1 where its own work takes too long."""
        return self._most(seconds - self.fixed - steps * self.caches[node])

    def is_near(self, seconds: float, wanted: float) -> bool:
        """Whether a run of `seconds` takes about the time that is wanted."""
        return abs(seconds - wanted) <= max(self.computed, NEAR * wanted)

    def _most(self, seconds: float) -> int:
        return math.floor(seconds / self.computed + TIME_TOLERANCE + 1e-9)


@dataclass(frozen=True)
class Timed:
    """A kind of run, timed several times.

    Attributes:
        seconds: of each run, in the order in which they were made.
        computed, steps: how many steps were computed, of how many.
    """

    seconds: list[float]
    computed: int
    steps: int

    @property
    def quickest(self) -> float:
        """Whatever else the machine does only ever adds to a run."""
        return min(self.seconds)


def costs_from(short: Timed, long: Timed, skipping: Timed, caches: Mapping[str, Timed]) -> Costs:
    """
    Args:
        short, long: plain runs.
        skipping: a preset's.
        caches: by node.

    Raises:
        ValueError: the longer run took no longer; something else kept the machine busy.
    """
    at_short, at_long, at_skipping = (timed.quickest for timed in (short, long, skipping))
    computed = (at_long - at_short) / (long.steps - short.steps)
    if computed <= 0:
        raise ValueError(
            f"{long.steps} steps took {at_long:.4f} s and {short.steps} took {at_short:.4f} s: the machine was not "
            "quiet. Time again"
        )
    fixed = at_short - short.steps * computed
    rest = at_skipping - fixed - skipping.computed * computed
    skipped = max(0.0, rest / (skipping.steps - skipping.computed))
    own = {
        node: max(0.0, (timed.quickest - fixed - timed.computed * computed) / timed.steps)
        for node, timed in caches.items()
    }
    return Costs(fixed, computed, skipped, own)
