"""Marks in a device's work and the time between them, read once the device has passed them: nobody waits for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def mark(self) -> Any:
        """This moment in the device's work; None where none can be marked, as while a CUDA graph is captured."""
        ...

    def milliseconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks; None where the device has not got to the second one, or cannot be asked now."""
        ...


class HostClock:
    """For work that has been done when its call returns, as on a CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def milliseconds(self, begin: float, end: float) -> float:
        return (end - begin) * 1000


class CudaClock:
    """By events on the current stream, and by the host's own clock: work that a GPU does goes on behind the host.

    Of the two times the longer one counts. A step that waits for the CPU shows its full time on the GPU only where
    nothing lies before it in the GPU's queue, and a step that waits for the GPU never shows it on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> tuple[torch.cuda.Event, float] | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event, time.perf_counter()

    def milliseconds(self, begin: tuple[torch.cuda.Event, float], end: tuple[torch.cuda.Event, float]) -> float | None:
        if torch.cuda.is_current_stream_capturing() or not (begin[0].query() and end[0].query()):
            return None
        return max(float(begin[0].elapsed_time(end[0])), (end[1] - begin[1]) * 1000)


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


class _Disturbances:
    count = 0


def disturb() -> None:
    """Note that an engine is being loaded, compared or captured: what is timed meanwhile is not as it will be."""
    _Disturbances.count += 1


def disturbances() -> int:
    """How often there was such work in this process: equal before and after what may be timed."""
    return _Disturbances.count
