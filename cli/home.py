"""Which engine store a command works on."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine_cache import EngineStore
from ..hosts.comfy.building.without_server import models_folder
from ..hosts.comfy.process.checkout import OPEN_FOLDERS
from ..runtime.settings.preferences import Preferences
from ..runtime.settings.store_folder import open_store as open_preferred_store
from ..runtime.settings.store_folder import preferences_file, store_at

if TYPE_CHECKING:
    from ..runtime.provider import EngineProvider


def open_store(options: Namespace) -> EngineStore:
    """`--home`, else SLIPSTREAM_HOME, else the store of the ComfyUI that is meant, else the user's own.

    The folder that the user prefers takes the place of the last two; `--home` is for what ComfyUI does not use.

    Raises:
        BackendUnavailable: `--comfyui` or COMFYUI_DIR names no ComfyUI.
    """
    if options.home is not None:
        return store_at(options.home.expanduser())
    return open_preferred_store(preferences(options), _host_default(options))


def preferences(options: Namespace) -> Preferences:
    """What the user chose on the page of the ComfyUI that is meant.

    Raises:
        BackendUnavailable: as `open_store`.
    """
    models = models_folder(options.comfyui)
    open_folders = [models.parent / name for name in OPEN_FOLDERS] if models else []
    return preferences_file(_host_default(options), lambda: open_folders).read()


def open_provider(store: EngineStore, options: Namespace) -> EngineProvider:
    """Engines of a store, as the user prefers them.

    Raises:
        BackendUnavailable: as `open_store`.
    """
    from ..runtime.provider import EngineProvider

    chosen = preferences(options)
    return EngineProvider(store, preferences=lambda: chosen)


def _host_default(options: Namespace) -> Path | None:
    models = models_folder(options.comfyui)
    return models / "slipstream" if models else None
