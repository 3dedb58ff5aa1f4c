"""Whatever a route's function does, the page gets JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from slipstream.core.errors import EngineInUse, StoreError
from slipstream.nodes import routes
from slipstream.nodes.routes.guard import asks


def answer_of(error: BaseException | None, data: Any = None) -> tuple[int, Any]:
    @asks()
    async def handler(request: web.Request) -> Any:
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
