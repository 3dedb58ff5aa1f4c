"""Memory that was freed on the CPU is given back to the system.

glibc gives back by itself only what lies at the end of its heaps. Weights come and go with each LoRA, and a small block
that stays above them keeps their memory in the process, more of it with each hundred pictures.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable

import torch

_SECONDS = 10.0
"""Between two times, each of which costs some milliseconds."""


class FreedMemory:
    """Gives freed memory back now and then. Safe to use from any thread."""

    def __init__(self) -> None:
        self._next = 0.0
        self._lock = threading.Lock()

    def give_back(self, device: torch.device) -> None:
        """Let other programs have what the C library keeps, if `device` is the CPU and it was not done just now."""
        with self._lock:
            if device.type != "cpu" or time.monotonic() < self._next:
                return
            self._next = time.monotonic() + _SECONDS
        if (trim := _trim()) is not None:
            trim(0)


@functools.lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None with another C library."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes = [ctypes.c_size_t]
    found: Callable[[int], int] = trim
    return found
