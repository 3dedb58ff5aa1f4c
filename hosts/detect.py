"""Which host this process is. Several hosts' modules may be importable at once: only what runs counts."""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum


class Host(str, Enum):
    """
    FORGE: a WebUI of the Forge family, which has patchers.
    A1111: AUTOMATIC1111, and what is built on it without patchers.
    """

    FORGE = "forge"
    A1111 = "a1111"
    COMFYUI = "comfyui"
    NONE = "none"


def running_host() -> Host:
    """A WebUI goes first: Forge Neo has a part of ComfyUI on its path, and extensions import more of it."""
    if hasattr(sys.modules.get("modules.script_callbacks"), "on_ui_tabs"):
        return Host.FORGE if _is_there("modules_forge") else Host.A1111
    if getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None) is not None:
        return Host.COMFYUI
    return Host.NONE


def _is_there(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except ValueError:  # made in memory
        return True
