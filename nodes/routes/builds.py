"""Routes for pending builds, the states of nodes, and the button Build engine."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from .dry_run import ROUTES as DRY_RUN
from .guard import Answer, Route, asks, changes
from .rules import Refused, check_digest

log = logging.getLogger(__name__)


@asks()
def list_builds(request: web.Request) -> Answer:
    from ...hosts.comfy.node_state.announcer import builds, policy
    from ...hosts.comfy.process.shared_provider import provider

    return {"builds": builds(provider()), "policy": policy()}


@asks()
def list_nodes(request: web.Request) -> Answer:
    from ...hosts.comfy.node_state.announcer import saved_ms
    from ...hosts.comfy.node_state.node_states import REGISTRY
    from ...hosts.comfy.process.shared_provider import provider

    return {"nodes": REGISTRY.to_json(), "saved_ms": saved_ms(provider())}


@changes()
def cancel(request: web.Request, fields: dict[str, Any]) -> Answer:
    """A dry run, or a Build Engine, that waits for this build ends as by an interrupt."""
    from ...hosts.comfy.process.shared_provider import provider

    digest = check_digest(request.match_info["digest"])
    found = (queue.find(digest) for queue in provider().queues)
    ticket = next((ticket for ticket in found if ticket is not None), None)
    if ticket is None:
        raise Refused("not_found", "No such build waits or runs; it may have ended meanwhile.")
    ticket.cancel()
    log.info("Slipstream: the build of %s is cancelled", ticket.plan)
    return {"cancelled": digest}


ROUTES: list[Route] = [
    ("GET", "/builds", list_builds),
    ("POST", "/builds/{digest}/cancel", cancel),
    ("GET", "/nodes", list_nodes),
    *DRY_RUN,
]
