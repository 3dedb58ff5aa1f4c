"""CUDA graphs of whole calls of networks whose blocks are on engines, kept from one picture to the next."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

import torch

from .canary import Canary, EngineCanary
from .cuda_graphs import CudaGraphs, Graphing

_NETWORKS_KEPT = 2
"""That nobody calls at the moment."""


@dataclass
class _Kept:
    """
    Attributes:
        digests: of the engines that the graphs launch.
    """

    network: ref[torch.nn.Module]
    digests: frozenset[str]
    device: torch.device
    canary: EngineCanary
    graphs: CudaGraphs


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
        self._lock = threading.RLock()

    @contextmanager
    def running(self, network: torch.nn.Module) -> Iterator[None]:
        """Meanwhile the graphs of a network stay, except for their own run's reasons."""
        with self._lock:
            self._running[id(network)] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[id(network)] -= 1
                surplus = [*filter(self._may_go, self._kept)]
                dead = [number for number in surplus if self._kept[number].network() is None]
                self._drop(dict.fromkeys([*dead, *surplus[:-_NETWORKS_KEPT]]))

    def of(self, network: torch.nn.Module, device: torch.device, digests: frozenset[str]) -> CudaGraphs | None:
        """Where whole calls of a network are captured; None where they cannot be.

        Args:
            digests: of the engines that take part. Should a capture end the process, none is captured with them again.
        """
        if device.type != "cuda":
            return None
        with self._lock:
            number = id(network)
            known = self._kept.get(number)
            is_other = known is not None and (known.network() is not network or known.digests != digests)
            if known is not None and (is_other or known.canary.is_outdated):
                self._drop([number])
                known = None
            if known is None:
                canary = EngineCanary(self._canary, *sorted(digests))
                graphs = CudaGraphs(device, Graphing(self._capture_library, canary))
                known = self._kept[number] = _Kept(ref(network), digests, device, canary, graphs)
            self._kept.move_to_end(number)
            return known.graphs if known.graphs.are_possible else None

    def drop(self, network: torch.nn.Module) -> None:
        """Give back the memory of a network's graphs."""
        with self._lock:
            self._drop([id(network)] if id(network) in self._kept else [])

    def clear(self) -> None:
        """The same for all networks that no run uses."""
        with self._lock:
            self._drop([*filter(self._may_go, self._kept)])

    def device_bytes(self, device: torch.device) -> int:
        """Device memory of all graphs, in bytes."""
        with self._lock:
            return sum(kept.graphs.bytes for kept in self._kept.values() if kept.device == device)

    def free(self, device: torch.device, wanted: float) -> int:
        """Drop graphs that no run uses, those that were used longest ago first.

        Returns:
            Bytes freed: less than wanted where the rest is in use.
        """
        freed = 0
        with self._lock:
            for number, kept in [*self._kept.items()]:
                if freed < wanted and kept.device == device and self._may_go(number):
                    freed += kept.graphs.bytes
                    self._drop([number])
        return freed

    def _may_go(self, number: int) -> bool:
        return not self._running[number]

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._kept.pop(number).graphs.drop()
