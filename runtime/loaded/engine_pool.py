"""Loaded engines, shared by every model of the process; one owner at a time."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from ...core.protocols import BoundWeights, Engine
from ...core.spec import Role
from ...engine_cache import Entry
from ..planning.plan import Plan
from .canary import Canary, EngineCanary
from .cuda_graphs import CudaGraphs, GraphedEngine, Graphing
from .device_memory import free_bytes
from .freed_memory import FreedMemory
from .network_graphs import NetworkGraphs

_IDLE_ENGINES = 8

_CALLED_IN_STEPS = (Role.UNET, Role.CONTROLNET)
"""What gains by CUDA graphs: the calls of others are few and long, and their graphs would hold gigabytes."""


def is_graphed(plan: Plan, device: torch.device) -> bool:
    """Whether calls of this engine are CUDA graphs, where these can be had."""
    return device.type == "cuda" and plan.spec.role in _CALLED_IN_STEPS


SizeListener = Callable[[torch.device], None]


class LoadedEngine:
    """An engine in memory. While somebody owns it, its files are held against deletion.

    Attributes:
        steps: CUDA graphs of larger pieces of work, of which its calls are a part.
    """

    def __init__(self, plan: Plan, entry: Entry, device: torch.device, graphing: Graphing) -> None:
        self._held = ExitStack()
        self._bound: BoundWeights | None = None
        self.canary = graphing.canary
        self.hold(entry)
        try:
            entry.verify_files()  # once held, so that nobody prunes in between
            outputs = plan.architecture.outputs
            engine = plan.backend.load(plan.spec, outputs, entry.artifact, device)
            self.engine: Engine = GraphedEngine(engine, device, graphing) if is_graphed(plan, device) else engine
            self.steps = CudaGraphs(device, graphing)
        except BaseException:
            self._held.close()
            raise
        self.device = device

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds, weights of the host not counted."""
        return self.engine.device_bytes + self.steps.bytes

    def is_of(self, entry: Entry) -> bool:
        """Whether it was loaded from these very files, not from an engine that was built anew since."""
        return self.entry.digest == entry.digest and self.entry.manifest.files == entry.manifest.files

    def hold(self, entry: Entry) -> None:
        """Work for an owner who knows `entry`: the same files, perhaps with newer verifications.

        Raises:
            StoreError: the files are gone.
        """
        self._held.enter_context(entry.hold())
        self.entry = entry

    def bind(self, weights: BoundWeights) -> None:
        """Compute with `weights` from now on, which are released when the engine rests.

        Raises:
            IncompatibleEngine: see `Engine.update_weights`.
        """
        self._release()
        self._bound = weights
        self.engine.update_weights(weights.tensors, weights.version)

    def rest(self) -> None:
        """Let go of the model's weights and of the files."""
        try:
            self.engine.release_weights()
        finally:
            self._release()
            self._held.close()

    def close(self) -> None:
        try:
            self.steps.drop()
            self.engine.close()
        finally:
            self._release()
            self._held.close()

    def _release(self) -> None:
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.release()


