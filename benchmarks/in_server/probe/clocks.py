"""Points in time: on the GPU by CUDA events, which do not hold the host up, and elsewhere by the host's clock."""

from __future__ import annotations

import time
from typing import Union

import comfy.model_management
import torch

Mark = Union[float, torch.cuda.Event]  # noqa: UP007 (evaluated at run time)
"""A point in time: seconds of the host's clock, or a CUDA event that was recorded in the current stream."""


def wait() -> None:
    """Return when the GPU has done all that was asked of it; at once where ComfyUI computes on the CPU."""
    if _is_cuda():
        torch.cuda.synchronize()


def mark() -> Mark:
    """Note a point in time without waiting for the GPU."""
    if not _is_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronised_mark() -> Mark:
    """Note the time on the host's clock at which the GPU has done all that was asked of it."""
    wait()
    return time.perf_counter()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks of one kind; events must have been reached, see `wait`."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert not isinstance(begin, float) and not isinstance(end, float), "marks of two kinds"
    return float(begin.elapsed_time(end)) / 1000


def _is_cuda() -> bool:
    return bool(comfy.model_management.get_torch_device().type == "cuda")
