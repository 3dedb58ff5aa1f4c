"""A ComfyUI folder whose modules this process, which is not ComfyUI, shall import."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder

OPEN_FOLDERS = ("input", "output", "temp", "user")
"""Into which ComfyUI's own routes let any client write."""


def use_checkout(folder: str) -> None:
    """Make the modules of the ComfyUI in `folder` importable, whatever else lies on the path.

    Raises:
        ImportError: there is no ComfyUI.
    """
    sys.path.insert(0, folder)
    if "comfy" in sys.modules:
        return
    # `comfy` has no __init__.py, so a real package of that name would go before it, however late on the path.
    spec = PathFinder.find_spec("comfy", [folder])
    if spec is None:
        raise ImportError(f"there is no comfy in {folder}")
    sys.modules["comfy"] = module = importlib.util.module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(module)
