"""The reading half of a websocket client, since no package for one is sure to be there."""

from __future__ import annotations

import base64
import os
import socket
import time

_CONTINUED, _TEXT, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x8, 0x9, 0xA
_CHUNK = 1 << 16


class WebSocket:
    """A websocket whose text messages are read; binary ones, such as previews, are dropped.

    Raises:
        OSError: the server cannot be reached, or takes no websocket at `path`.
    """

    def __init__(self, host: str, port: int, path: str, timeout: float = 10.0) -> None:
        self._socket = socket.create_connection((host, port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._is_text = False
        try:
            self._shake_hands(host, port, path, timeout)
        except BaseException:
            self.close()
            raise

    def receive(self, timeout: float) -> str | None:
        """Return the next text message; None where none is complete after `timeout` seconds.

        Raises:
            OSError: the connection has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            while (frame := self._take_frame()) is not None:
                text = self._text_of(*frame)
                if text is not None:
                    return text
            if not self._read_more(deadline - time.monotonic()):
                return None

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()

    def _shake_hands(self, host: str, port: int, path: str, timeout: float) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13",
        )  # fmt: skip
        self._socket.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        deadline = time.monotonic() + timeout
        while b"\r\n\r\n" not in self._buffer:
            if not self._read_more(deadline - time.monotonic()):
                raise TimeoutError("the server did not answer the websocket's handshake")
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"101"]:
            raise ConnectionError(f"the server took no websocket: {head.splitlines()[0].decode(errors='replace')}")
        self._buffer = bytearray(rest)

    def _read_more(self, seconds: float) -> bool:
        """Wait for more bytes; False where none came in time."""
        if seconds <= 0:
            return False
        self._socket.settimeout(seconds)
        try:
            chunk = self._socket.recv(_CHUNK)
        except TimeoutError:
            return False
        if not chunk:
            raise ConnectionError("the server closed the connection")
        self._buffer += chunk
        return True

    def _take_frame(self) -> tuple[bool, int, bytes] | None:
        """Take one frame off the buffer: whether it ends its message, its kind and its content."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        length, start = buffer[1] & 0x7F, 2
        if length >= 126:
            start = 4 if length == 126 else 10
            if len(buffer) < start:
                return None
            length = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + length:
            return None
        is_last, kind, content = bool(buffer[0] & 0x80), buffer[0] & 0x0F, bytes(buffer[start : start + length])
        del buffer[: start + length]
        return is_last, kind, content

    def _text_of(self, is_last: bool, kind: int, content: bytes) -> str | None:
        """Return a text message that a frame completes."""
        if kind == _CLOSE:
            raise ConnectionError("the server closed the websocket")
        if kind == _PING:
            self._send(_PONG, content)
        if kind >= _CLOSE:
            return None
        if kind != _CONTINUED:
            self._parts, self._is_text = [], kind == _TEXT
        self._parts.append(content)
        return b"".join(self._parts).decode() if is_last and self._is_text else None

    def _send(self, kind: int, content: bytes) -> None:
        """Send a short frame, masked as clients must."""
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(content))
        self._socket.sendall(bytes([0x80 | kind, 0x80 | len(content)]) + mask + masked)
