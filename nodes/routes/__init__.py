"""What the page asks for by HTTP. docs/web-api.md is the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .guard import Route

PREFIX = "/slipstream/v1"


def all_routes() -> list[Route]:
    """Every address that answers: method, path below `PREFIX`, and handler."""
    from . import builds, engines, health, log, models, settings, step_skip, system, ui

    modules = (builds, engines, health, log, models, settings, step_skip, system, ui)
    return [route for module in modules for route in module.ROUTES]


def add_routes() -> None:
    """Give ComfyUI's server our routes, once; it repeats them under /api. Nothing happens outside its server."""
    from ...hosts.comfy.process.server_events import server_of_process

    server = server_of_process()
    if server is None or any(getattr(route, "path", "").startswith(PREFIX) for route in server.routes):
        return
    from ...hosts.comfy.process.page_language import page_language
    from ...runtime.reporting.log_language import follow_page
    from ...runtime.reporting.recent_log import recent_log
    from .guard import unknown

    follow_page(page_language)
    recent_log()  # keeps what is logged from now on
    for method, path, handler in all_routes():
        server.routes.route(method, PREFIX + path)(handler)
    for path in (PREFIX, PREFIX + "/{rest:.*}"):
        server.routes.route("*", path)(unknown)
