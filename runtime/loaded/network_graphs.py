"""CUDA graphs of networks whose blocks are on engines, kept from one picture to the next."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import ref

import torch

from .canary import Canary, EngineCanary
from .cuda_graphs import CudaGraphs, Graphing

_NETWORKS_KEPT = 5
"""That nobody calls at the moment: a model and several ControlNets take part in one picture."""


@dataclass
class _Kept:
    """
    Attributes:
        wholes: of whole calls of the network.
        parts: of calls of its blocks.
        inner: of calls of its blocks in the midst of such a call.
        canaries: by the digests of the engines that are captured together.
        lock: held while the graphs are used, or dropped.
        depth: of how many calls, one in the midst of another, they are used in.
    """

    network: ref[torch.nn.Module]
    device: torch.device
    graphing: Graphing
    wholes: CudaGraphs
    parts: CudaGraphs
    inner: CudaGraphs
    canaries: dict[frozenset[str], EngineCanary] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    depth: int = 0

    @property
    def bytes(self) -> int:
        return self.wholes.bytes + self.parts.bytes + self.inner.bytes

    def drop(self) -> None:
        for graphs in (self.wholes, self.parts, self.inner):
            graphs.drop()

    def wanted(self, parts: bool) -> CudaGraphs | None:
        """Those that nobody computes by at the moment, in whose memory nothing is left for later."""
        if self.depth == 0:
            return self.parts if parts else self.wholes
        return self.inner if parts and self.depth == 1 else None


class NetworkGraphs:
    """One set of graphs for each network; those that no run uses give way.

    Args:
        capture_library: the folder of the library by which CUDA graphs are captured; None: none are.
        canary: knows engines that ended an earlier process.
    """

    def __init__(self, capture_library: Path | None = None, canary: Canary | None = None) -> None:
        self._capture_library, self._canary = capture_library, canary
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._running: Counter[int] = Counter()
        self._lock = threading.Lock()

    def may_be_had(self, device: torch.device) -> bool:
        """Whether anything is captured for a device."""
        return device.type == "cuda" and self._capture_library is not None

    @contextmanager
    def running(self, network: torch.nn.Module) -> Iterator[None]:
        """Meanwhile the graphs of a network stay."""
        number = id(network)
        with self._lock:
            self._running[number] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[number] -= 1
                self._running += Counter()  # without zeros
                idle = [number for number in self._kept if number not in self._running]
                dead = [number for number in idle if self._kept[number].network() is None]
                alive = [number for number in idle if number not in dead]
                self._drop([*dead, *alive[:-_NETWORKS_KEPT]])

    @contextmanager
    def using(
        self, network: torch.nn.Module, device: torch.device, digests: frozenset[str], parts: bool = False
    ) -> Iterator[CudaGraphs | None]:
        """Where whole calls of a network are captured and replayed; None where they cannot be, or another thread does.

        Args:
            digests: of the engines that take part. Should a capture end the process, none is captured with them again.
            parts: calls of its blocks are wanted instead, one by one; in the midst of a call, too.
        """
        kept = self._kept_for(network, device)
        if not kept.lock.acquire(blocking=False):
            yield None
            return
        outer, graphs = kept.graphing.canary, kept.wanted(parts)
        kept.depth += 1
        try:
            canary = kept.canaries.get(digests)
            if canary is None or canary.is_outdated:
                canary = kept.canaries[digests] = EngineCanary(self._canary, *sorted(digests))
            kept.graphing.canary = canary
            yield graphs if graphs is not None and graphs.are_possible else None
        finally:
            kept.depth -= 1
            kept.graphing.canary = outer
            kept.lock.release()

    def are_used(self, network: torch.nn.Module) -> bool:
        """Whether a call of a network, or of a part of it, is in the midst of a replay."""
        kept = self._kept.get(id(network))
        return kept is not None and kept.depth > 0

    def drop(self, network: torch.nn.Module) -> None:
        """Give back the memory of a network's graphs."""
        with self._lock:
            self._drop([id(network)])

    def clear(self) -> None:
        """The same for all networks that no run uses."""
        with self._lock:
            self._drop([number for number in self._kept if number not in self._running])

    def device_bytes(self, device: torch.device) -> int:
        """Device memory of all graphs, in bytes."""
        with self._lock:
            return sum(kept.bytes for kept in self._kept.values() if kept.device == device)

    def free(self, device: torch.device, wanted: float) -> int:
        """Drop graphs that no run uses, those that were used longest ago first.

        Returns:
            Bytes freed: less than wanted where the rest is in use.
        """
        freed = 0
        with self._lock:
            for number, kept in [*self._kept.items()]:
                if freed < wanted and kept.device == device and number not in self._running:
                    held = kept.bytes
                    self._drop([number])
                    freed += 0 if number in self._kept else held
        return freed

    def _kept_for(self, network: torch.nn.Module, device: torch.device) -> _Kept:
        number = id(network)
        with self._lock:
            known = self._kept.get(number)
            if known is not None and (known.network() is not network or known.device != device):
                self._drop([number])
                known = None
            if known is None:
                graphing = Graphing(self._capture_library)
                parts, inner = (CudaGraphs(device, graphing, are_many=True) for _ in range(2))
                known = _Kept(ref(network), device, graphing, CudaGraphs(device, graphing), parts, inner)
                self._kept[number] = known
            self._kept.move_to_end(number)
            return known

    def _drop(self, numbers: Iterable[int]) -> None:
        """Drop graphs, but for those that are used at this moment, in this thread or another."""
        for number in numbers:
            kept = self._kept.get(number)
            if kept is None or not kept.lock.acquire(blocking=False):
                continue
            try:
                if not kept.depth:
                    del self._kept[number]
                    kept.drop()
            finally:
                kept.lock.release()
