"""Dynamic VRAM without a GPU: ComfyUI's own patcher stages a model's weights in memory of pages that can be taken away.

What comes from comfy_aimdo's library is replaced; all of ComfyUI's own code runs.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest
import torch

from slipstream.hosts.comfy.process import current_weights, staged_pages

PAGE = 4096
DEVICE = torch.device("cpu", 0)
"""Not equal to "cpu", where weights lie before they are staged."""


class Pages:
    """Memory of one model behind addresses that never change; what comes back after it was taken away is rubbish.

    Attributes:
        capacity: pages for which there is memory.
        counts_holders: whether a page stays until all who hold it let go, as since comfy-aimdo 0.3.0.
        watermark: pages from here on are closed, also those that are held.
    """

    counts_holders = True

    def __init__(self, size: int, device: int) -> None:
        self.memory = torch.zeros(int(size) // PAGE * PAGE + PAGE, dtype=torch.uint8)
        self.base_addr = self.memory.data_ptr()
        self.offset = 0
        self.capacity = self.watermark = len(self.memory) // PAGE
        self.resident: dict[int, int] = {}
        self.serials: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.prioritized = 0

    def alloc(self, size: int) -> tuple[Any, int, int]:
        self.offset = (self.offset + 511) & ~511
        start, self.offset = self.base_addr + self.offset, self.offset + size
        return self, start, size

    def fault(self, address: int, size: int) -> Any:
        pages = self._pages(address, size)
        if pages.stop > self.watermark:
            return None
        missing = [page for page in pages if page not in self.resident]
        while len(self.resident) + len(missing) > self.capacity and self.watermark:
            self.watermark -= 1  # as the library makes room: what it gives up it does not need for this
            self.take_away(self.watermark)
        if pages.stop > self.watermark:
            return None
        for page in missing:
            self.serials[page] = self.resident[page] = self.serials.get(page, 0) + 1
            self.memory[page * PAGE : (page + 1) * PAGE] = 255
        for page in pages:
            self.pins[page] = self.pins.get(page, 0) + 1 if self.counts_holders else 1
        signature = (ctypes.c_uint32 * (size // PAGE + 2))()
        signature[: len(pages)] = [self.resident[page] for page in pages]
        return signature

    def unpin(self, address: int, size: int) -> None:
        for page in self._pages(address, size):
            self.pins[page] = max(0, self.pins.get(page, 0) - 1) if self.counts_holders else 0
            if page >= self.watermark:
                self.take_away(page)

    def take_away(self, *pages: int) -> None:
        """As under pressure; those that are held stay."""
        for page in pages or list(self.resident):
            if not self.pins.get(page):
                self.resident.pop(page, None)

    def free_memory(self, size: float) -> int:
        """From the last page on, until enough is free; the watermark sinks past those that are held."""
        before = len(self.resident)
        while self.watermark and (before - len(self.resident)) * PAGE < size:
            self.watermark -= 1
            self.take_away(self.watermark)
        return (before - len(self.resident)) * PAGE

    def prioritize(self) -> None:
        self.prioritized += 1
        self.watermark = len(self.memory) // PAGE

    def loaded_size(self) -> int:
        return len(self.resident) * PAGE

    @property
    def held(self) -> int:
        return sum(count > 0 for count in self.pins.values())

    def _pages(self, address: int, size: int) -> range:
        start = address - self.base_addr
        return range(start // PAGE, -(-(start + size) // PAGE))


class _HostBuffer:
    """No weight is kept in pinned memory."""

    size = 0

    def __init__(self, *_: Any) -> None: ...


def switch_on(monkeypatch: pytest.MonkeyPatch) -> type:
    """Returns ComfyUI's kind of patcher that stages weights; skips the test where there is none."""
    patchers = importlib.import_module("comfy.model_patcher")
    kind: type | None = getattr(patchers, "ModelPatcherDynamic", None)
    if kind is None:
        pytest.skip("this ComfyUI has no dynamic VRAM")
    aimdo = importlib.import_module("comfy_aimdo")
    for name in ("model_vbar", "host_buffer", "torch"):
        importlib.import_module(f"comfy_aimdo.{name}")
    management = importlib.import_module("comfy.model_management")
    monkeypatch.setattr(aimdo.model_vbar, "ModelVBAR", Pages)
    monkeypatch.setattr(aimdo.host_buffer, "HostBuffer", _HostBuffer)
    monkeypatch.setattr(aimdo.torch, "aimdo_to_tensor", _tensor)
    monkeypatch.setattr(management, "is_device_cpu", lambda device: False)
    monkeypatch.setattr(management, "get_offload_stream", lambda device: None)
    pinned = importlib.import_module("comfy.pinned_memory")
    for name in ("get_pin", "pin_memory"):
        monkeypatch.setattr(pinned, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(staged_pages, "_PAGE_BYTES", PAGE)
    # Small weights are copied from "cpu" to `DEVICE`; on a GPU they lie there already.
    monkeypatch.setattr(current_weights.copies, "of", lambda *args: {})
    return kind


def _tensor(alloc: tuple[Pages, int, int], device: object) -> torch.Tensor:
    pages, address, size = alloc
    start = address - pages.base_addr
    return pages.memory[start : start + size]
