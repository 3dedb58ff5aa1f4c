"""Routes for Slipstream's settings."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...engine_cache import EngineStore
from ...hosts.comfy.process.server_events import ENGINES, send
from ...hosts.comfy.process.shared_provider import default_folder, preferences, provider
from ...runtime.settings.preferences import NAMES, Preferences
from ...runtime.settings.store_folder import VARIABLE, configured_home, engines_folder
from .guard import Answer, Route, asks, changes, is_here
from .rules import Refused


@asks()
def show(request: web.Request) -> Answer:
    return _answer(preferences().read())


@changes(*NAMES)
def change(request: web.Request, fields: dict[str, Any]) -> Answer:
    if "folder" in fields and not is_here(request):
        _check_same_folder(fields["folder"])
    return _change(fields)


ROUTES: list[Route] = [("GET", "/settings", show), ("POST", "/settings", change)]


def _check_same_folder(folder: Any) -> None:
    """Refuse a change of the engine folder.

    Raises:
        Refused: another machine asks for another folder; what lies in an engine store is run.
    """
    if folder != _values(preferences().read())["folder"]:
        raise Refused(
            "forbidden",
            "The engine folder can be changed from this machine alone: open ComfyUI in a browser there, "
            f"set {VARIABLE}, or write folder into {preferences().path}.",
        )


def _change(fields: dict[str, Any]) -> Answer:
    for name, reason in _fixed().items():
        if name in fields and fields[name] != _values(preferences().read())[name]:
            raise Refused("bad_request", reason)
    try:
        chosen = preferences().change({name: value for name, value in fields.items() if name not in _fixed()})
    except ValueError as error:
        raise Refused("bad_request", str(error)) from None
    if "limit_bytes" in fields:
        provider().store.limit_bytes = chosen.limit_bytes
        send(ENGINES, {})
    return _answer(chosen)


def _answer(chosen: Preferences) -> Answer:
    """Models in use know the folder that they began with, so another one waits for a restart."""
    wanted = EngineStore(engines_folder(chosen, default_folder()))
    waits = wanted.root != provider().store.root
    return {"settings": _values(chosen), "fixed": _fixed(), "restart_needed": waits}


def _values(chosen: Preferences) -> dict[str, Any]:
    configured = configured_home()
    return {**chosen.to_json(), **({"folder": str(configured)} if configured else {})}


def _fixed() -> dict[str, str]:
    if configured_home() is None:
        return {}
    return {"folder": f"The environment variable {VARIABLE} decides; start ComfyUI without it to choose here."}
