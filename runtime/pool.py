"""Loaded engines, shared by every model of the process; one owner at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import ExitStack

import torch

from ..core.protocols import Engine
from ..engine_cache import Entry
from .plan import Plan

_IDLE_ENGINES = 8


class LoadedEngine:
    """An engine in memory; its files are held against pruning."""

    def __init__(self, plan: Plan, entry: Entry, device: torch.device) -> None:
        self._held = ExitStack()
        self._held.enter_context(entry.hold())
        try:
            entry.verify_files()  # once held, so that nobody prunes in between
            outputs = plan.architecture.outputs
            self.engine: Engine = plan.backend.load(plan.spec, outputs, entry.artifact, device)
        except BaseException:
            self._held.close()
            raise
        self.entry = entry
        self.device = device

    def is_of(self, entry: Entry) -> bool:
        """Whether it was loaded from these very files, not from an engine that was built anew since."""
        return self.entry.digest == entry.digest and self.entry.manifest.files == entry.manifest.files

    def close(self) -> None:
        self.engine.close()
        self._held.close()


class EnginePool:
    """Keeps a few idle engines loaded, so that switching between models and resolutions costs nothing."""

    def __init__(self, keep: int = _IDLE_ENGINES) -> None:
        self._keep = keep
        self._idle: OrderedDict[int, LoadedEngine] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, plan: Plan, entry: Entry, device: torch.device) -> LoadedEngine:
        """An engine that nobody else uses, loaded if need be.

        Raises:
            IncompatibleEngine, CorruptEngine: it cannot be loaded.
        """
        with self._lock:
            for number, loaded in self._idle.items():
                if loaded.is_of(entry) and loaded.device == device:
                    loaded.entry = entry  # which may know of newer verifications
                    return self._idle.pop(number)
        return LoadedEngine(plan, entry, device)

    def give_back(self, loaded: LoadedEngine) -> None:
        """The engine lets go of the model's weights and waits for its next owner."""
        loaded.engine.release_weights()
        surplus = []
        with self._lock:
            self._idle[id(loaded)] = loaded
            while len(self._idle) > self._keep:
                surplus.append(self._idle.popitem(last=False)[1])
        for old in surplus:
            old.close()

    def clear(self) -> None:
        """Close all idle engines."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
        for loaded in idle:
            loaded.close()
