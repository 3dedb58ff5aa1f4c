"""Routes for the engines in the store: list, show, verify, delete, prune."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...engine_cache import ADOPT, EngineStore, Entry
from ...hosts.comfy.process.server_events import ENGINES, send
from ...hosts.comfy.process.shared_provider import provider
from ...runtime.reporting.engine_coverage import Asked, engine_coverage
from ...runtime.reporting.engine_info import details, overview
from ...runtime.requests.model_grid import names_of_files
from ...runtime.requests.pruning import prune
from .guard import Answer, Route, asks, changes, is_here
from .rules import Refused, check_digest, whole_number

_LARGEST = 2**20
_MOST_BYTES = 2**62


@asks()
def list_engines(request: web.Request) -> Answer:
    store = _store()
    names, told = names_of_files(store, store.list()), overview(store)
    return {**told, "engines": [{**each, "models": names.get(each["digest"], [])} for each in told["engines"]]}


@asks()
def show_engine(request: web.Request) -> Answer:
    store, digest = _store(), _digest(request)
    entry = store.lookup(digest)
    if entry is None:
        raise _missing(digest)
    return {**details(entry), "in_use": store.is_used(digest)}


@changes()
def verify_engine(request: web.Request, fields: dict[str, Any]) -> Answer:
    problem = _store().verify(digest := _stored(request))
    if problem is not None:
        send(ENGINES, {})  # it was set aside
    return {"digest": digest, "problem": problem}


@changes()
def delete_engine(request: web.Request, fields: dict[str, Any]) -> Answer:
    digest = _digest(request)
    if not provider().delete(digest):
        raise _missing(digest)
    send(ENGINES, {})
    return {"deleted": digest}


@changes()
def try_again(request: web.Request, fields: dict[str, Any]) -> Answer:
    provider().try_again(digest := _stored(request))
    send(ENGINES, {})
    return {"digest": digest}


@changes("digests")
def adopt_engines(request: web.Request, fields: dict[str, Any]) -> Answer:
    """Sign engines that no maker's key vouches for, since the person at this machine does; none if one is refused."""
    if not is_here(request):
        raise Refused(
            "forbidden",
            "Engines hold native code, so only a browser on the machine that runs ComfyUI may have them trusted. "
            f"There, `{ADOPT}` of Slipstream's command line does the same.",
        )
    store = _store()
    entries = [_adoptable(store, digest) for digest in _digests(fields)]
    try:
        store.adopt(entries)
    finally:
        send(ENGINES, {})
    return {"adopted": [entry.digest for entry in entries]}


@changes()
def verify_engines(request: web.Request, fields: dict[str, Any]) -> Answer:
    problems = _store().verify_all()
    if any(problem is not None for problem in problems.values()):
        send(ENGINES, {})
    return {"problems": problems}


@changes("limit_bytes")
def prune_engines(request: web.Request, fields: dict[str, Any]) -> Answer:
    removed = prune(_store(), whole_number(fields, "limit_bytes", 0, _MOST_BYTES))
    if removed:
        send(ENGINES, {})
    return {"removed": [entry.digest for entry in removed], "bytes": sum(entry.bytes for entry in removed)}


@changes("width", "height", "batch", "tokens")
def hit(request: web.Request, fields: dict[str, Any]) -> Answer:
    least = {"width": 8, "height": 8, "batch": 1, "tokens": 1}
    asked = Asked(**{name: whole_number(fields, name, number, _LARGEST) for name, number in least.items()})
    return engine_coverage([entry.manifest for entry in _store().list()], asked)


ROUTES: list[Route] = [
    ("GET", "/engines", list_engines),
    ("POST", "/engines/verify", verify_engines),
    ("POST", "/engines/prune", prune_engines),
    ("POST", "/engines/adopt", adopt_engines),
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


def _stored(request: web.Request) -> str:
    """The digest of an engine that is in the store, readable or not.

    Raises:
        Refused: there is no such engine.
    """
    digest = _digest(request)
    if not _store().has(digest):
        raise _missing(digest)
    return digest


def _digests(fields: dict[str, Any]) -> list[str]:
    """The field `digests`, each once.

    Raises:
        Refused: it is no list of digests, or is empty.
    """
    listed = fields.get("digests")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, str) for each in listed):
        raise Refused("bad_request", "digests must be a list of the digests of engines, at least one.")
    return [check_digest(each) for each in dict.fromkeys(listed)]


def _adoptable(store: EngineStore, digest: str) -> Entry:
    """The engine, once it is sure that a person may vouch for it.

    Raises:
        Refused: there is no such engine, or it is trusted, was changed, or names another maker's key.
    """
    entry = store.lookup(digest)
    if entry is None:
        raise _missing(digest)
    if entry.adoptable is None:
        why = entry.why_untrusted() or f"The engine {digest[:12]} is trusted already."
        raise Refused("conflict", why)
    return entry


def _missing(digest: str) -> Refused:
    return Refused("not_found", f"There is no engine {digest[:12]} in the store; it may be gone. Reload the list.")
