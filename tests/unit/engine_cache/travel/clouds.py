"""Azurite, and as much of Google's storage as `gcsfs` asks for: both on loopback."""

from __future__ import annotations

import contextlib
import email
import email.policy
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from slipstream.tests.unit.engine_cache.travel.servers import BUCKET

_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which everybody knows."""


def azure_options(address: str) -> dict[str, str]:
    """What `adlfs` is to be told of an Azurite."""
    facts = {"DefaultEndpointsProtocol": "http", "AccountName": _ACCOUNT, "AccountKey": _ACCOUNT_KEY}
    facts["BlobEndpoint"] = f"{address}/{_ACCOUNT}"
    return {"connection_string": "".join(f"{name}={value};" for name, value in facts.items())}


def google_options(address: str) -> dict[str, str]:
    """What `gcsfs` is to be told of the server below."""
    return {"endpoint_url": address, "token": "anon", "project": "tests"}


def find_azurite() -> str | None:
    """The program that serves blobs; None where there is none."""
    ours = Path.home() / ".cache" / "slipstream" / "azurite" / "node_modules" / ".bin"
    return shutil.which("azurite-blob") or shutil.which("azurite-blob", path=str(ours))


@contextlib.contextmanager
def azurite(program: str, folder: Path) -> Iterator[str]:
    """An Azurite with one container; yields its address."""
    import adlfs

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ("--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder))
    command = [program, *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < deadline, "Azurite does not start"
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port}"
        adlfs.AzureBlobFileSystem(**azure_options(address), skip_instance_cache=True).mkdir(BUCKET)
        yield address
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def google_storage() -> Iterator[str]:
    """A server of one bucket, which keeps the one promise that leases need: `ifGenerationMatch=0` writes once."""
    objects: dict[str, bytes] = {}
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url, asked = self._url()
            name = self._name(url)
            if not name:
                self._list(asked.get("prefix", ""))
            elif name not in objects:
                self._answer(404)
            elif asked.get("alt") != "media":
                self._answer(200, _resource(name, objects[name]))
            else:
                self._send_part(objects[name])

        def do_POST(self) -> None:
            url, asked = self._url()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "upload_id" in asked:
                self._write(asked["upload_id"], body, asked)
            elif asked.get("uploadType") == "resumable":
                host, port = self.server.server_address[:2]
                once = "&ifGenerationMatch=0" if "ifGenerationMatch" in asked else ""
                place = f"http://{self.headers['Host'] or f'{host}:{port}'}{url}?upload_id={asked['name']}{once}"
                self._answer(200, {}, {"Location": place})
            else:
                head = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
                about, content = email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts()
                self._write(json.loads(about.get_content())["name"], _content(body), asked)

        def do_DELETE(self) -> None:
            self._answer(204 if objects.pop(self._name(self._url()[0]), None) is not None else 404)

        def _url(self) -> tuple[str, dict[str, str]]:
            parts = urlsplit(self.path)
            return parts.path, {name: values[-1] for name, values in parse_qs(parts.query).items()}

        def _name(self, path: str) -> str:
            return unquote(path.partition(f"/b/{BUCKET}/o")[2].lstrip("/"))

        def _write(self, name: str, content: bytes, asked: dict[str, str]) -> None:
            with lock:
                if asked.get("ifGenerationMatch") == "0" and name in objects:
                    self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
                    return
                objects[name] = content
            self._answer(200, _resource(name, content))

        def _list(self, prefix: str) -> None:
            inside = [name for name in objects if name.startswith(prefix) and "/" not in name[len(prefix) :]]
            folders = {prefix + name[len(prefix) :].partition("/")[0] + "/" for name in objects if
                       name.startswith(prefix) and "/" in name[len(prefix) :]}  # fmt: skip
            items = [_resource(name, objects[name]) for name in inside]
            self._answer(200, {"items": items, "prefixes": sorted(folders)})

        def _send_part(self, content: bytes) -> None:
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if found is None:
                self._answer(200, content)
                return
            start, end = int(found[1]), int(found[2] or len(content) - 1)
            self._answer(206 if start < len(content) else 416, content[start : end + 1])

        def _answer(self, status: int, data: Any = b"", headers: dict[str, str] | None = None) -> None:
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _resource(name: str, content: bytes) -> dict[str, str]:
    return {"kind": "storage#object", "bucket": BUCKET, "name": name, "size": str(len(content))}


def _content(body: bytes) -> bytes:
    """Of an upload in two parts, as `gcsfs` writes it: parsers of mail would change line ends in it."""
    second = body.split(b"--==0==", 2)[2]
    return second.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")


def without_grpc() -> None:
    """Have `gcsfs` not ask for the kind of a bucket by gRPC, which no server here speaks."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
