"""Slipstream: diffusion models run faster in ComfyUI, without the user learning how.

Nothing heavy is imported here: ComfyUI, pytest and the command line all pass through this file first.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes.extension import SlipstreamExtension

__version__ = "0.1.0"

WEB_DIRECTORY = "./web/js"

STARTED = time.time()
"""When this process loaded the pack, before any model (POSIX seconds)."""

__all__ = ["STARTED", "WEB_DIRECTORY", "__version__", "comfy_entrypoint"]


async def comfy_entrypoint() -> SlipstreamExtension:
    """Return the extension that ComfyUI asks each custom-node pack for."""
    try:
        from .nodes.extension import SlipstreamExtension
    except Exception:
        # ComfyUI reports a failure here by its message alone.
        logging.getLogger("slipstream").exception("Slipstream could not load its nodes")
        raise
    return SlipstreamExtension()
