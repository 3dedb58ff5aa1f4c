"""ComfyUI's server, and events for its page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

ENGINES = "slipstream.engines"
"""Engines came or went: the page asks again."""

SKIPPED = "slipstream.skipped"
"""A sampling run with skipped steps has ended."""


PRESETS = "slipstream.presets"
"""Presets of step skipping were saved: the page asks again."""


def server_of_process() -> Any:
    """ComfyUI's server; None where there is none."""
    try:
        from server import PromptServer
    except ImportError:
        return None
    return getattr(PromptServer, "instance", None)


def allowed_origin() -> str | None:
    """Of other pages that the user lets use ComfyUI, by `--enable-cors-header`; "*" for all, None for none."""
    try:
        from comfy.cli_args import args
    except ImportError:
        return None
    return getattr(args, "enable_cors_header", None) or None


def watch_prompts(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have `handler` see every prompt that is queued, and give what is to be queued. Once per process.

    Nothing happens outside ComfyUI's server.
    """
    server = server_of_process()
    if server is not None and handler not in server.on_prompt_handlers:
        server.add_on_prompt_handler(handler)


def send(event: str, data: Mapping[str, Any]) -> None:
    """Tell every open page, from any thread. Nothing happens outside ComfyUI's server, and none waits."""
    server = server_of_process()
    if server is None:
        return
    try:
        server.send_sync(event, dict(data))
    except RuntimeError as error:  # its loop is closed: ComfyUI is ending
        log.debug("Slipstream: %s was not sent: %s", event, error)


def show_text(node_id: str, text: str) -> None:
    """Show `text` on a node of every open page while it runs, as ComfyUI's own nodes do. See `send`."""
    server = server_of_process()
    if server is None:
        return
    try:
        server.send_progress_text(text, node_id)
    except (RuntimeError, AttributeError) as error:  # its loop is closed; or an older ComfyUI
        log.debug("Slipstream: %r was not shown: %s", text, error)
