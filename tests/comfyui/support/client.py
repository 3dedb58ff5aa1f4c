"""A small client of ComfyUI's HTTP and websocket API."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import websocket
from PIL import Image

from .graph import Graph

PREVIEW_EVENTS = (1, 4)
TEXT_EVENT = 3


class PromptRejected(Exception):
    """ComfyUI refused a prompt before running it."""


@dataclass(frozen=True)
class Run:
    """A finished prompt."""

    prompt_id: str
    status: str  # "success" or "error"
    outputs: dict[str, dict[str, Any]]  # node id -> what the node shows
    messages: list[list[Any]]  # [name, data] in order
    client: ComfyClient

    @property
    def ok(self) -> bool:
        """Whether the prompt ran to its end."""
        return self.status == "success"

    @property
    def interrupted(self) -> bool:
        """Whether the prompt was stopped by an interrupt."""
        return self.message("execution_interrupted") is not None

    @property
    def error(self) -> dict[str, Any] | None:
        """ComfyUI's report of the node that failed: `exception_type`, `exception_message`, `node_type`, …"""
        return self.message("execution_error")

    @property
    def seconds(self) -> float:
        """How long the prompt ran, by ComfyUI's own clock."""
        first, last = self.messages[0][1], self.messages[-1][1]
        return (last["timestamp"] - first["timestamp"]) / 1000

    @property
    def cached(self) -> list[str]:
        """Ids of the nodes that were not run again."""
        return list((self.message("execution_cached") or {}).get("nodes", []))

    def message(self, name: str) -> dict[str, Any] | None:
        """Return the data of the first message of a name."""
        return next((data for kind, data in self.messages if kind == name), None)

    def images(self) -> list[np.ndarray]:
        """Return the saved pictures as float arrays, height x width x 3, from 0 to 1."""
        files = [file for shown in self.outputs.values() for file in shown.get("images", [])]
        return [_pixels(self.client.view(file)) for file in files]

    def metadata(self) -> list[dict[str, str]]:
        """Return the text that ComfyUI stored inside the saved pictures."""
        files = [file for shown in self.outputs.values() for file in shown.get("images", [])]
        return [dict(Image.open(io.BytesIO(self.client.view(file))).info) for file in files]

    def latents(self) -> list[np.ndarray]:
        """Return the saved latents in full precision, batch x channels x height x width."""
        from safetensors.numpy import load

        files = [file for shown in self.outputs.values() for file in shown.get("latents", [])]
        return [load(self.client.view(file))["latent_tensor"] for file in files]


