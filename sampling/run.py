"""One sampling run of which some steps are skipped; independent of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .reuse import History, Reuse
from .schedule import Steps

SAME_SIGMA = 1e-3
"""Share of sigma by which a call may miss its step's: samplers compute in float32, at times through logarithms."""


@dataclass(frozen=True)
class Skipped:
    """What happened in a sampling run.

    Attributes:
        sampler: ComfyUI's name of its method.
        reason: why every step was computed; empty where steps were skipped as chosen.
        remark: what else people should know of it.
    """

    preset: str
    sampler: str
    steps: int
    computed: int
    skipped: int
    rule: str
    reason: str
    remark: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"every step computed: {self.reason}"
        what = f"{self.computed} of {self.steps} steps computed"
        if self.computed + self.skipped != self.steps:  # another extension's sampler or guider
            what = f"{self.computed} calls of the model computed and {self.skipped} skipped in {self.steps} steps"
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.preset}: {what} ({self.sampler}, {self.rule}){remark}"


AfterRun = Callable[[Skipped], None]


class SkippingRun:
    """Decides at each call whether the model is computed, and extrapolates where it is not.

    The step of a call is known by its sigma, never by counting calls: guiders and samplers call as often as they like.
    A call whose sigma is none of the schedule's, or does not fall, is computed.

    Args:
        sigmas: N + 1 of them, falling.
        computed: steps that are computed in any case; see `schedule`.
        rule: for the others.

    Attributes:
        computed_calls: calls that the model computed.
        skipped_calls: calls that were extrapolated.
    """

    def __init__(self, sigmas: Sequence[float], computed: Steps, rule: Reuse) -> None:
        self._sigmas = list(sigmas[:-1])
        self._computed = frozenset(computed)
        self._history = History(rule)
        self._last_step, self._last_sigma = -1, math.inf
        self._last_conditions: Hashable = None
        self.computed_calls = 0
        self.skipped_calls = 0

    def __call__(self, x: Tensor, sigma: float, compute: Callable[[], Tensor], conditions: Hashable = None) -> Tensor:
        """The denoised latent of a step, computed or extrapolated; a tensor that the caller may write into.

        Args:
            x: the noisy latent [B, ...].
            compute: the model with all its guidance.
            conditions: all else that the result depends on, such as which ControlNets are active: where it differs from
                the last call's, the history is cleared and the step computed.
        """
        step, conditions = self._step(sigma), (conditions, x.shape, x.dtype, x.device)
        if step is None:
            self.computed_calls += 1
            return compute()
        if step <= self._last_step or sigma >= self._last_sigma or conditions != self._last_conditions:
            self.forget()
        self._last_step, self._last_sigma, self._last_conditions = step, sigma, conditions
        if step not in self._computed and not self._history.is_empty:
            self.skipped_calls += 1
            return self._history.expect(sigma, x)
        self.computed_calls += 1
        denoised = compute()
        self._history.add(sigma, x, denoised)
        return denoised

    def forget(self) -> None:
        """Free all tensors; the next step is computed."""
        self._history.clear()

    def _step(self, sigma: float) -> int | None:
        nearest = min(range(len(self._sigmas)), key=lambda step: abs(self._sigmas[step] - sigma), default=None)
        if nearest is None or abs(self._sigmas[nearest] - sigma) > SAME_SIGMA * abs(sigma):
            return None
        return nearest
