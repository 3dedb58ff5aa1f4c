"""What stands in for the model in a step that is not computed.

All rules speak of the latent x, its noise level sigma and the denoised latent D that guidance has already formed, in
the terms of k-diffusion: x = D + sigma * noise. So they serve models that predict noise, velocity or flow alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

_LEAST_GAIN, _MOST_GAIN = -0.5, 1.5
_LONGEST = 1.0
"""In gaps between the last two computed steps: how far ahead a line is followed."""


class Reuse(str, Enum):
    """How a skipped step is filled in.

    HOLD: D stays as it is.
    HOLD_NOISE: the noise (x - D) / sigma stays as it is.
    LINEAR: D goes on along the line through the last two computed ones, over sigma.
    MEASURED: as LINEAR, by the share of the way that the model itself went last time: each computed step shows how far
        the line through the two before it would have been right. It holds where the line was of no use.
    """

    HOLD = "hold"
    HOLD_NOISE = "hold noise"
    LINEAR = "linear"
    MEASURED = "measured"


@dataclass(frozen=True)
class Computed:
    """A computed step: sigma, the latent x and the denoised latent, both [B, ...]."""

    sigma: float
    x: Tensor
    denoised: Tensor


class History:
    """The last computed steps of a run, and what they let one expect of the next."""

    def __init__(self, rule: Reuse) -> None:
        self.rule = rule
        self._past: list[Computed] = []  # the newest first
        self._gain: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return not self._past

    def clear(self) -> None:
        self._past = []
        self._gain = None

    def add(self, sigma: float, x: Tensor, denoised: Tensor) -> None:
        """Take note of a computed step. Copies are kept: samplers write into their tensors."""
        if self.rule is Reuse.MEASURED and len(self._past) == 2:
            self._gain = _gain(self._past, sigma, denoised)
        kept = x.clone() if self.rule is Reuse.HOLD_NOISE else x.new_empty(0)
        self._past = [Computed(sigma, kept, denoised.clone()), *self._past[:1]]

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
        if self.rule is Reuse.LINEAR and len(self._past) == 2:
            return self._along(sigma, None)
        if self.rule is Reuse.MEASURED and self._gain is not None:
            return self._along(sigma, self._gain)
        return last.denoised.clone()

    def _along(self, sigma: float, gain: Tensor | None) -> Tensor:
        last, before = self._past
        ratio = min((sigma - last.sigma) / (last.sigma - before.sigma), _LONGEST)
        share = ratio if gain is None else ratio * gain
        return last.denoised + share * (last.denoised - before.denoised)


def _gain(past: list[Computed], sigma: float, denoised: Tensor) -> Tensor:
    """How far the line through the last two was right at this step: 1 all the way, 0 not at all. [B, 1, ...].

    The least squares answer to `denoised - D1 = gain * ratio * (D1 - D2)`, for each item of the batch.
    """
    last, before = past
    ratio = (sigma - last.sigma) / (last.sigma - before.sigma)
    wide = torch.promote_types(denoised.dtype, torch.float32)  # 16 bits do not hold sums of squares
    way = (last.denoised - before.denoised).flatten(1).to(wide)
    went = (denoised - last.denoised).flatten(1).to(wide)
    along, length = (went * way).sum(1), ratio * (way * way).sum(1)
    gain = torch.where(length > 0, along / length, torch.zeros_like(along)).clamp(_LEAST_GAIN, _MOST_GAIN)
    return gain.to(denoised.dtype).reshape(-1, *[1] * (denoised.ndim - 1))