class EnginePool:
    """Keeps a few idle engines loaded, so that switching between models and resolutions costs nothing.

    Args:
        keep: engines that wait for their next owner.
        capture_library: the folder of the library by which CUDA graphs are captured; None: none are.
        canary: knows engines that ended an earlier process.

    Attributes:
        on_change: told the device after engines came, went, or may hold more or less memory there.
        networks: graphs of networks that run by engines of their blocks; they count and give way as engines do.
    """

    def __init__(
        self, keep: int = _IDLE_ENGINES, capture_library: Path | None = None, canary: Canary | None = None
    ) -> None:
        self.on_change: SizeListener = lambda device: None
        self._keep = keep
        self._capture_library = capture_library
        self._canary = canary
        self.networks = NetworkGraphs(capture_library, canary)
        self._freed = FreedMemory()
        self._idle: OrderedDict[int, LoadedEngine] = OrderedDict()
        self._used: dict[int, LoadedEngine] = {}
        self._lock = threading.Lock()

    def has_idle(self, entry: Entry, device: torch.device) -> bool:
        """Whether `take` would cost nothing."""
        with self._lock:
            return self._find_idle(entry, device) is not None

    def take(self, plan: Plan, entry: Entry, device: torch.device) -> LoadedEngine:
        """An engine that nobody else uses, loaded if need be.

        Raises:
            IncompatibleEngine, CorruptEngine, StoreError: it cannot be loaded.
        """
        with self._lock:
            number = self._find_idle(entry, device)
            loaded = None if number is None else self._idle.pop(number)
        if loaded is None:
            graphing = Graphing(self._capture_library, EngineCanary(self._canary, entry.digest))
            loaded = LoadedEngine(plan, entry, device, graphing)
        else:
            _or_close(loaded, lambda: loaded.hold(entry))
        with self._lock:
            self._used[id(loaded)] = loaded
        self.on_change(device)
        return loaded

    def give_back(self, loaded: LoadedEngine) -> None:
        """The engine lets go of the model's weights and waits for its next owner.

        One that was loaded with care that is over is closed: the next owner has one with CUDA graphs.
        """
        with self._lock:
            self._used.pop(id(loaded), None)
        _or_close(loaded, loaded.rest)
        with self._lock:
            is_kept = not loaded.canary.is_outdated
            if is_kept:
                self._idle[id(loaded)] = loaded
        if not is_kept:
            loaded.close()
        self._close_surplus()
        self._freed.give_back(loaded.device)
        self.on_change(loaded.device)

    def discard(self, loaded: LoadedEngine) -> None:
        """The engine is given back for good: nobody will own it again."""
        with self._lock:
            self._used.pop(id(loaded), None)
        loaded.close()
        self.on_change(loaded.device)

    def clear(self) -> None:
        """Close all idle engines."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
        for loaded in idle:
            loaded.close()
        self.networks.clear()
        for device in {loaded.device for loaded in idle}:
            self.on_change(device)

    def close_idle(self, digest: str) -> None:
        """Close those of one engine that nobody uses, so that its files may go."""
        with self._lock:
            numbers = [number for number, idle in self._idle.items() if idle.entry.digest == digest]
            idle = [self._idle.pop(number) for number in numbers]
        for loaded in idle:
            loaded.close()
            self.on_change(loaded.device)

    def device_bytes(self, device: torch.device) -> int:
        """What all engines hold on `device` themselves, weights of the host not counted."""
        with self._lock:
            engines = [*self._idle.values(), *self._used.values()]
        held = sum(loaded.device_bytes for loaded in engines if loaded.device == device)
        return held + self.networks.device_bytes(device)

    def in_use(self, device: torch.device) -> bool:
        """Whether a run owns an engine on `device` at this moment."""
        with self._lock:
            return any(loaded.device == device for loaded in self._used.values())

    def free(self, device: torch.device, wanted: float) -> int:
        """Drop graphs of networks, then idle engines, those that were used longest ago first, until `wanted` bytes are
        free that were not.

        Returns:
            Bytes freed: less than wanted where the rest is in use.
        """
        freed = self.networks.free(device, wanted)
        freed += self._close_idle_until(device, wanted - freed)
        if freed:
            self.on_change(device)
        return freed

    def close_all_idle(self, device: torch.device) -> None:
        """Give what idle engines hold to a model that runs without one. Graphs of networks stay: it may run by them."""
        if self._close_idle_until(device, math.inf):
            self.on_change(device)

    def _close_idle_until(self, device: torch.device, wanted: float) -> int:
        """Close those that were used longest ago first; returns the bytes freed."""
        freed = 0
        while freed < wanted and (loaded := self._pop_oldest_with_memory(device)) is not None:
            freed += _close_and_measure(loaded)
        return freed

    def _find_idle(self, entry: Entry, device: torch.device) -> int | None:
        fitting = (number for number, idle in self._idle.items() if idle.is_of(entry) and idle.device == device)
        return next(fitting, None)

    def _pop_oldest_with_memory(self, device: torch.device) -> LoadedEngine | None:
        with self._lock:
            for number, loaded in self._idle.items():
                if loaded.device == device and loaded.device_bytes:
                    return self._idle.pop(number)
        return None

    def _close_surplus(self) -> None:
        """Those above the bound, and those whose files somebody deleted."""
        with self._lock:
            numbers = list(self._idle)[: -self._keep] if self._keep else list(self._idle)
            gone = [number for number, idle in self._idle.items() if not idle.entry.directory.is_dir()]
            surplus = [self._idle.pop(number) for number in {*numbers, *gone}]
        for loaded in surplus:
            loaded.close()


def _or_close(loaded: LoadedEngine, step: Callable[[], None]) -> None:
    try:
        step()
    except BaseException:
        loaded.close()
        raise


def _close_and_measure(loaded: LoadedEngine) -> int:
    """Bytes freed; measured where possible, since engines may share what they hold."""
    size, before = loaded.device_bytes, free_bytes(loaded.device)
    loaded.close()
    after = free_bytes(loaded.device)
    return size if before is None or after is None else max(0, after - before)
