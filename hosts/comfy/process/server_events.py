"""ComfyUI's server, and events for its page."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

ENGINES = "slipstream.engines"
"""Engines came or went: the page asks again."""

SKIPPED = "slipstream.skipped"
"""A sampling run with skipped steps has ended."""


def server_of_process() -> Any:
    """ComfyUI's server; None where there is none."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)


def send(event: str, data: Mapping[str, Any]) -> None:
    """Tell every open page, from any thread. Nothing happens outside ComfyUI's server, and none waits."""
    server = server_of_process()
    if server is None:
        return
    try:
        server.send_sync(event, dict(data))
    except RuntimeError as error:  # its loop is closed: ComfyUI is ending
        log.debug("Slipstream: %s was not sent: %s", event, error)
