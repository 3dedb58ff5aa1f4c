"""What the model gave in each step of a full run, for runs that begin like it.

Models are changed in place: hand in clones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....sampling.run import SAME_SIGMA
from ..process.build_waiting import throw_if_cancelled
from .wrapper_keys import RECORDING

Predict = Callable[..., torch.Tensor]


class Recording:
    """One picture's. Up to the first skipped step a run is the full run: nothing needs to be computed again there."""

    def __init__(self) -> None:
        self._denoised: dict[float, torch.Tensor] = {}

    def make(self, patcher: Any) -> None:
        """Record the next run of `patcher`, on the CPU."""

        def record(executor: Any, x: torch.Tensor, timestep: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            denoised: torch.Tensor = executor(x, timestep, *rest, **more)
            self._denoised[_sigma(timestep)] = denoised.cpu().clone()
            return denoised

        _around(patcher, record)

    def play(self, patcher: Any, least: float) -> None:
        """Let `patcher` give what was recorded in all steps whose sigma is `least` or more."""

        def replay(executor: Any, x: torch.Tensor, timestep: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            known = self._denoised.get(_sigma(timestep)) if _sigma(timestep) >= least * (1 - SAME_SIGMA) else None
            if known is None:
                computed: torch.Tensor = executor(x, timestep, *rest, **more)
                return computed
            return known.to(x.device, copy=True)

        _around(patcher, replay)


def watch(patcher: Any) -> None:
    """Let runs of `patcher` end at the next step when the user cancels."""

    def check(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        throw_if_cancelled()
        result: torch.Tensor = executor(*args, **kwargs)
        return result

    _around(patcher, check)


def _around(patcher: Any, predict: Predict) -> None:
    """Inside of `step_skip`, which sees to that: skipped steps never come here."""
    from comfy.patcher_extension import WrappersMP

    patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, RECORDING, predict)  # several are called one in another


def _sigma(timestep: torch.Tensor) -> float:
    return float(timestep.flatten()[0])
