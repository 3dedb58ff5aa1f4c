"""Slipstream's own lines of ComfyUI's log."""

from __future__ import annotations

from aiohttp import web

from ...runtime.reporting.recent_log import recent_log
from .guard import Answer, Route, asks
from .rules import Refused


@asks("after")
def lines(request: web.Request) -> Answer:
    after = request.query.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) < 16):
        raise Refused("bad_request", "after must be a whole number: `next` of the last answer, or 0.")
    return recent_log().after(int(after))


ROUTES: list[Route] = [("GET", "/log", lines)]
