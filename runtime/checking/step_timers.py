"""Takes the times of steps and calls as they are made. One mark of the device each; nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..loaded.device_clock import disturbances
from .step_times import StepTimes, TimedStep

_COLD_STEPS = 2
"""At the beginning of a run."""

_Answer = TypeVar("_Answer")

_local = threading.local()


@contextmanager
def on_purpose() -> Iterator[None]:
    """Whatever this thread computes meanwhile is computed by the user's model, to compare times."""
    _local.on_purpose = True
    try:
        yield
    finally:
        _local.on_purpose = False


def is_on_purpose() -> bool:
    return getattr(_local, "on_purpose", False)


class StepTimer:
    """Times the steps of one run.

    A step lasts until the next one begins: it holds all that a step costs, the sampler and previews included. So the
    last one of a run is not timed, whatever came after it. Nor are the first two, nor one before which something else
    computed, nor one in which an engine was loaded, compared or captured, or while the device was used for a build.
    """

    def __init__(self, times: StepTimes, device: torch.device) -> None:
        self._times = times
        self._clock = times.clock_of(device)
        self._mark: Any = None
        self._state: tuple[int, bool] | None = None
        self._last: TimedStep | None = None
        self._done = 0

    def begin(self, done: TimedStep | None) -> bool:
        """A step begins.

        Args:
            done: the one that ends with that; None where there was none, or it called no model.

        Returns:
            Whether that one was counted.
        """
        begin, end = self._mark, self._clock.mark()
        before, now = self._state, (disturbances(), self._times.is_busy())
        self._mark, self._state = end, now
        if done is None:
            return False
        self._done += 1
        is_warm = self._done > _COLD_STEPS and done == self._last and before == now and not now[1]
        self._last = done
        if not is_warm or done.work is None or begin is None or end is None:
            return False
        self._times.add(self._clock, done, begin, end)
        return True


class CallTimer:
    """Times single calls of one run, of a VAE or a ControlNet.

    Args:
        cold: calls at the beginning that are not counted. Nor is the first of each kind in this process, nor one in
            which an engine was loaded, compared or captured.
    """

    def __init__(self, times: StepTimes, device: torch.device, cold: int) -> None:
        self._times = times
        self._clock = times.clock_of(device)
        self._cold = cold

    def __call__(self, compute: Callable[[], _Answer], done: Callable[[], TimedStep]) -> _Answer:
        """What `compute` gives.

        Args:
            done: asked afterwards who computed it.
        """
        begin, before = self._clock.mark(), disturbances()
        answer = compute()
        end, step = self._clock.mark(), done()
        self._cold -= 1
        is_warm = step.work is not None and self._times.has_met(step) and self._cold < 0
        is_usual = before == disturbances() and not self._times.is_busy()
        if is_warm and is_usual and begin is not None and end is not None:
            self._times.add(self._clock, step, begin, end)
        return answer
