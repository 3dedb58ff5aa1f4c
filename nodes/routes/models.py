"""Routes for the grid of model files and picture sizes."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...hosts.comfy.building.model_grid import model_grid, request
from ...hosts.comfy.process.shared_provider import provider
from ...runtime.settings.model_settings import Resolution, parse_resolutions
from .guard import Answer, Route, asks, changes
from .rules import Refused, whole_number

_MOST_PIXELS = 16384
_MOST_SIZES = 12


@asks("sizes")
def grid(http: web.Request) -> Answer:
    try:
        more = parse_resolutions(http.query.get("sizes", ""))
    except ValueError as error:
        raise Refused("bad_request", f"{error}.") from None
    return model_grid(provider().store, more[:_MOST_SIZES])


@changes("model", "width", "height")
def build(http: web.Request, fields: dict[str, Any]) -> Answer:
    width, height = (whole_number(fields, name, 64, _MOST_PIXELS) for name in ("width", "height"))
    if width % 8 or height % 8:
        raise Refused("bad_request", "width and height must be multiples of 8.")
    if not isinstance(fields.get("model"), str):
        raise Refused("bad_request", "model must be the name of a model file, as GET /models has it.")
    try:
        return {"id": request(fields["model"], Resolution(width, height)).id}
    except ValueError as error:
        raise Refused("not_found", f"{error}.") from None


ROUTES: list[Route] = [("GET", "/models", grid), ("POST", "/models/build", build)]
