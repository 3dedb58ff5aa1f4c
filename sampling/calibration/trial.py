"""How close selections of steps come to the full run, on one set of pictures."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..metrics import PSNR_CAP, capped, latent_psnr
from ..schedule import Steps

Sample = Callable[[Steps | None], Tensor]
"""The final latents [B, ...] of a set of pictures of which only these steps are computed; None computes all."""

Decibels = tuple[float, ...]
"""Latent PSNR of each picture to its full run, between -100 and 100; higher is closer."""


class Trial:
    """Runs selections of steps, each at most once, and compares them with the full run, which comes first.

    Args:
        sample: always the same pictures.
        ran: called after each run; what it raises ends the trial.

    Attributes:
        runs: so far, of the whole set.

    Raises:
        ValueError: the full run gave NaN or Inf.
    """

    def __init__(self, sample: Sample, ran: Callable[[], None]) -> None:
        self._sample = sample
        self._ran = ran
        self._known: dict[Steps, Decibels] = {}
        self.runs = 0
        self._reference = self._counted(lambda: sample(None))
        if not self._reference.isfinite().all():
            raise ValueError(
                "The run that computes every step gave NaN or Inf, so nothing can be compared with it. Find out why, "
                "often it is fp16; choose another precision for the model"
            )

    def of(self, computed: Steps) -> Decibels:
        """With these steps computed."""
        if computed not in self._known:
            self._known[computed] = self.compared(lambda: self._sample(computed))
        return self._known[computed]

    def mean(self, computed: Steps) -> float:
        return mean(self.of(computed))

    def error(self, computed: Steps) -> float:
        """Root mean square error, in ranges of the full run's latent; the mean of the pictures."""
        return mean(tuple(10.0 ** (-decibels / 20.0) for decibels in self.of(computed)))

    def compared(self, run: Callable[[], Tensor]) -> Decibels:
        """Of another way to sample the same pictures."""
        decibels = capped(latent_psnr(self._counted(run), self._reference))
        return tuple(decibels.nan_to_num(nan=-PSNR_CAP).tolist())

    def _counted(self, run: Callable[[], Tensor]) -> Tensor:
        latents = run()
        self.runs += 1
        self._ran()
        return latents


def mean(values: Decibels) -> float:
    return sum(values) / len(values)
