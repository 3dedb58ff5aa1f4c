"""The ComfyUI process: its engine store and its queue."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from pathlib import Path

import torch

from ....engine_cache import EngineStore
from ....runtime.building.build_queue import Ticket, TicketState
from ....runtime.checking.step_times import StepTimes
from ....runtime.provider import EngineProvider
from ....runtime.settings.preferences_file import PreferencesFile
from ....runtime.settings.store_folder import default_home, open_store, preferences_file, store_home
from .build_room import BuildRoom
from .checkout import OPEN_FOLDERS
from .free_memory import available
from .server_events import ENGINES, send, server_of_process

SWITCH = "SLIPSTREAM_STEP_TIMES"
"""Environment variable: `off` measures no steps, computes none on purpose, and retires no engine."""

_CLOSING_SECONDS = 2.0

_making = threading.Lock()


def provider() -> EngineProvider:
    """The one provider of this process."""
    with _making:  # the page's questions come from several threads at once
        return _provider()


@functools.lru_cache(maxsize=1)
def _provider() -> EngineProvider:
    from .engine_memory import Residency

    chosen = preferences()
    store = open_store(chosen.read(), _models_folder())
    made = EngineProvider(
        store,
        is_idle=queue_is_idle,
        preferences=chosen.read,
        step_times=_step_times(store),
        free_bytes=_free_bytes,
        room=BuildRoom(),
    )
    Residency(made.pool)  # lives as long as the pool, which calls it
    made.queue.listen(_tell_page)
    made.blocks.queue.listen(_tell_page)
    atexit.register(made.end_builds, "ComfyUI is closing", _CLOSING_SECONDS)  # no half-built engine stays in the store
    return made


def _free_bytes(device: torch.device) -> int | None:
    return available(device) if device.type == "cuda" else None


def _step_times(store: EngineStore) -> StepTimes | None:
    """None where the environment says so."""
    import comfyui_version

    if os.environ.get(SWITCH, "").lower() == "off":
        return None
    made = StepTimes(store, {"ComfyUI": str(comfyui_version.__version__)})
    made.on_change = lambda: send(ENGINES, {})
    return made


def _tell_page(ticket: Ticket) -> None:
    if ticket.state is TicketState.DONE:
        send(ENGINES, {})


@functools.lru_cache(maxsize=1)
def preferences() -> PreferencesFile:
    """What the user chose for all of Slipstream."""
    return preferences_file(_models_folder(), _open_folders)


def home() -> Path:
    """Where all that we keep lies, but for engines where the user prefers another folder for them."""
    return store_home(_models_folder())


def default_folder() -> Path:
    """Where engines lie unless the user or the environment says otherwise."""
    return default_home(_models_folder())


def _models_folder() -> Path | None:
    try:
        import folder_paths
    except ImportError:
        return None
    return Path(folder_paths.models_dir) / "slipstream"


def _open_folders() -> list[Path]:
    try:
        import folder_paths
    except ImportError:
        return []
    return [Path(getattr(folder_paths, f"get_{name}_directory")()) for name in OPEN_FOLDERS]


def device() -> torch.device:
    """That ComfyUI computes on."""
    import comfy.model_management

    return torch.device(comfy.model_management.get_torch_device())


def queue_is_idle() -> bool:
    """Whether ComfyUI has no prompt to work on; True outside its server."""
    queue = getattr(server_of_process(), "prompt_queue", None)
    return queue is None or queue.get_tasks_remaining() == 0