class ComfyClient:
    """Queues prompts and reads what comes of them; every event of its session is kept."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.id = uuid.uuid4().hex
        self.events: list[dict[str, Any]] = []  # websocket messages: {"type": …, "data": …}
        self.previews: list[bytes] = []  # preview pictures while sampling
        self.texts: list[str] = []  # progress texts of nodes
        self._socket = websocket.create_connection(f"ws{url[4:]}/ws?clientId={self.id}", timeout=60)
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ComfyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the websocket."""
        with contextlib.suppress(OSError, websocket.WebSocketException):
            self._socket.close()
        self._reader.join(5)

    def run(self, graph: Graph, timeout: float = 120) -> Run:
        """Queue a prompt and wait for its end, and for the last of its events: another thread reads them."""
        run = self.wait(self.queue(graph), timeout)
        self.wait_for_event("executing", prompt_id=run.prompt_id, node=None)
        return run

    def queue(self, graph: Graph) -> str:
        """Queue a prompt and return its id; a refused prompt raises `PromptRejected`."""
        body = {"prompt": graph.prompt, "client_id": self.id, "extra_data": {"extra_pnginfo": {}}}
        try:
            return str(self.post("/prompt", body)["prompt_id"])
        except urllib.error.HTTPError as refusal:
            raise PromptRejected(refusal.read().decode()) from None

    def wait(self, prompt_id: str, timeout: float = 120) -> Run:
        """Wait for a queued prompt's end."""
        entry = self._until(lambda: self._finished(prompt_id), timeout, f"prompt {prompt_id} to end")
        status = entry["status"]
        return Run(prompt_id, status["status_str"], entry["outputs"], status["messages"], self)

    def wait_for_event(self, kind: str, timeout: float = 60, **data: Any) -> dict[str, Any]:
        """Wait for a websocket event whose data holds the given values, counting those already seen."""

        def found() -> dict[str, Any] | None:
            for event in list(self.events):
                if event["type"] == kind and data.items() <= event.get("data", {}).items():
                    return event
            return None

        return self._until(found, timeout, f"the event {kind!r}")

    def interrupt(self) -> None:
        """Interrupt the running prompt."""
        self.post("/interrupt", {})

    def clear(self) -> None:
        """Empty the queue, interrupt what runs and wait until nothing does."""
        self.post("/queue", {"clear": True})
        if self.pending():
            self.interrupt()
        self._until(lambda: not self.pending() or None, 60, "the queue to empty")

    def cancel_builds(self) -> None:
        """Cancel all builds, those in the background too, and wait until nothing of them is left."""

        def ended() -> bool | None:
            for build in (left := self.get("/slipstream/v1/builds")["builds"]):
                with contextlib.suppress(urllib.error.HTTPError):  # it has ended meanwhile
                    self.post(f"/slipstream/v1/builds/{build['id']}/cancel", {})
            return not left or None

        self._until(ended, 60, "all builds to end")

    def pending(self) -> int:
        """Return how many prompts run or wait."""
        queue = self.get("/queue")
        return len(queue["queue_running"]) + len(queue["queue_pending"])

    def builds_take(self, seconds: float) -> None:
        """Set how long builds take, the one that runs included, where the server only pretends to build."""
        self.post("/slipstream_test/build_seconds", {"seconds": seconds})

    def fail(self, where: str | None = None, how: str = "raise") -> list[str]:
        """Have something fail once in the server's process, see the testing pack's `failures`; None: nothing.

        Returns:
            What failed so far.
        """
        done: list[str] = self.post("/slipstream_test/fail", {"where": where, "how": how})["done"]
        return done

    def free(self) -> None:
        """Make ComfyUI unload its models and forget its cached results."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def object_info(self, class_type: str) -> dict[str, Any]:
        """Return a node's description."""
        return dict(self.get(f"/object_info/{class_type}")[class_type])

    def view(self, file: dict[str, str]) -> bytes:
        """Return the content of an output file."""
        return self.fetch("/view?" + urllib.parse.urlencode(file))

    def get(self, path: str) -> Any:
        """Return the JSON that an address answers with."""
        return json.loads(self.fetch(path))

    def post(self, path: str, body: Any) -> Any:
        """Post JSON and return the JSON answered, or None for an empty answer."""
        answer = self.fetch(path, json.dumps(body).encode())
        return json.loads(answer) if answer.strip() else None

    def fetch(self, path: str, body: bytes | None = None) -> bytes:
        """Return the bytes that an address answers with; posts where a body is given."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def _finished(self, prompt_id: str) -> dict[str, Any] | None:
        # The history can lag behind the event that announces the end.
        entry = self.get(f"/history/{prompt_id}").get(prompt_id)
        return entry if entry and entry.get("status") else None

    def _until(self, ready: Any, timeout: float, what: str) -> Any:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            result = ready()
            if result is not None:
                return result
            time.sleep(0.05)
        raise TimeoutError(f"waited {timeout:.0f} s in vain for {what}")

    def _read(self) -> None:
        with contextlib.suppress(OSError, websocket.WebSocketException):
            while True:
                kind, data = self._socket.recv_data()
                if kind == websocket.ABNF.OPCODE_CLOSE:
                    return
                self._keep(kind, data)

    def _keep(self, kind: int, data: bytes) -> None:
        if kind == websocket.ABNF.OPCODE_TEXT:
            self.events.append(json.loads(data))
            return
        event = int.from_bytes(data[:4], "big")
        if event in PREVIEW_EVENTS:
            self.previews.append(data[4:])
        elif event == TEXT_EVENT:
            length = int.from_bytes(data[4:8], "big")
            self.texts.append(data[8 + length :].decode(errors="replace"))


def _pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=np.float32) / 255
