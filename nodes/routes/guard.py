"""Decorators that make routes of functions: they check the request, and every answer and error is JSON."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from ...core.errors import EngineInUse, SlipstreamError
from ...core.request_origin import is_of_this_machine, why_not_own_page
from ...hosts.comfy.process.server_events import allowed_origin
from .rules import Refused, check_names, check_origin, is_same_machine, parse_object

log = logging.getLogger(__name__)

BODY_BYTES = 64 * 1024
_FORWARDED = ("forwarded", "via", "x-forwarded-", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip")
"""How headers begin by which a proxy says that it hands on what somebody else asked."""

Answer = Mapping[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = tuple[str, str, Handler]
"""Method, path below `PREFIX`, and what answers."""

Asked = Callable[[web.Request], Answer]
Changing = Callable[[web.Request, dict[str, Any]], Answer]


def asks(*names: str) -> Callable[[Asked], Handler]:
    """Make a GET handler of a function that returns the answer, or raises `Refused` or a `SlipstreamError`.

    The function runs on a thread of its own, so it may block.

    Args:
        names: the query parameters that it reads; any other is refused.
    """

    def decorate(answer: Asked) -> Handler:
        @functools.wraps(answer)
        async def handler(request: web.Request) -> web.Response:
            async def work() -> Answer:
                check_names(request.query, names, "query")
                return await asyncio.to_thread(answer, request)

            return await _guarded(request, work)

        return handler

    return decorate


def changes(*names: str, most_bytes: int = BODY_BYTES) -> Callable[[Changing], Handler]:
    """Make a POST handler of a function; only ComfyUI's own page may call it. See `asks`.

    Args:
        names: the fields of the JSON body that it reads, which it is given as a dict; any other is refused.
        most_bytes: the largest body that is accepted.
    """

    def decorate(answer: Changing) -> Handler:
        @functools.wraps(answer)
        async def handler(request: web.Request) -> web.Response:
            async def work() -> Answer:
                _check_headers(request)
                check_names(request.query, (), "query")
                fields = await asyncio.to_thread(parse_object, await _body(request, most_bytes))
                check_names(fields, names)
                return await asyncio.to_thread(answer, request, fields)

            return await _guarded(request, work)

        return handler

    return decorate


def is_here(request: web.Request) -> bool:
    """Whether a person at this machine asks, by ComfyUI's own page or a program.

    A browser of this machine that asks by its name in the network counts too; what a proxy hands on does not, and
    neither does a page that has another name lead here.
    """
    socket = request.transport.get_extra_info("sockname") if request.transport else None
    local = socket[0] if isinstance(socket, tuple) else None
    if not is_same_machine(request.remote, local):
        return False
    host, origins, site = _sender(request)
    is_ours = not host or is_of_this_machine(host, local)
    return (
        is_ours
        and not any(name.lower().startswith(_FORWARDED) for name in request.headers)
        and why_not_own_page(host, origins, site) is None
    )


async def unknown(request: web.Request) -> web.Response:
    """Whatever else is asked below our prefix."""
    return _error("not_found", 404, f"There is no {request.method:.10} of this address; docs/web-api.md lists them.")


async def _guarded(request: web.Request, work: Callable[[], Awaitable[Answer]]) -> web.Response:
    try:
        return _json(await work(), 200)
    except Refused as error:
        return _error(error.code, error.status, str(error))
    except EngineInUse as error:
        return _error("conflict", 409, str(error))
    except SlipstreamError as error:
        log.warning("Slipstream: %s", error)
        return _error("failed", 500, str(error))
    except ConnectionError:  # the page has gone
        raise
    except Exception as error:
        log.exception("Slipstream: %s of the page broke", request.method)
        return _error("failed", 500, f"Slipstream broke ({type(error).__name__}); please report this with the log.")


def _check_headers(request: web.Request) -> None:
    """Check origin and content type.

    Raises:
        Refused: another page sent this, or it holds no JSON.
    """
    check_origin(*_sender(request), allowed_origin())
    if request.content_type != "application/json":
        raise Refused("unsupported", "Send JSON, with the header Content-Type: application/json.")
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise Refused("unsupported", "Send the body as it is, without Content-Encoding.")


def _sender(request: web.Request) -> tuple[str, list[str], str]:
    """Host, Origin and Sec-Fetch-Site of a request."""
    headers = request.headers
    return headers.get("Host", ""), headers.getall("Origin", []), headers.get("Sec-Fetch-Site", "")


async def _body(request: web.Request, most: int) -> bytes:
    """Read the body.

    Raises:
        Refused: it is larger than `most` bytes, or did not arrive whole.
    """
    found = bytearray()
    if (request.content_length or 0) <= most:
        try:
            while len(found) <= most and (part := await request.content.readany()):
                found += part
        except (web.HTTPException, web.RequestPayloadError, ValueError) as error:
            raise Refused("bad_request", f"The body did not arrive whole ({type(error).__name__}).") from None
        if len(found) <= most:
            return bytes(found)
    raise Refused("too_large", f"The body may have {most} bytes at most.")


def _json(data: Answer, status: int) -> web.Response:
    text = json.dumps(data, allow_nan=False)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


def _error(code: str, status: int, message: str) -> web.Response:
    return _json({"error": {"code": code, "message": message}}, status)
