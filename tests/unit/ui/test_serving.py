"""Who may reach the page, and what is said without Gradio."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from slipstream.core.errors import BackendUnavailable
from slipstream.ui import compat, serve
from slipstream.ui.guard import LOOPBACK, Guard
from slipstream.ui.serve import check_address


def test_other_addresses_ask_for_a_password() -> None:
    for address in LOOPBACK:
        check_address(address, None)
    check_address("0.0.0.0", "a secret")
    for address in ("0.0.0.0", "192.168.1.5", "::", ""):
        with pytest.raises(ValueError, match="SLIPSTREAM_UI_PASSWORD"):
            check_address(address, None)


def test_without_gradio_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_there", lambda: False)
    with pytest.raises(BackendUnavailable, match=r'pip install "slipstream\[ui\]"'):
        compat.gradio()


class Page:
    """What Gradio's page is to `serve`."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.is_closed = False
        self.launched: dict[str, Any] = {}
        self.bypassed: list[bool] = []

    def launch(self, **options: Any) -> tuple[None, str, None]:
        self.launched = options
        self.bypassed = [bool(urllib.request.proxy_bypass(host)) for host in ("127.0.0.1", "localhost", "a.example")]
        if self.fails:
            raise ValueError("When localhost is not accessible, a shareable link must be created")
        return None, "http://here/", None

    def close(self, verbose: bool) -> None:
        self.is_closed = True


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(serve, "gradio", lambda: None)
    monkeypatch.setattr(serve, "blocks", lambda manager: page)
    monkeypatch.setattr(serve, "queued", lambda page: page)
    monkeypatch.setattr(serve, "launch_options", dict)
    monkeypatch.setattr(serve, "_guard", lambda address: None)
    return page


def test_a_proxy_is_not_asked_for_the_page_itself(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "b.example")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert serve.start(None, "::1").url == "http://here/"  # type: ignore[arg-type]
    assert page.launched["server_name"] == "[::1]"
    assert page.bypassed == [True, True, False]
    assert os.environ["NO_PROXY"] == "b.example" and (os.name == "nt" or "no_proxy" not in os.environ)


@pytest.mark.parametrize("address", ["::", "[::]"])
def test_an_address_of_ipv6_is_given_as_gradio_takes_it(page: Page, address: str) -> None:
    serve.start(None, address, password="a secret")  # type: ignore[arg-type]
    assert page.launched["server_name"] == "[::]"


def test_a_page_that_gradio_cannot_reach_is_closed_and_said(page: Page) -> None:
    page.fails = True
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1: ValueError: When localhost"):
        serve.start(None)  # type: ignore[arg-type]
    assert page.is_closed


def answer(method: str, headers: Mapping[str, str], kind: str = "http", hosts: Any = LOOPBACK) -> list[Any]:
    """What comes back through the guard of an app that says `ok`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("ok")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> None: ...

    raw = [(name.lower().encode(), value.encode()) for name, value in {"Host": "127.0.0.1:7860", **headers}.items()]
    scope = {"type": kind, "headers": raw, **({"method": method} if kind == "http" else {})}
    asyncio.run(Guard(app, hosts)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "http://127.0.0.1:7860"}, {"Sec-Fetch-Site": "same-origin"}, {"Host": "localhost:7860"}],
)
def test_its_own_page_passes(headers: dict[str, str]) -> None:
    assert answer("POST", headers) == ["ok"]
    assert answer("", headers, "websocket") == ["ok"]


@pytest.mark.parametrize("headers", [{"Origin": "http://other.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_other_pages_change_nothing(headers: dict[str, str]) -> None:
    assert answer("POST", headers)[0]["status"] == 403
    assert answer("", headers, "websocket")[0]["type"] == "websocket.close"
    assert answer("GET", headers) == ["ok"]


def test_a_name_that_was_made_to_lead_here_is_refused() -> None:
    assert answer("GET", {"Host": "other.example:7860"})[0]["status"] == 403
    assert answer("GET", {"Host": "other.example:7860"}, hosts=None) == ["ok"]


def test_what_is_no_request_passes() -> None:
    assert answer("", {}, "lifespan") == ["ok"]
