"""Who may reach the page, and what is said without Gradio."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from slipstream.core.errors import BackendUnavailable
from slipstream.ui import compat
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
