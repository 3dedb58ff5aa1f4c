"""A tab of a browser at a ComfyUI whose builds compile nothing; classic canvas and Nodes 2.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import comfyui_version
import pytest

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.browser import ComfyPage, change_settings, chromium
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer

# Older ComfyUIs have no Nodes 2.0 to speak of; newer ones show the classic canvas until somebody chooses it.
NEW = tuple(map(int, comfyui_version.__version__.split("."))) >= (0, 30)
RENDERERS = ["classic", pytest.param("nodes2", marks=pytest.mark.slow)] if NEW else ["classic"]
BUILD_SECONDS = 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(server_of: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    with server_of(environment={"SLIPSTREAM_TEST_BUILD_SECONDS": str(BUILD_SECONDS)}) as server:
        yield server


@pytest.fixture(scope="module", params=RENDERERS)
def nodes2(request: pytest.FixtureRequest, server: ComfyServer) -> bool:
    wanted = bool(request.param == "nodes2")
    change_settings(server.url, Comfy_VueNodes_Enabled=wanted)
    return wanted


@pytest.fixture
def client(server: ComfyServer) -> Iterator[ComfyClient]:
    with server.client() as client:
        client.clear()
        client.builds_take(BUILD_SECONDS)
        yield client
        client.clear()


@pytest.fixture
def tab(browser: Any, server: ComfyServer, nodes2: bool, client: ComfyClient) -> Iterator[Callable[[], ComfyPage]]:
    """Open a tab of the browser; an error in our files fails the test."""
    opened: list[ComfyPage] = []

    def open_tab() -> ComfyPage:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
        context.set_default_timeout(20_000)
        opened.append(ComfyPage(context.new_page(), server.url, nodes2))
        opened[-1].open()
        return opened[-1]

    yield open_tab
    for page in opened:
        page.page.context.close()
    assert [error for page in opened for error in page.errors] == []


@pytest.fixture
def page(tab: Callable[[], ComfyPage]) -> ComfyPage:
    return tab()


@pytest.fixture
def store(server: ComfyServer) -> EngineStore:
    return EngineStore(server.home)
