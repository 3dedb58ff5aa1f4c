"""A client of a ComfyUI server: queues one prompt at a time and waits for the event that it has succeeded."""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote, urlsplit

from ..measuring.deadline import Deadline
from .graph import Prompt
from .process import Server, ServerDied
from .websocket import WebSocket

EVENT = "slipstream_benchmark"
"""The probe's events, and its wishes in `extra_data`."""

METADATA = "slipstream"
"""Where a saved picture says which engines made it."""

_DYING_SECONDS = 20.0
_UNLOADING_SECONDS = 1.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is this machine


class PictureFailed(Exception):
    """ComfyUI refused a prompt, or a node failed; the message says why."""


@dataclass
class Picture:
    """A finished prompt.

    Attributes:
        client_s: seconds from sending the prompt to hearing that it has succeeded.
        nodes: the probe's figures, a mapping for each sampler, decoder and encoder in the order in which they ran.
        files: saved pictures, as `/view` takes them.
    """

    client_s: float = 0.0
    nodes: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Calls:
    """Calls of models, ControlNets, VAEs and text encoders that Slipstream accelerates.

    Attributes:
        engine: engines of whole models made them, or engines of their blocks.
        of_blocks: those of them that the latter made.
        blocks: calls of single blocks, where models went by blocks, and those of them `blocks_on_engines`.
        reasons: why the eager model ran, with how often each was given.
    """

    engine: int = 0
    eager: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    of_blocks: int = 0
    blocks: int = 0
    blocks_on_engines: int = 0

    def __add__(self, other: Calls) -> Calls:
        return Calls(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class Client:
    """A client with a websocket of its own.

    Args:
        picture_limit: seconds after which a server is taken for dead that has not finished a prompt.

    Raises:
        ServerDied: there is no server any more.
    """

    def __init__(self, server: Server, deadline: Deadline, picture_limit: float) -> None:
        self._server, self._deadline, self._picture_limit = server, deadline, picture_limit
        self._id = uuid.uuid4().hex
        address = urlsplit(server.address)
        try:
            self._socket = WebSocket(str(address.hostname), int(address.port or 80), f"/ws?clientId={self._id}")
        except OSError as error:
            raise self._death(error) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def run(self, prompt: Prompt, **wishes: bool | str) -> Picture:
        """Queue a prompt and wait for its end.

        Args:
            wishes: of the probe, such as `keep`.

        Raises:
            PictureFailed: ComfyUI refused it, or a node failed.
            ServerDied: the server's process ended, or did nothing for too long.
            OutOfTime: the command's time is over.
        """
        body = {"prompt": prompt, "client_id": self._id, "extra_data": {EVENT: wishes, "extra_pnginfo": {}}}
        began = time.perf_counter()
        given_up = time.monotonic() + self._picture_limit
        prompt_id = self.post("/prompt", body)["prompt_id"]
        picture = Picture()
        while True:
            event = self._next_event(given_up)
            data = event.get("data") or {}
            if data.get("prompt_id") != prompt_id:
                continue
            kind = event["type"]
            if kind == "execution_success":
                picture.client_s = time.perf_counter() - began
                return picture
            if kind in ("execution_error", "execution_interrupted"):
                raise PictureFailed(_why_failed(data))
            if kind == EVENT:
                picture.nodes.append(data)
            elif kind == "executed":
                picture.files += (data.get("output") or {}).get("images", [])

    def calls(self, picture: Picture) -> Calls | None:
        """Return who made a picture, from its own metadata; None where it says nothing of Slipstream."""
        from PIL import Image

        if not picture.files:
            return None
        content = self.fetch("/view?" + urllib.parse.urlencode(picture.files[0]))
        with Image.open(io.BytesIO(content)) as image:
            text = image.info.get(METADATA)
        return None if text is None else calls_of(json.loads(text))

    def unload_models(self) -> None:
        """Have ComfyUI take its models off the GPU, as its button does, so that each variant begins alike."""
        self.post("/free", {"unload_models": True, "free_memory": False})
        time.sleep(_UNLOADING_SECONDS)  # ComfyUI answers before it has done so, and would run a prompt first

    def node_info(self, class_type: str) -> dict[str, Any]:
        """Return a node's description.

        Raises:
            PictureFailed: the server has no such node.
        """
        found = json.loads(self.fetch(f"/object_info/{quote(class_type, safe='')}"))
        if class_type not in found:
            raise PictureFailed(f"the server has no node {class_type}")
        return dict(found[class_type])

    def system_stats(self) -> dict[str, Any]:
        """Return what the server says of itself and its devices."""
        return dict(json.loads(self.fetch("/system_stats")))

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """Post JSON and return the JSON that was answered, empty for an empty answer.

        Raises:
            PictureFailed: the server refuses it.
            ServerDied: there is no server any more.
        """
        answer = self.fetch(path, json.dumps(body).encode())
        return dict(json.loads(answer)) if answer.strip() else {}

    def fetch(self, path: str, body: bytes | None = None) -> bytes:
        """Return the bytes that an address answers with; posts where a body is given. Raises as `post` does."""
        request = urllib.request.Request(self._server.address + path, body, {"Content-Type": "application/json"})
        try:
            with _OPENER.open(request, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refusal:
            raise PictureFailed(refusal.read().decode(errors="replace")[:2000]) from None
        except OSError as error:
            raise self._death(error) from error

    def _next_event(self, given_up: float) -> dict[str, Any]:
        while True:
            self._deadline.check()
            if time.monotonic() > given_up:
                raise ServerDied(f"the server did not finish a picture in {self._picture_limit:.0f} s")
            try:
                text = self._socket.receive(min(1.0, self._deadline.seconds_left))
            except OSError as error:
                raise self._death(error) from error
            if text is not None:
                return dict(json.loads(text))
            if reason := self._server.why_ended():
                raise ServerDied(reason)

    def _death(self, error: OSError) -> ServerDied:
        """What became of a server that does not answer any more."""
        return ServerDied(self._server.why_ended(_DYING_SECONDS) or f"the server does not answer: {error}")


def calls_of(record: Mapping[str, Any]) -> Calls:
    """Return the calls in a picture's record, over all nodes and runs."""
    runs = [run for found in record.values() if isinstance(found, list) for run in found]
    counted = [run for run in runs if "engine_calls" in run]
    reasons: Counter[str] = Counter()
    for run in counted:
        reasons.update(run.get("reasons", {}))
    of_blocks = sum(run.get("block_calls", 0) for run in counted)
    engine = of_blocks + sum(run["engine_calls"] for run in counted)
    blocks, on_engines = (sum(run.get(name, 0) for run in counted) for name in ("blocks", "blocks_on_engines"))
    return Calls(engine, sum(run["eager_calls"] for run in counted), reasons, of_blocks, blocks, on_engines)


def _why_failed(data: Mapping[str, Any]) -> str:
    what = data.get("exception_message") or "interrupted"
    return f"{data.get('node_type', 'a node')}: {data.get('exception_type', '')} {what}".strip()
