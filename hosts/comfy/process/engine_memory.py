"""The engines' own memory as a model of ComfyUI's, so that ComfyUI counts it and can unload it.

One stand-in a device is put among ComfyUI's loaded models when the first engine holds memory there. It is never loaded
by `load_models_gpu`, which would make room for it at the cost of other models: the engines are there already.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import comfy.model_management as management
import torch
from comfy.model_management import LoadedModel
from comfy.model_patcher import ModelPatcher

from ....runtime.loaded.engine_pool import EnginePool
from .current_weights import copies

log = logging.getLogger(__name__)


class Residency:
    """Keeps ComfyUI's list of loaded models right about the engines of a pool."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._stand_ins: dict[torch.device, EngineMemory] = {}
        self._has_failed = False
        pool.on_change = self.update

    def update(self, device: torch.device) -> None:
        """Show ComfyUI what the engines hold on `device`, if anything; ComfyUI drops it itself when it is unloaded."""
        try:
            self._update(device)
        except Exception:  # another ComfyUI's lists may work otherwise: no reason to lose the engine
            if not self._has_failed:
                log.exception("Slipstream: ComfyUI cannot be told what engines hold, and will not unload them")
            self._has_failed = True

    def _update(self, device: torch.device) -> None:
        stand_in = self._stand_ins.get(device)
        if stand_in is None:
            stand_in = self._stand_ins.setdefault(device, EngineMemory(self._pool, device))
        is_listed = any(loaded.model is stand_in for loaded in management.current_loaded_models)
        if not is_listed and stand_in.loaded_size():
            loaded = LoadedEngines(stand_in)
            loaded.model_load()
            loaded.currently_used = False  # ComfyUI loads what is "used" again after a detour; engines load themselves
            management.current_loaded_models.insert(0, loaded)


class LoadedEngines(LoadedModel):
    """The entry in ComfyUI's list; it stays there as long as a run needs an engine."""

    def model_unload(self, memory_to_free: float | None = None, unpatch_weights: bool = True) -> bool:
        wanted = math.inf if memory_to_free is None else memory_to_free
        self.model.partially_unload(self.model.offload_device, wanted)
        if self.model.loaded_size():
            return False
        return bool(super().model_unload(None, unpatch_weights))


class EngineMemory(ModelPatcher):
    """A model without weights whose size is what the engines on one device hold. It knows no other model."""

    def __init__(self, pool: EnginePool, device: torch.device) -> None:
        self._pool, self._engines_device = pool, device  # first: older ComfyUIs ask for the size at once
        super().__init__(SlipstreamEngines(), device, torch.device("cpu"))
        self.model.device = device

    def model_size(self) -> int:
        return self.loaded_size()

    def loaded_size(self) -> int:
        return self._pool.device_bytes(self._engines_device) + copies.bytes(self._engines_device)

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Close idle engines, those that were used longest ago first; returns the bytes freed."""
        freed = self._pool.free(self._engines_device, memory_to_free)
        if freed < memory_to_free and not self._pool.in_use(self._engines_device):
            freed += copies.free(self._engines_device)
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:  # else ComfyUI is only about to load it again
            self.partially_unload(self.offload_device, math.inf)
        return self.model


class SlipstreamEngines(torch.nn.Module):
    """Its name is what ComfyUI writes into its log."""
