"""Requests as prompts of ComfyUI's queue, without ComfyUI."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.core.errors import BuildCancelled
from slipstream.core.spec import Role
from slipstream.hosts.comfy.building import prompt_builder
from slipstream.hosts.comfy.building.prompt_builder import PromptBuilder, prompt_of
from slipstream.runtime.provider import HostHooks
from slipstream.runtime.requests.build_requests import Wanted
from slipstream.runtime.settings.model_settings import PRECISIONS, Settings

WANTED = Wanted("demo", Role.UNET, Settings.of_text(resolutions="64x64"), 2, 77)


class Queue:
    """ComfyUI's. A prompt goes from the waiting ones to the running ones, and from there into the history."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str]] = []
        self.running: list[tuple[int, str]] = []
        self.history: dict[str, Any] = {}

    def get_current_queue(self) -> tuple[list[Any], list[Any]]:
        return list(self.running), list(self.waiting)

    def get_history(self, prompt_id: str) -> dict[str, Any]:
        return {prompt_id: self.history[prompt_id]} if prompt_id in self.history else {}

    def delete_queue_item(self, which: Any) -> None:
        self.waiting = [item for item in self.waiting if not which(item)]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    server = SimpleNamespace(prompt_queue=queue, address="127.0.0.1", port=0)
    monkeypatch.setattr(prompt_builder, "server_of_process", lambda: server)
    monkeypatch.setattr(prompt_builder, "_POLL_SECONDS", 0.0)
    return queue


@pytest.fixture
def posted(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_builder, "_post", lambda prompt: "a prompt")
    queue.waiting.append((1, "a prompt"))


@pytest.mark.parametrize("word", PRECISIONS)
def test_an_order_reaches_the_node_in_the_words_of_its_widgets(word: str) -> None:
    request = replace(WANTED, settings=Settings.of_text(resolutions="64x64", precision=word))
    (inputs,) = (
        node["inputs"] for node in prompt_of(request).values() if node["class_type"] == "SlipstreamBuildEngine"
    )
    assert inputs["precision"] == word


def test_a_prompt_that_somebody_takes_out_of_the_queue_ends_its_order(queue: Queue, posted: None) -> None:
    looks: list[str] = []

    def progress(update: Any) -> None:
        looks.append(update.message)
        queue.waiting.clear()
        assert len(looks) < 10, "it waits for ever"

    with pytest.raises(BuildCancelled, match="taken out of ComfyUI's queue"):
        list(PromptBuilder().make(WANTED, HostHooks(progress)))
    assert looks == ["waiting in ComfyUI's queue"]


def test_a_prompt_that_ends_between_two_looks_is_reported(
    queue: Queue, posted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"outputs": {"2": {"text": ["engine, ready"]}}}
    looks = iter([None, done, done])
    queue.waiting.clear()
    monkeypatch.setattr(prompt_builder, "_history", lambda prompt: next(looks))
    assert list(PromptBuilder().make(WANTED, HostHooks())) == ["engine, ready"]


class ComfyUI(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"prompt_id": "from here"}).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), ComfyUI) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_proxy_is_not_asked_for_this_very_process(queue: Queue, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_builder.server_of_process().port = port
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert prompt_builder._post({}) == "from here"
