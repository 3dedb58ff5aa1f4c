"""Requests byte by byte, as no well-behaved client sends them."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Status 0: the server closed the connection without a word."""

    status: int
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """Keeps one connection open for as long as the server does."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._socket: socket.socket | None = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """A request in good order."""
        all_headers = {"Host": f"127.0.0.1:{self.port}", "Content-Length": len(body), **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
        return self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def send(self, request: bytes) -> Answer:
        """Whatever bytes; asked once more on a new connection where the old one turns out to be closed."""
        fresh = self._socket is None
        answer = self._try(request)
        return self._try(request) if answer is None and not fresh else answer or Answer(0)

    def _try(self, request: bytes) -> Answer | None:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before the end
            self._socket.sendall(request)
        answer = http.client.HTTPResponse(self._socket, method=request.split(b" ", 1)[0].decode("latin-1"))
        try:
            answer.begin()
            found = Answer(answer.status, answer.read())
        except (http.client.HTTPException, ConnectionError):
            self._close()
            return None
        if answer.will_close:
            self._close()
        return found

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
