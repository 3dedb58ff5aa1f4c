"""Points in time: on the GPU by CUDA events, which do not hold the host up, and elsewhere by the host's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import comfy.model_management
import torch


@dataclass(frozen=True)
class Mark:
    """A point in time.

    Attributes:
        host: seconds of the host's clock.
        event: one that was recorded in the current stream; None where the host's clock is meant.
    """

    host: float
    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Return when the GPU has reached it."""
        if self.event is not None:
            self.event.synchronize()


def wait() -> None:
    """Return when the GPU has done all that was asked of it; at once where ComfyUI computes on the CPU."""
    if _is_cuda():
        torch.cuda.synchronize()


def mark() -> Mark:
    """Note a point in time without waiting for the GPU."""
    if not _is_cuda():
        return Mark(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Mark(time.perf_counter(), event)


def synchronised_mark() -> Mark:
    """Note the time on the host's clock at which the GPU has done all that was asked of it."""
    wait()
    return Mark(time.perf_counter())


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks that were reached; where they lie on two GPUs, between the host's notes."""
    if begin.event is None or end.event is None or begin.event.device != end.event.device:
        return end.host - begin.host
    return float(begin.event.elapsed_time(end.event)) / 1000


def _is_cuda() -> bool:
    return bool(comfy.model_management.get_torch_device().type == "cuda")
