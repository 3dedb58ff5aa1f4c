"""Counts what the server's process holds, to tell a leak from memory that is only not given back."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import torch

ROUTE = "/slipstream_benchmark/objects"

_COUNTED = ("LoadedEngine", "CompiledEngine", "ModelPatcher", "BaseModel", "ControlNet")
"""Classes whose objects are counted, by name."""


def count_objects() -> dict[str, float]:
    """Return counts of objects that Python's collector knows, and the MB of their tensors' memory on the CPU."""
    gc.collect()
    found = gc.get_objects()
    names = dict.fromkeys(_COUNTED, 0)
    modules, memory = 0, dict[int, int]()
    for each in found:
        kind = type(each)
        if kind.__name__ in names:
            names[kind.__name__] += 1
        if issubclass(kind, torch.nn.Module):
            modules += 1
        elif issubclass(kind, torch.Tensor) and each.device.type == "cpu":
            _add_memory(each, memory)
    mapped = _mapped_packages()
    return {
        "objects": len(found), "modules": modules, "tensors": len(memory), "threads": threading.active_count(),
        "tensors_mb": round(sum(memory.values()) / 2**20, 1), "mapped_packages": mapped, **_allocated(), **names,
    }  # fmt: skip


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns, all in bytes but two counts of blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _allocated() -> dict[str, float]:
    """MB that the C library's allocator has given out, and that it keeps for later; nothing where it does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return {}
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    used, kept = (found.uordblks + found.hblkhd) / 2**20, found.fordblks / 2**20
    return {"allocated_mb": round(used, 1), "kept_mb": round(kept, 1)}


def _add_memory(tensor: Any, memory: dict[int, int]) -> None:
    try:
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return


def _mapped_packages() -> int:
    """Libraries of compiled packages in the process's memory; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return len({line.split(maxsplit=5)[-1] for line in lines if "/data/aotinductor/" in line})
