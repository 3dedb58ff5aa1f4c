"""Whatever a route's function does, the page gets JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request

from slipstream.core.errors import EngineInUse, StoreError
from slipstream.engine_cache import EngineStore
from slipstream.nodes import routes
from slipstream.nodes.routes import engines, guard, settings
from slipstream.nodes.routes.guard import asks

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def answer_of(error: BaseException | None, data: Any = None) -> tuple[int, Any]:
    @asks()
    def handler(request: web.Request) -> Any:
        if error is not None:
            raise error
        return data

    answer = asyncio.run(handler(make_mocked_request("GET", "/x")))
    assert answer.headers["Cache-Control"] == "no-store" and answer.content_type == "application/json"
    return answer.status, json.loads(answer.text)


def test_an_answer() -> None:
    assert answer_of(None, {"name": "é"}) == (200, {"name": "é"})


def test_a_bug_of_ours_is_logged_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status, data = answer_of(KeyError("inner secret"))
    assert status == 500 and data["error"]["code"] == "failed"
    assert "KeyError" in data["error"]["message"] and "secret" not in data["error"]["message"]
    assert "Traceback" in caplog.text and "inner secret" in caplog.text


@pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": object()}, {("a",): 1}])
def test_an_answer_that_is_no_json(data: Any) -> None:
    status, found = answer_of(None, data)
    assert status == 500 and found["error"]["code"] == "failed"


def test_errors_that_say_what_to_do() -> None:
    status, data = answer_of(StoreError("The disk is full. Free some space."))
    assert status == 500 and data["error"] == {"code": "failed", "message": "The disk is full. Free some space."}
    status, data = answer_of(EngineInUse("It is in use."))
    assert status == 409 and data["error"]["code"] == "conflict"


def test_a_page_that_has_gone_and_a_server_that_ends() -> None:
    for error in (ConnectionResetError(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            answer_of(error)


@pytest.mark.parametrize(
    ("peer", "fields", "status"),
    [
        ("10.0.0.9", {"folder": "/elsewhere"}, 403),
        ("10.0.0.9", {"folder": None, "notifications": True}, 200),
        ("10.0.0.9", {"notifications": True}, 200),
        ("10.0.0.1", {"folder": "/elsewhere"}, 200),
        ("127.0.0.1", {"folder": "/elsewhere"}, 200),
    ],
)
def test_the_folder_is_changed_from_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, peer: str, fields: dict[str, Any], status: int
) -> None:
    monkeypatch.delenv("SLIPSTREAM_HOME", raising=False)
    monkeypatch.setattr(settings, "_change", lambda fields: {})
    answer = asyncio.run(posted(settings.change, fields, peer))
    data = json.loads(answer.text)
    assert answer.status == status, data
    if status == 403:
        assert "SLIPSTREAM_HOME" in data["error"]["message"] and "settings.json" in data["error"]["message"]


def test_engines_are_trusted_from_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(engines, "_store", asked)
    answer = asyncio.run(posted(engines.adopt_engines, {"digests": ["0" * 64]}, "10.0.0.9"))
    assert answer.status == 403 and "trust adopt" in json.loads(answer.text)["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({"Host": "127.0.0.1:8188", "Origin": "http://127.0.0.1:8188"}, True),
        ({"Host": f"{socket.gethostname().upper()}:8188"}, True),
        ({"Host": "10.0.0.1:8188", "Origin": "http://10.0.0.1:8188", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Host": "rebound.example:8188", "Origin": "http://rebound.example:8188"}, False),
        ({"Host": "rebound.example:8188"}, False),
        ({"Host": "203.0.113.7:8188"}, False),
        ({"Host": "127.0.0.1:8188", "X-Forwarded-Proto": "https"}, False),
        ({"Host": "127.0.0.1:8188", "CF-Connecting-IP": "203.0.113.7"}, False),
        ({"Host": "127.0.0.1.rebound.example:8188", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Host": f"{socket.gethostname()}.rebound.example"}, False),
        ({"Host": "127.0.0.1:8188", "X-Forwarded-For": "10.0.0.9"}, False),
        ({"Host": "127.0.0.1:8188", "Via": "1.1 proxy"}, False),
        ({"Host": "10.0.0.1:8188", "Origin": "http://other.example"}, False),
    ],
)
def test_from_this_machine_means_its_own_page_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], may: bool
) -> None:
    """A page of elsewhere that has its name lead here comes from this machine too, and passes for ours otherwise."""
    monkeypatch.setattr(engines, "_store", lambda: EngineStore("nowhere"))
    monkeypatch.setattr(guard, "allowed_origin", lambda: "*")
    answer = asyncio.run(posted(engines.adopt_engines, {"digests": ["0" * 64]}, "127.0.0.1", headers))
    assert answer.status == (404 if may else 403), answer.text


def test_what_comfyui_lets_other_pages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_change", lambda fields: {})
    headers = {"Host": "127.0.0.1:8188", "Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"}
    for given, status in ((None, 403), ("https://other.example", 403), ("https://friend.example", 200), ("*", 200)):
        monkeypatch.setattr("comfy.cli_args.args.enable_cors_header", given)
        assert asyncio.run(posted(settings.change, {"notifications": True}, "127.0.0.1", headers)).status == status


async def posted(handler: Any, fields: dict[str, Any], peer: str, more: Mapping[str, str] = NO_HEADERS) -> Any:
    """What a route answers to a program at the address `peer`."""
    transport = mock.Mock()
    transport.get_extra_info = {"peername": (peer, 5), "sockname": ("10.0.0.1", 8188)}.get
    content = StreamReader(mock.Mock(_reading_paused=False), 2**16, loop=asyncio.get_running_loop())
    content.feed_data(json.dumps(fields).encode())
    content.feed_eof()
    headers = {"Content-Type": "application/json", **more}
    return await handler(make_mocked_request("POST", "/x", headers, transport=transport, payload=content))


def test_routes_are_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = SimpleNamespace(routes=web.RouteTableDef())
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=instance)))
    routes.add_routes()
    count = len(instance.routes)
    routes.add_routes()
    assert count == len(instance.routes) > 15
    assert all(route.path.startswith("/slipstream/v1") for route in instance.routes)


def test_outside_of_a_server_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace()))
    routes.add_routes()
    monkeypatch.setitem(sys.modules, "server", None)
    routes.add_routes()
