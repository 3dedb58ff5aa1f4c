"""A ComfyUI server that test-runs workflows for the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.programs import Started, TooLong, start
from ...hosts.comfy.building.without_server import find_checkout
from ..errors import CommandError

_START_SECONDS = 300.0
_POLL_SECONDS = 0.3
_LONGEST_ANSWER_SECONDS = 120.0


class ComfyUI:
    """A running server, by its address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str) -> Any:
        """What the server answers.

        Raises:
            CommandError: it does not, or refuses.
        """
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `get`, with a JSON body."""
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def run(self, prompt: Mapping[str, Any], targets: Sequence[str]) -> str | None:
        """Queue a prompt and wait for its end; why it failed, or None."""
        body = {"prompt": prompt, "partial_execution_targets": list(targets)}
        name = self.post("/prompt", body)["prompt_id"]
        while not (done := self.get(f"/history/{name}").get(name)):
            time.sleep(_POLL_SECONDS)
        for kind, data in done.get("status", {}).get("messages", []):
            if kind == "execution_error":
                return str(data.get("exception_message", "the test run failed")).strip()
            if kind == "execution_interrupted":
                return "the test run was stopped"
        return None

    def _ask(self, request: urllib.request.Request) -> Any:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=_LONGEST_ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise CommandError(f"ComfyUI at {self.url} refused {request.selector}: {_refusal(error)}") from None
        except (OSError, ValueError) as error:
            raise CommandError(f"ComfyUI at {self.url} does not answer: {error}") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        told = json.load(error)
    except ValueError:
        return str(error)
    details = [each["details"] for node in told.get("node_errors", {}).values() for each in node.get("errors", ())]
    message = told.get("error", {})
    return "; ".join([str(message.get("message", message)) if isinstance(message, dict) else str(message), *details])


@contextlib.contextmanager
def started(comfyui: Path | None, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[ComfyUI]:
    """A server of its own for the block, by the ComfyUI that the user means and this Python.

    Args:
        arguments: further ones of ComfyUI's main.py.
        environment: further variables.

    Raises:
        CommandError: it does not start, or Slipstream is not among its custom nodes.
        BackendUnavailable: there is no such ComfyUI.
    """
    checkout = find_checkout(comfyui)
    if checkout is None:
        raise CommandError("No ComfyUI was found to run the workflow. Name the folder of yours with --comfyui DIR")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "main.py",
        "--listen",
        "127.0.0.1",
        "--port",
        str(port),
        "--disable-auto-launch",
        *arguments,
    ]
    with tempfile.TemporaryFile() as log:
        process = start(command, checkout, {**os.environ, **environment}, output=log, errors=log)
        try:
            server = ComfyUI(f"http://127.0.0.1:{port}")
            _await(server, process, log)
            yield server
        finally:
            _end(process)


def _await(server: ComfyUI, process: Started, log: Any) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            server.get("/system_stats")
            break
        except CommandError:
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                last = log.read()[-2000:].decode(errors="replace")
                raise CommandError(f"ComfyUI did not start; its log ends: {last}") from None
        time.sleep(_POLL_SECONDS)
    try:
        server.get("/slipstream/v1/health")
    except CommandError:
        raise CommandError(
            "Slipstream is not among this ComfyUI's custom nodes: put its folder into custom_nodes, or name the base "
            "directory that has it: --comfyui-args '--base-directory DIR'"
        ) from None


def _end(process: Started) -> None:
    process.send_signal(signal.SIGINT if os.name != "nt" else signal.SIGTERM)
    with contextlib.suppress(TooLong):
        process.wait(10)
    if process.poll() is None:
        process.kill()
        process.wait(30)
