"""The memory of CUDA graphs: how much there is, and that it is given back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_RESERVED_NOW = 2
"""CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT of the CUDA driver."""


class GraphMemory:
    """What the graphs of one engine allocate, through every capture. They never run at the same time.

    It lies in a pool of torch's own allocator, or, with CUDA's asynchronous allocator, which ComfyUI prefers, in one
    that the driver keeps for all graphs of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_native = torch.cuda.get_allocator_backend() == "native"
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.bytes = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a capture."""
        before = self._reserved()
        if self._is_native:
            # Matrix products keep a workspace per stream: it must lie in the graph's own memory, out of others' way.
            torch._C._cuda_clearCublasWorkspaces()
        yield
        if self._is_native:
            torch._C._cuda_clearCublasWorkspaces()
        self.bytes += max(0, self._reserved() - before)

    def abandon_capture(self) -> None:
        """Tell torch's allocator that a capture which failed is over."""
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(_index(self._device), self.handle)

    def release(self) -> None:
        """Give back what the graphs, which are gone, took."""
        self.bytes = 0
        torch.cuda.empty_cache()
        if not self._is_native and (driver := _driver()) is not None:
            driver.cuDeviceGraphMemTrim(_index(self._device))

    def _reserved(self) -> int:
        """Bytes of the device that this process holds, for graphs at least."""
        if self._is_native:
            return torch.cuda.memory_reserved(self._device)
        value = ctypes.c_uint64(0)
        if (driver := _driver()) is not None:
            driver.cuDeviceGetGraphMemAttribute(_index(self._device), _RESERVED_NOW, ctypes.byref(value))
        return value.value


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def _driver() -> Any:
    """The CUDA driver's library, which every process with a GPU has loaded."""
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
