"""A real S3 server and a web server on loopback, and a bad connection to either."""

from __future__ import annotations

import contextlib
import functools
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

BUCKET = "engines"
KEYS = {"key": "test", "secret": "test"}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server (moto's) with one bucket; yields its address."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    client.create_bucket(Bucket=BUCKET)
    try:
        yield address
    finally:
        server.stop()


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """A web server that only sends whole files; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class BadConnection:
    """Passes connections on to a server until `spoil` says otherwise.

    Attributes:
        spoil: given the number of a connection and a piece of what the server sends; what to pass on instead, or None
            to cut the connection there.
        connections: so far.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._target = host, int(port)
        self.spoil: Callable[[int, bytes], bytes | None] = lambda number, piece: piece
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> BadConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(self._target)
                for source, sink, spoil in ((client, server, None), (server, client, self.connections)):
                    threading.Thread(target=self._pass_on, args=(source, sink, spoil), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                passed = piece if number is None else self.spoil(number, piece)
                if passed is None:
                    break
                sink.sendall(passed)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
