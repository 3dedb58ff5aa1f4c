"""The engine manager's page, started when somebody asks for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .guard import Answer, Route, changes, is_here
from .rules import Refused

if TYPE_CHECKING:
    from ...ui.serve import Server

_lock = threading.Lock()
_started: list[Server] = []


@changes()
def open_ui(request: web.Request, fields: dict[str, Any]) -> Answer:
    from ...hosts.comfy.building.prompt_builder import PromptBuilder
    from ...hosts.comfy.process.shared_provider import home, provider
    from ...ui.manager import Manager
    from ...ui.serve import start

    if not is_here(request):
        raise Refused(
            "forbidden",
            "The engine manager's page opens on ComfyUI's own machine alone. From elsewhere, start it there with "
            "`slipstream ui --listen ADDRESS` and a password.",
        )
    with _lock:
        if not _started:
            _started.append(start(Manager(provider(), PromptBuilder(), home())))
        return {"url": _started[0].url}


ROUTES: list[Route] = [("POST", "/ui", open_ui)]
