"""What stands between a request and the page: other pages of the same browser may not use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from ..core.request_origin import host_name, why_not_own_page

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_ASKING = ("GET", "HEAD", "OPTIONS")

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """A layer of ASGI around the page.

    Args:
        hosts: names that the page may be asked by; None for all. A page of elsewhere can have its own name lead to this
            machine, and would then pass for ours.
    """

    def __init__(self, app: App, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._why_refused(scope) if scope["type"] in ("http", "websocket") else None
        if reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send, f"Refused: {reason}. Open Slipstream's page at the address that it was given out at.")

    def _why_refused(self, scope: Scope) -> str | None:
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        host = next((value for name, value in headers if name == "host"), "")
        if self._hosts is not None and host_name(host) not in self._hosts:
            return f"{host!r:.100} is not this machine"
        if scope.get("method") in _ASKING:
            return None
        origins = [value for name, value in headers if name == "origin"]
        site = next((value for name, value in headers if name == "sec-fetch-site"), "")
        return why_not_own_page(host, origins, site)


async def _refuse(send: Send, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode("utf-8")})
