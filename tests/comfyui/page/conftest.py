"""A tab of a browser at a ComfyUI whose builds compile nothing; classic canvas and Nodes 2.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import comfyui_version
import pytest

from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Speed, Verification
from slipstream.tests.comfyui.support.browser import ComfyPage, change_settings, chromium, opened
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer
from slipstream.tests.unit.cli.support import current_key

# Older ComfyUIs have no Nodes 2.0 to speak of; newer ones show the classic canvas until somebody chooses it.
NEW = tuple(map(int, comfyui_version.__version__.split("."))) >= (0, 30)
RENDERERS = ["classic", pytest.param("nodes2", marks=pytest.mark.slow)] if NEW else ["classic"]
CHECKED = Verification(4e-4, 2e-4, 2, "fp32")
BUILD_SECONDS = 300
"""Longer than any test: a build ends when its test says so, not while a busy page is not looked at."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what the open tabs show, and the end of the server's log."""
    report = yield
    if report.when == "call" and report.failed:
        for page in opened:
            with contextlib.suppress(Exception):  # it is closed
                report.sections.append(("page", page.dump()))
        if server := getattr(item, "funcargs", {}).get("server"):
            report.sections.append(("log of the server", server.log()[-3000:]))
    return report


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
        client.cancel_builds()


@pytest.fixture
def tab(browser: Any, server: ComfyServer, nodes2: bool, client: ComfyClient) -> Iterator[Callable[[], ComfyPage]]:
    """Open a tab of the browser; an error in our files fails the test."""
    tabs: list[ComfyPage] = []

    def open_tab() -> ComfyPage:
        tabs.append(new_tab(browser, server, nodes2))
        return tabs[-1]

    yield open_tab
    for page in tabs:
        page.page.context.close()
    assert [error for page in tabs for error in page.errors] == []


@pytest.fixture(scope="module")
def lent() -> Iterator[list[ComfyPage]]:
    """The tab that tests of a module have one after another, if there is one: to load ComfyUI's page takes 10 s."""
    tabs: list[ComfyPage] = []
    yield tabs
    for page in tabs:
        page.page.context.close()


@pytest.fixture
def page(
    request: pytest.FixtureRequest,
    browser: Any,
    server: ComfyServer,
    nodes2: bool,
    client: ComfyClient,
    lent: list[ComfyPage],
) -> Iterator[ComfyPage]:
    """A tab with nothing of another test in it; an error in our files fails the test.

    It is lent to the next test, unless this one fails, loads the page again, or leaves a dialog open.
    """
    page = lent.pop() if lent else None
    if page is not None and (page.nodes2 != nodes2 or page.url != server.url or not page.start_afresh()):
        page.page.context.close()
        page = None
    if page is None:
        page = new_tab(browser, server, nodes2)
    loads = page.loads
    yield page
    if page.loads == loads and not request.session.testsfailed and not page.errors:
        lent.append(page)
    else:
        page.page.context.close()
    assert page.errors == []


def new_tab(browser: Any, server: ComfyServer, nodes2: bool) -> ComfyPage:
    """Open ComfyUI's page in a tab whose storage and cache are its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
    page = ComfyPage(context.new_page(), server.url, nodes2)
    page.open()
    return page


@pytest.fixture
def store(server: ComfyServer) -> EngineStore:
    return EngineStore(server.home)


@pytest.fixture
def put(store: EngineStore, tmp_path: Path) -> Iterator[Callable[..., Entry]]:
    """Store an engine that nobody built."""
    (tmp_path / "engine.bin").write_bytes(bytes(1000))
    made: list[Entry] = []

    def put(height: int, label: str, **environment: Any) -> Entry:
        key, artifact = current_key(height, **environment), Artifact(tmp_path, ("engine.bin",), {})
        entry = store.put(key, artifact, label=label, build=BuildRecord(42.0), verifications={"1" * 64: CHECKED})
        made.append(store.record_speed(entry, Speed(2.0, 5.0)))
        return made[-1]

    yield put
    for entry in made:
        store.delete(entry.digest)
