"""Packages in memory, each of which waits for the next engine of its file once nobody computes by it.

A package's library can be loaded into a process, but not taken out again: compilers mark some of C++'s variables as
unique in a process, and the system keeps what holds such a one. Whoever loaded a package at each use would lose its
memory each time, megabytes on the CPU. It is also quicker: nothing is unpacked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ..core.errors import IncompatibleEngine
from ..core.streams import on_device
from .unpacked import marked

_KEPT = 64
"""Packages that wait: what torch has unpacked of each lies in the folder for temporary files."""

Identity = tuple[str, int, int, int, int]
"""A file's path, inode, size and time of change, and the index of the device."""


class Package:
    """A loaded package, in the hands of one engine. When that lets go of it, another engine may have it."""

    def __init__(self, loaded: _Loaded) -> None:
        self._loaded = loaded

    @property
    def weight_names(self) -> frozenset[str]:
        """Names of the weights that the code takes from `fill`."""
        return frozenset(self._loaded.loader.get_constant_fqns())

    def run(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute fresh tensors, and empty the list of inputs."""
        outputs: Sequence[torch.Tensor] = self._loaded.loader.boxed_run(inputs)
        return outputs

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Let the package compute with `weights`, which the caller keeps alive."""
        self._loaded.fill(weights)


class _Loaded:
    """torch's loader of a package, with the tensors from which it reads its weights.

    torch never frees a tensor that was given to a package, even when both are gone. So a package is given one tensor a
    weight for good, and an update only points these tensors at other storage, which they do not own.
    """

    def __init__(self, identity: Identity, loader: Any) -> None:
        self.identity = identity
        self.loader = loader
        self._slots: dict[str, torch.Tensor] = {}
        self._addresses: list[int] = []

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.inference_mode(False):  # slots outlive a host's inference mode
            for name, tensor in weights.items():
                if (slot := self._slots.get(name)) is None:
                    slot = self._slots[name] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                memory, offset = _lent(tensor.untyped_storage()), tensor.storage_offset()
                slot.set_(memory, offset, tensor.shape, tensor.stride())
        addresses = [tensor.data_ptr() for tensor in self._slots.values()]
        if addresses != self._addresses:  # each hand-over costs a few bytes that are never freed
            self._addresses = []
            self.loader.load_constants(self._slots, False, True, True)  # no standby, all of them, ours to keep alive
            self._addresses = addresses


def _lent(memory: torch.UntypedStorage) -> Any:
    """The same memory as a storage that does not own it."""
    return torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes())


class _Waiting:
    """Packages that nobody computes by, the one that has waited longest first."""

    def __init__(self) -> None:
        self._let_go = SimpleQueue[_Loaded]()  # the one container that a finalizer may use amid any other work
        self._loaded: list[_Loaded] = []
        self._lock = threading.Lock()

    def lend(self, loaded: _Loaded) -> Package:
        """A package, which comes back when its owner lets go of it."""
        package = Package(loaded)
        weakref.finalize(package, self._let_go.put, loaded).atexit = False
        return package

    def take(self, identity: Identity) -> _Loaded | None:
        """One of the file, if there is one. Those whose file has changed or is gone are closed, and those too many."""
        with self._lock:
            while not self._let_go.empty():
                self._loaded.append(self._let_go.get())
            found = next((loaded for loaded in self._loaded if loaded.identity == identity), None)
            kept = [loaded for loaded in self._loaded if loaded is not found and _is_there(loaded.identity)]
            self._loaded = kept[-_KEPT:]
        return found


_waiting = _Waiting()


def load_package(path: Path, device: torch.device) -> Package:
    """A package that nobody else computes by, loaded if none of this file waits.

    Raises:
        IncompatibleEngine: it does not fit this machine.
    """
    try:
        identity = _identity(path, _index_of(device))
        loaded = _waiting.take(identity) or _Loaded(identity, _load(path, device))
    except Exception as error:  # the loader raises RuntimeError for anything from a bad archive to a missing symbol
        raise IncompatibleEngine(f"{path.name} cannot be loaded on this machine: {error}") from error
    return _waiting.lend(loaded)


def _index_of(device: torch.device) -> int:
    """The device as the loader is told it; -1 for the current GPU, and for the CPU."""
    return device.index if device.type == "cuda" and device.index is not None else -1


def _load(path: Path, device: torch.device) -> Any:
    # What `torch._inductor.aoti_load_package` ends with; but that first imports the compiler, seconds at each start,
    # and runs the C++ compiler to look at the CPU. Single-threaded, since the events by which it waits for other
    # threads cannot be captured in a CUDA graph. It makes the package's GPU the current one, for good.
    with marked(), on_device(device):
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, _index_of(device))


def _identity(path: Path, index: int) -> Identity:
    status = path.stat()
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns, index


def _is_there(identity: Identity) -> bool:
    try:
        return _identity(Path(identity[0]), identity[-1]) == identity
    except OSError:
        return False
