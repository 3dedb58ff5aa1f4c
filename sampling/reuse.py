"""What stands in for the model in a step that is not computed.

All rules speak of the latent x, its noise level sigma and the denoised latent D that guidance has already formed, in
the terms of k-diffusion: x = D + sigma * noise. So they serve models that predict noise, velocity or flow alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

_LIMITS = ((-0.5, 1.5), (-1.5, 1.5))
"""Of the shares by which the line and its bend are followed."""

_RIDGE = 1e-6
"""Keeps two directions apart that are nearly one."""

_LONGEST = 1.0
"""In gaps between the last two computed steps: how far ahead a line is followed."""


class Reuse(str, Enum):
    """How a skipped step is filled in.

    HOLD: D stays as it is.
    HOLD_NOISE: the noise (x - D) / sigma stays as it is.
    LINEAR: D goes on along the line through the last two computed ones, over sigma.
    MEASURED: as LINEAR, by the share of the way that the model itself went last time: each computed step shows how far
        the line through the two before it would have been right. It holds where the line was of no use.
    BENT: as MEASURED, with a share of its own for how the line's slope changed from the gap before; for each item of
        the batch only while that would have come closer at the last computed step than the line alone.
    """

    HOLD = "hold"
    HOLD_NOISE = "hold noise"
    LINEAR = "linear"
    MEASURED = "measured"
    BENT = "measured with bend"


_DIRECTIONS = {Reuse.MEASURED: 1, Reuse.BENT: 2}


@dataclass(frozen=True)
class Computed:
    """A computed step: sigma, the denoised latent [B, ...], and x where the rule asks for it, else an empty tensor."""

    sigma: float
    x: Tensor
    denoised: Tensor


class History:
    """The last computed steps of a run, and what they let one expect of the next."""

    def __init__(self, rule: Reuse) -> None:
        self.rule = rule
        self._past: list[Computed] = []  # the newest first
        self._gains: list[Tensor] = []
        self._fits: list[list[Tensor]] = []  # of the line alone, and of line and bend

    @property
    def is_empty(self) -> bool:
        return not self._past

    def clear(self) -> None:
        self._past = []
        self._gains = []
        self._fits = []

    def add(self, sigma: float, x: Tensor, denoised: Tensor) -> None:
        """Take note of a computed step. Copies are kept: samplers write into their tensors."""
        if self.rule in _DIRECTIONS and len(self._past) >= 2:
            self._measure(sigma, denoised - self._past[0].denoised)
        kept = x.clone() if self.rule is Reuse.HOLD_NOISE else x.new_empty(0)
        self._past = [Computed(sigma, kept, denoised.clone()), *self._past[: _DIRECTIONS.get(self.rule, 1)]]

    def expect(self, sigma: float, x: Tensor) -> Tensor:
        """The denoised latent of a step that is not computed: a tensor of its own, shaped as x.

        Raises:
            ValueError: no step was computed yet.
        """
        if not self._past:
            raise ValueError("No step was computed yet, so there is nothing to go on from.")
        last = self._past[0]
        if self.rule is Reuse.HOLD_NOISE:
            return x - (sigma / last.sigma) * (last.x - last.denoised)
        expected = last.denoised.clone()
        if self.rule is Reuse.LINEAR and len(self._past) >= 2:
            expected += self._directions(sigma)[0]
        for gain, direction in zip(self._gains, self._directions(sigma) if self._gains else (), strict=False):
            expected += gain * direction
        return expected

    def _measure(self, sigma: float, went: Tensor) -> None:
        directions = self._directions(sigma, math.inf)
        fits = [_gains(directions[:count], went) for count in range(1, len(directions) + 1)]
        self._gains, before, self._fits = fits[0], self._fits, fits
        if len(before) == len(fits) == 2:
            line_missed, bent_missed = (_missed(fit, directions, went) for fit in before)
            line, (slope, bend) = fits[0][0], fits[1]
            is_bent = bent_missed < line_missed
            self._gains = [torch.where(is_bent, slope, line), torch.where(is_bent, bend, torch.zeros_like(bend))]

    def _directions(self, sigma: float, longest: float = _LONGEST) -> list[Tensor]:
        """From the last D on to sigma: along the line through the last two, and by how its slope changed there."""
        last, before, *earlier = self._past
        ratio = min((sigma - last.sigma) / (last.sigma - before.sigma), longest)
        line = ratio * (last.denoised - before.denoised)
        if not earlier or _DIRECTIONS.get(self.rule, 1) < 2:
            return [line]
        gaps = (last.sigma - before.sigma) / (before.sigma - earlier[0].sigma)
        return [line, line - (ratio * gaps) * (before.denoised - earlier[0].denoised)]


def _missed(gains: list[Tensor], directions: list[Tensor], went: Tensor) -> Tensor:
    """How far from where the model went these shares would have led, squared, [B, 1, ...]."""
    for gain, direction in zip(gains, directions, strict=False):
        went = went - gain * direction
    wide = torch.promote_types(went.dtype, torch.float32)
    missed: Tensor = went.to(wide).square().flatten(1).sum(1)
    return missed.reshape(-1, *[1] * (went.ndim - 1))


def _gains(directions: list[Tensor], went: Tensor) -> list[Tensor]:
    """By which shares of the directions the model went, for each item of the batch, [B, 1, ...] each.

    The least squares answer, limited; 0 for a direction of no length.
    """
    wide = torch.promote_types(went.dtype, torch.float32)  # 16 bits do not hold sums of squares
    ways, way = [direction.flatten(1).to(wide) for direction in directions], went.flatten(1).to(wide)
    along = [(each * way).sum(1) for each in ways]
    lengths = [(each * each).sum(1) for each in ways]
    if len(ways) == 1:
        shares = [_quotient(along[0], lengths[0])]
    else:
        first, second = (length * (1 + _RIDGE) for length in lengths)
        both = (ways[0] * ways[1]).sum(1)
        area = first * second - both * both
        shares = [
            _quotient(along[0] * second - along[1] * both, area),
            _quotient(along[1] * first - along[0] * both, area),
        ]
    limited = [share.clamp(*limits) for share, limits in zip(shares, _LIMITS, strict=False)]
    return [share.to(went.dtype).reshape(-1, *[1] * (went.ndim - 1)) for share in limited]


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below, torch.zeros_like(above))
