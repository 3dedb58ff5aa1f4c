"""The route by which load balancers and people learn whether this server has the engines that it needs."""

from __future__ import annotations

from aiohttp import web

from .guard import Answer, Route, asks


@asks()
def health(request: web.Request) -> Answer:
    from ...core.version import __version__
    from ...hosts.comfy.process.shared_provider import provider

    here = provider()
    ready = sum(entry.why_untrusted() is None for entry in here.store.list())
    missing = [{"digest": digest, "label": label} for digest, label in here.missing().items()]
    return {
        "text": f"{ready} engines ready, {len(missing)} missing",
        "ready": ready,
        "missing": missing,
        "building": sum(len(queue.pending()) for queue in here.queues),
        "never_builds": here.supply.never_builds,
        "version": __version__,
    }


ROUTES: list[Route] = [("GET", "/health", health)]
