"""Slipstream: diffusion models run faster in ComfyUI, without the user learning how.

Nothing heavy is imported here: ComfyUI, pytest and the command line all pass through this file first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .core.version import __version__

if TYPE_CHECKING:
    from .nodes.extension import SlipstreamExtension

WEB_DIRECTORY = "./web/js"

__all__ = ["WEB_DIRECTORY", "__version__", "comfy_entrypoint"]


async def comfy_entrypoint() -> SlipstreamExtension:
    """Return the extension that ComfyUI asks each custom-node pack for."""
    try:
        from .nodes.extension import SlipstreamExtension
    except Exception:
        # ComfyUI reports a failure here by its message alone.
        logging.getLogger("slipstream").exception("Slipstream could not load its nodes")
        raise
    return SlipstreamExtension()
