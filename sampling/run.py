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
        caching: what computed steps reused inside of the network; empty where nothing was to be.
    """

    preset: str
    sampler: str
    steps: int
    computed: int
    skipped: int
    rule: str
    reason: str
    remark: str = ""
    caching: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"every step computed: {self.reason}"
        what = f"{self.computed} of {self.steps} steps computed"
        if self.computed + self.skipped != self.steps:  # another extension's sampler or guider
            what = f"{self.computed} calls of the model computed and {self.skipped} skipped in {self.steps} steps"
        more = "".join(f"; {each}" for each in (self.caching, self.remark) if each)
        return f"{self.preset}: {what} ({self.sampler}, {self.rule}){more}"


AfterRun = Callable[[Skipped], None]


class SkippingRun:
    """Decides at each call whether the model is computed, and extrapolates where it is not.

    The step of a call is known by its sigma, never by counting calls: guiders and samplers call as often as they like.
    A call whose sigma is none of the schedule's, or does not fall, is computed.

    Args:
        sigmas: N + 1 of them, falling.
        computed: steps that are computed in any case; see `schedule`.
        rule: for the others.
        mask: for inpainting, [1 or B, 1 or C, ...]: above 0 where the picture changes. How far the model went is
            measured there alone; the rest of an extrapolated latent is that of the last computed step.

    Attributes:
        computed_calls: calls that the model computed.
        skipped_calls: calls that were extrapolated.
    """

    def __init__(self, sigmas: Sequence[float], computed: Steps, rule: Reuse, mask: Tensor | None = None) -> None:
        self._sigmas = list(sigmas[:-1])
        self._computed = frozenset(computed)
        self._history = History(rule)
        self._changes = None if mask is None else mask > 0
        self._kept: Tensor | None = None
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
        step, conditions = step_of(self._sigmas, sigma), (conditions, x.shape, x.dtype, x.device)
        if step is None:
            self.computed_calls += 1
            return compute()
        if step <= self._last_step or sigma >= self._last_sigma or conditions != self._last_conditions:
            self.forget()
        self._last_step, self._last_sigma, self._last_conditions = step, sigma, conditions
        if step not in self._computed and not self._history.is_empty:
            self.skipped_calls += 1
            return self._expected(x, sigma)
        self.computed_calls += 1
        denoised = compute()
        self._add(x, sigma, denoised)
        return denoised

    def forget(self) -> None:
        """Free all tensors; the next step is computed."""
        self._history.clear()
        self._kept = None

    def _add(self, x: Tensor, sigma: float, denoised: Tensor) -> None:
        if (changes := self._changes_of(x)) is None:
            self._history.add(sigma, x, denoised)
            return
        # Zeros count for nothing in the sums that shares are fitted by.
        self._history.add(sigma, x.masked_fill(~changes, 0), denoised.masked_fill(~changes, 0))
        self._kept = denoised.masked_fill(changes, 0)

    def _expected(self, x: Tensor, sigma: float) -> Tensor:
        if (changes := self._changes_of(x)) is None or self._kept is None:
            return self._history.expect(sigma, x)
        return self._history.expect(sigma, x.masked_fill(~changes, 0)) + self._kept

    def _changes_of(self, x: Tensor) -> Tensor | None:
        """Where `x` changes; None where all of it does, or a part of it that no mask is known for."""
        if self._changes is None or not _fits(self._changes, x):
            return None
        self._changes = self._changes.to(x.device)
        return self._changes


def step_of(sigmas: Sequence[float], sigma: float) -> int | None:
    """Which step of a schedule has this noise level; None where it is none of them.

    Args:
        sigmas: of the steps, without the one that the run ends with.
    """
    nearest = min(range(len(sigmas)), key=lambda step: abs(sigmas[step] - sigma), default=None)
    if nearest is None or abs(sigmas[nearest] - sigma) > SAME_SIGMA * abs(sigma):
        return None
    return nearest


def _fits(mask: Tensor, x: Tensor) -> bool:
    return mask.ndim == x.ndim and all(one in (1, size) for one, size in zip(mask.shape, x.shape, strict=True))
