"""Slipstream: diffusion models run faster in ComfyUI, without the user learning how.

Nothing heavy is imported here: ComfyUI, pytest and the command line all pass through this file first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.version import __version__
    from .nodes.extension import SlipstreamExtension

WEB_DIRECTORY = "./web/js"

__all__ = ["WEB_DIRECTORY", "__version__", "comfy_entrypoint"]


def __getattr__(name: str) -> str:
    """Return the version: pytest runs this file as one of no package where the clone's folder is no Python name."""
    if name == "__version__":
        from .core.version import __version__

        return __version__
    raise AttributeError(name)


async def comfy_entrypoint() -> SlipstreamExtension:
    """Return the extension that ComfyUI asks each custom-node pack for."""
    try:
        from .nodes.extension import SlipstreamExtension
    except Exception:
        # ComfyUI reports a failure here by its message alone.
        logging.getLogger("slipstream").exception("Slipstream could not load its nodes")
        raise
    return SlipstreamExtension()
