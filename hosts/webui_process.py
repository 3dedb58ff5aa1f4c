"""The WebUI's process: its engine store, its queue, and how it waits."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from ..core.progress import Progress
from ..runtime.module import AcceleratedModule
from ..runtime.provider import EngineProvider, HostHooks
from ..runtime.settings.model_settings import Settings
from ..runtime.settings.preferences_file import PreferencesFile
from ..runtime.settings.store_folder import open_store, preferences_file

_CLOSING_SECONDS = 2.0
_OUTPUTS = ("output", "outputs", "log", "tmp")
"""Of the WebUI's data folder: into these it writes what clients ask for."""

_making = threading.Lock()


def provider() -> EngineProvider:
    """The one provider of this process."""
    with _making:
        return _provider()


@functools.lru_cache(maxsize=1)
def _provider() -> EngineProvider:
    chosen = preferences()
    store = open_store(chosen.read(), models_folder())
    made = EngineProvider(store, is_idle=is_idle, preferences=chosen.read)
    atexit.register(
        made.queue.end_all, "the WebUI is closing", _CLOSING_SECONDS
    )  # no half-built engine stays in the store
    return made


@functools.lru_cache(maxsize=64)
def module_of(settings: Settings) -> AcceleratedModule:
    """One accelerated model for each choice of a user."""
    return AcceleratedModule(provider(), settings)


@functools.lru_cache(maxsize=1)
def preferences() -> PreferencesFile:
    """What the user chose for all of Slipstream."""
    return preferences_file(models_folder(), _open_folders)


def models_folder() -> Path:
    """Where engines lie unless the user or the environment says otherwise."""
    from modules import paths_internal

    return Path(paths_internal.models_path) / "slipstream"


def _open_folders() -> list[Path]:
    from modules import paths_internal

    return [Path(paths_internal.data_path) / name for name in _OUTPUTS]


def is_idle() -> bool:
    """Whether the WebUI has no job to work on."""
    state = getattr(sys.modules.get("modules.shared"), "state", None)
    return not getattr(state, "job", "")


def waiting_hooks(manager: Any = None) -> HostHooks:
    """The WebUI's progress text and cancel button while somebody waits for a build.

    Args:
        manager: of the host's memory; None where the host has none.
    """
    from modules import sd_samplers_common, shared

    def progress(update: Progress) -> None:
        percent = f" {update.fraction:.0%}" if update.fraction else ""
        shared.state.textinfo = f"Slipstream: building{percent}, {update.message}"

    def check_interrupted() -> None:
        if shared.state.interrupted or shared.state.skipped:
            raise sd_samplers_common.InterruptedException

    interruptions = (sd_samplers_common.InterruptedException, KeyboardInterrupt)
    if manager is None:
        return HostHooks(progress, check_interrupted, interruptions)
    return HostHooks(progress, check_interrupted, interruptions, functools.partial(_free_device_memory, manager))


def _free_device_memory(manager: Any, device: torch.device, wanted: int) -> None:
    """Have the host unload what is not in use at this moment."""
    if device.type == "cpu":
        return
    # Where a host does not say what is in use, nothing is unloaded.
    used = [loaded for loaded in manager.current_loaded_models if getattr(loaded, "currently_used", True)]
    manager.free_memory(wanted + manager.minimum_inference_memory(), device, keep_loaded=used)
