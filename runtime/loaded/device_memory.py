"""Device memory: how much is free, whether it ran out, and which engines found too little of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch

from ...core.formatting import say_bytes

_ATTEMPTS = 2
"""Times that an engine may run out of memory before it is left alone."""
_TELLING_BYTES = 256 << 20
"""So much more free memory makes another attempt worth its while."""
_TIGHT_BYTES = 1 << 30
"""With less than this free, an error that says nothing is put down to memory where nobody counts."""
_ADVICE = "Make smaller pictures or batches, unload other models, or close other programs that use the GPU"


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device`, torch's unused reserve included; None where that is not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def bytes_for_others(device: torch.device) -> int | None:
    """Bytes that other processes can allocate on `device`, without torch's unused reserve; None where not known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info(device)[0]


class DeviceRoom:
    """Memory of the device for builds that nobody waits for. This one lets them take what they find."""

    def is_there(self, device: torch.device, needed: int) -> bool:
        """Whether a build that needs so many bytes may begin; where not, it asks again soon."""
        return True

    def is_wanted_back(self, device: torch.device) -> bool:
        """Whether a build that holds still has to end, and begin anew later, since others need its memory."""
        return False


def give_back_unused(device: torch.device) -> None:
    """Let other allocators, such as those of CUDA graphs, have what torch only keeps in reserve."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class MemoryWatch:
    """Tells whether the device ran out of memory since this was made, even where the error does not say so."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _times_out_of_memory(device)

    def ran_out(self, error: BaseException) -> bool:
        """Whether `error` comes of it: compiled packages raise a plain `RuntimeError` for whatever goes wrong."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if not isinstance(error, RuntimeError):
            return False
        if "out of memory" in str(error).lower() or _times_out_of_memory(self._device) > self._before:
            return True
        free = free_bytes(self._device) if _counts_nothing(self._device) else None
        return free is not None and free < _TIGHT_BYTES


def _times_out_of_memory(device: torch.device) -> int:
    if _counts_nothing(device):
        return 0
    stats: Mapping[str, int] = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats.get("num_ooms", 0))


def _counts_nothing(device: torch.device) -> bool:
    """CUDA's own asynchronous allocator, which ComfyUI prefers, does not count, and must not be asked in a capture."""
    return device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native"


@dataclass
class _Shortage:
    times: int
    free: int | None


class Shortages:
    """Engines for which memory did not suffice in this process. Safe to use from any thread.

    Args:
        free: bytes of a device that the host could give an engine; `free_bytes` where it is not asked.
    """

    def __init__(self, free: Callable[[torch.device], int | None] | None = None) -> None:
        self._free = free or (lambda device: free_bytes(device))
        self._known: dict[tuple[str, torch.device], _Shortage] = {}
        self._lock = threading.Lock()

    def note(self, digest: str, device: torch.device, needed: int) -> str:
        """Count an attempt that failed. Call it once the engine's own memory has been given back.

        Args:
            needed: bytes beside the model's weights; 0 where unknown.

        Returns:
            What happened and what to do, in words.
        """
        with self._lock:
            earlier = self._known.get((digest, device))
            times = earlier.times + 1 if earlier else 1
            self._known[digest, device] = _Shortage(times, self._free(device))
        beside = f" (it needs about {say_bytes(needed)} beside the model)" if needed else ""
        what = f"the engine ran out of GPU memory{beside}; your model runs without an engine"
        return f"{what}. {_ADVICE}" if times < _ATTEMPTS else f"{what}. {_left_alone(times)}"

    def why_not(self, digest: str, device: torch.device) -> str | None:
        """Why another attempt would be in vain; None where it may work."""
        with self._lock:
            known = self._standing(device).get(digest)
        return None if known is None else f"the engine ran out of GPU memory. {_left_alone(known.times)}"

    def is_any(self, device: torch.device, digests: Set[str]) -> bool:
        """Whether another attempt of any of these engines would be in vain."""
        with self._lock:
            return not digests.isdisjoint(self._standing(device))

    def _standing(self, device: torch.device) -> dict[str, _Shortage]:
        """Those of a device that count, by their engines' digests; one since which memory became free does no more."""
        found = {
            digest: known
            for (digest, place), known in self._known.items()
            if place == device and known.times >= _ATTEMPTS
        }
        now = self._free(device) if found else None
        for digest, known in list(found.items()):
            if now is not None and known.free is not None and now - known.free >= _TELLING_BYTES:
                del self._known[digest, device], found[digest]
        return found

    def forget(self, digest: str) -> None:
        """Somebody asks for this engine by hand: earlier attempts count no more."""
        with self._lock:
            self._known = {place: known for place, known in self._known.items() if place[0] != digest}


def _left_alone(times: int) -> str:
    return f"After {times} attempts it is left alone until more memory is free, or Build Engine is run. {_ADVICE}"
