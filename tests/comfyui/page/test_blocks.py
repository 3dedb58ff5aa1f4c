"""The button of a node with `optimize: blocks`: it builds the engines of the blocks, which are traced programs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.page.conftest import RENDERERS
from slipstream.tests.comfyui.support.browser import ComfyPage, change_settings, example, why_no_browser
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

SECONDS = 240


@pytest.fixture(scope="module", params=RENDERERS)
def renderer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(server_of: Callable[..., ComfyServer], renderer: str) -> Iterator[ComfyServer]:
    """One for each renderer: a process keeps engines of blocks that it built."""
    with server_of(environment={"SLIPSTREAM_TEST_BUILD_SECONDS": "3"}) as server:
        yield server


@pytest.fixture(scope="module")
def nodes2(server: ComfyServer, renderer: str) -> bool:
    change_settings(server.url, Comfy_VueNodes_Enabled=renderer == "nodes2")
    return renderer == "nodes2"


def blocks(store: EngineStore) -> list[Any]:
    return [entry for entry in store.list() if entry.manifest.role == "block"]


def test_a_click_builds_the_blocks_and_a_cancel_ends_them_all(
    page: ComfyPage, client: ComfyClient, store: EngineStore
) -> None:
    page.load(example(64, optimize="blocks", backend="auto"))
    page.press()
    page.until(lambda: "Building 0 of" in page.seen()["button"], "how many are built", SECONDS)
    assert page.until_kind("building")["text"].startswith("Building 0 of")
    page.page.wait_for_timeout(1100)
    page.press()
    page.until_button("Build engine")
    page.until(lambda: not client.get("/slipstream/v1/builds")["builds"], "an end of all builds")
    assert client.pending() == 0

    client.builds_take(1)
    page.press()
    seen: list[str] = []

    def is_ready() -> bool:
        seen.append(page.seen()["button"])
        return seen[-1].startswith("Ready")

    page.until(is_ready, "engines of blocks", SECONDS)
    counts = [label for label in dict.fromkeys(seen) if label.startswith("Building")]
    assert len(counts) > 2 and all("Cancel" in label for label in counts), seen
    assert page.seen()["button"].startswith("Ready, block by block")
    assert "calls of blocks on engines" in page.seen()["text"]
    page.until_toast("engines built")
    assert "Engine ready" in page.toasts() and "No engine" not in page.toasts()
    made = len(blocks(store))
    assert made > 1
    page.press()
    page.until_toast("was there already")
    assert len(blocks(store)) == made

    page.page.evaluate("() => app.queuePrompt(0)")

    def calls() -> int:
        """Of the model by engines of blocks, in the picture."""
        states = client.get("/slipstream/v1/nodes")["nodes"]
        return max((state["engine_calls"] for state in states if state["node"] == str(page.node)), default=0)

    page.until(lambda: calls() > 5, "a picture by engines of blocks", SECONDS)
