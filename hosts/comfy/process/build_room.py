"""Memory on the device for builds that nobody waits for, which ComfyUI gives while it is idle."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch

from ....runtime.loaded.device_memory import DeviceRoom, bytes_for_others
from .server_events import server_of_process
from .staged_pages import kept_free, loaded_on

log = logging.getLogger(__name__)

_UNLOAD = "unload_models"
"""The flag that ComfyUI's `/free` sets: its prompt worker unloads all models, and keeps what its nodes made."""

_PATIENCE_SECONDS = 30.0
"""For so long ComfyUI has to be idle before it is asked to unload models, which the next picture loads again."""

_ANSWER_SECONDS = 15.0
"""Within that time memory is free, or a build begins without it."""


class BuildRoom(DeviceRoom):
    """Memory for builds. Where it lacks, ComfyUI is asked for it once: while it is idle, and in its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts = -1
        """How many ComfyUI had begun when it was seen idle."""
        self._idle_since = self._asked = 0.0
        self._request: _Request | None = None
        self._has_given = False
        """Whether ComfyUI gave memory since its last prompt."""

    def is_there(self, device: torch.device, needed: int) -> bool:
        """See `DeviceRoom`. What ComfyUI cannot give once it is idle is not waited for."""
        queue = getattr(server_of_process(), "prompt_queue", None)
        if queue is None or queue.get_tasks_remaining():  # in the midst of a picture the device is asked nothing
            return True
        with self._lock:
            now = time.monotonic()
            if queue.task_counter != self._prompts:
                self._prompts, self._idle_since = queue.task_counter, now
                self._request, self._has_given = None, False
            self._has_given |= self._request is not None and self._request.is_heard
            short = _short_of(device, needed)
            if short <= 0:
                self._request = None
                return True
            if now - self._idle_since < _PATIENCE_SECONDS:  # within which ComfyUI also empties torch's reserve
                return False
            if self._request is None and short > _loaded(device):  # all would be unloaded in vain
                return True
            if self._request is None:
                self._request, self._asked = _Request(queue, device, needed), now
            self._request.put()
            return now - self._asked > _ANSWER_SECONDS

    def is_wanted_back(self, device: torch.device) -> bool:
        """See `DeviceRoom`: the next picture gets back all that models gave for builds."""
        return self._has_given


class _Request:
    """The flag's value. ComfyUI asks whether it is true in the thread that may unload, and at no other time.

    What suffices is given back in answering, which costs the next picture less than to load all models again. Only
    where that leaves too little to other processes, since it lies scattered, the answer is to unload all.

    Attributes:
        is_heard: whether ComfyUI asked, and was idle still.
    """

    def __init__(self, queue: Any, device: torch.device, needed: int) -> None:
        self._queue, self._device, self._needed = queue, device, needed
        self._prompts = queue.task_counter
        self.is_heard = False

    def put(self) -> None:
        """Set the flag until it is heard: ComfyUI's thread misses it where it did not wait for a prompt just then."""
        others = [flag for flag in self._queue.get_flags(reset=False).values() if flag is not self]
        if not self.is_heard and not others:  # a person's wish to unload everything goes first
            self._queue.set_flag(_UNLOAD, self)

    def __bool__(self) -> bool:
        has_worked = self._queue.task_counter != self._prompts or self._queue.get_tasks_remaining()
        if self.is_heard or has_worked:
            return False
        self.is_heard = True
        try:
            return self._is_to_unload_all()
        except Exception:  # in ComfyUI's thread, which would end
            log.debug("Slipstream: ComfyUI cannot give memory back for a build", exc_info=True)
            return False

    @torch.inference_mode()
    def _is_to_unload_all(self) -> bool:
        import comfy.model_management as management

        log.info("Slipstream: ComfyUI unloads models for a build; the next picture loads them again")
        management.soft_empty_cache()
        # Twice as much: what a build needs is known roughly.
        management.free_memory(2 * self._needed + _reserve(), self._device)
        management.soft_empty_cache()
        return _short_of(self._device, self._needed) > 0


def _short_of(device: torch.device, needed: int) -> int:
    """Bytes that another process lacks, beside what ComfyUI leaves free; 0 where that is not known."""
    free = bytes_for_others(device)
    return 0 if free is None else needed + _reserve() - free


def _reserve() -> int:
    import comfy.model_management as management

    return int(management.extra_reserved_memory()) + kept_free()


def _loaded(device: torch.device) -> int:
    """Bytes of ComfyUI's models on a device, engines among them."""
    return sum(int(patcher.loaded_size()) for patcher in loaded_on(device))
