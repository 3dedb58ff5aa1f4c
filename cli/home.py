"""Which engine store a command works on."""

from __future__ import annotations

from argparse import Namespace

from ..engine_cache import EngineStore
from ..hosts.comfy.standalone import models_folder
from ..runtime.home import store_home


def open_store(options: Namespace) -> EngineStore:
    """`--home`, else SLIPSTREAM_HOME, else the store of the ComfyUI that is meant, else the user's own.

    Raises:
        BackendUnavailable: `--comfyui` or COMFYUI_DIR names no ComfyUI.
    """
    if options.home is not None:
        return EngineStore(options.home.expanduser())
    models = models_folder(options.comfyui)
    return EngineStore(store_home(models / "slipstream" if models else None))
