"""Slipstream's own lines of ComfyUI's log."""

from __future__ import annotations

import logging

from aiohttp import web

from ...runtime.recent_log import RecentLog
from .guard import Answer, Route, asks
from .rules import Refused

_recent = RecentLog()


def begin() -> None:
    """Keep what is logged from now on."""
    pack = __name__.removesuffix(".nodes.routes.log")  # ComfyUI loads packs under names of its own
    logging.getLogger(pack).addHandler(_recent)


@asks("after")
async def lines(request: web.Request) -> Answer:
    after = request.query.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) < 16):
        raise Refused("bad_request", "after must be a whole number: `next` of the last answer, or 0.")
    return _recent.after(int(after))


ROUTES: list[Route] = [("GET", "/log", lines)]
