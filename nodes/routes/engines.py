"""The engines in the store: list, show, check, remove."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from ...engine_cache import EngineStore
from ...hosts.comfy.process.server_events import ENGINES, send
from ...hosts.comfy.process.shared_provider import provider
from ...runtime.reporting.engine_coverage import Asked, engine_coverage
from ...runtime.reporting.engine_info import details, overview
from ...runtime.requests.pruning import prune
from .guard import Answer, Route, asks, changes
from .rules import Refused, check_digest, whole_number

_LARGEST = 2**20
_MOST_BYTES = 2**62


@asks()
async def list_engines(request: web.Request) -> Answer:
    return await asyncio.to_thread(lambda: overview(_store()))


@asks()
async def show_engine(request: web.Request) -> Answer:
    return await asyncio.to_thread(_show, _digest(request))


@changes()
async def verify_engine(request: web.Request, fields: dict[str, Any]) -> Answer:
    return await asyncio.to_thread(_verify, _digest(request))


@changes()
async def delete_engine(request: web.Request, fields: dict[str, Any]) -> Answer:
    return await asyncio.to_thread(_delete, _digest(request))


@changes()
async def try_again(request: web.Request, fields: dict[str, Any]) -> Answer:
    return await asyncio.to_thread(_try_again, _digest(request))


@changes()
async def verify_engines(request: web.Request, fields: dict[str, Any]) -> Answer:
    return await asyncio.to_thread(_verify_all)


@changes("limit_bytes")
async def prune_engines(request: web.Request, fields: dict[str, Any]) -> Answer:
    return await asyncio.to_thread(_prune, whole_number(fields, "limit_bytes", 0, _MOST_BYTES))


@changes("width", "height", "batch", "tokens")
async def hit(request: web.Request, fields: dict[str, Any]) -> Answer:
    least = {"width": 8, "height": 8, "batch": 1, "tokens": 1}
    asked = Asked(**{name: whole_number(fields, name, number, _LARGEST) for name, number in least.items()})

    def find() -> Answer:
        return engine_coverage([entry.manifest for entry in _store().list()], asked)

    return await asyncio.to_thread(find)


ROUTES: list[Route] = [
    ("GET", "/engines", list_engines),
    ("POST", "/engines/verify", verify_engines),
    ("POST", "/engines/prune", prune_engines),
    ("GET", "/engines/{digest}", show_engine),
    ("POST", "/engines/{digest}/verify", verify_engine),
    ("POST", "/engines/{digest}/delete", delete_engine),
    ("POST", "/engines/{digest}/try_again", try_again),
    ("POST", "/hit", hit),
]


def _store() -> EngineStore:
    return provider().store


def _digest(request: web.Request) -> str:
    return check_digest(request.match_info["digest"])


def _missing(digest: str) -> Refused:
    return Refused("not_found", f"There is no engine {digest[:12]} in the store; it may be gone. Reload the list.")


def _show(digest: str) -> Answer:
    store = _store()
    entry = store.lookup(digest)
    if entry is None:
        raise _missing(digest)
    return {**details(entry), "in_use": store.is_used(digest)}


def _verify(digest: str) -> Answer:
    store = _store()
    if not store.has(digest):
        raise _missing(digest)
    problem = store.verify(digest)
    if problem is not None:
        send(ENGINES, {})  # it was set aside
    return {"digest": digest, "problem": problem}


def _verify_all() -> Answer:
    problems = _store().verify_all()
    if any(problem is not None for problem in problems.values()):
        send(ENGINES, {})
    return {"problems": problems}


def _try_again(digest: str) -> Answer:
    if not _store().has(digest):
        raise _missing(digest)
    provider().try_again(digest)
    send(ENGINES, {})
    return {"digest": digest}


def _delete(digest: str) -> Answer:
    if not provider().delete(digest):
        raise _missing(digest)
    send(ENGINES, {})
    return {"deleted": digest}


def _prune(limit_bytes: int) -> Answer:
    removed = prune(_store(), limit_bytes)
    if removed:
        send(ENGINES, {})
    return {"removed": [entry.digest for entry in removed], "bytes": sum(entry.bytes for entry in removed)}
