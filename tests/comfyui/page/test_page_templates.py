"""A beginner's path: an empty ComfyUI, its template browser, the first example, Run."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import comfyui_version
import numpy as np
import pytest
from PIL import Image

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.browser import (
    ComfyPage,
    change_settings,
    chromium,
    why_no_browser,
)
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

NEW = tuple(map(int, comfyui_version.__version__.split("."))) >= (0, 30)
NODES2 = pytest.mark.skipif(not NEW, reason="this ComfyUI has no Nodes 2.0 to speak of")
CLASSIC, NEW_NODES = pytest.param(False, id="classic"), pytest.param(True, id="nodes2", marks=NODES2)
PACK = "ComfyUI-Slipstream"  # as it is installed: the template browser says the folder's name
FIRST = "first_engine"
ACCELERATE, SAMPLER, SAVE = "4", "7", "9"  # nodes of the example
SIZE = 256
STEPS = 20
PRETENDED = {"SLIPSTREAM_TEST_BUILD_SECONDS": "5"}
COMPILING_SECONDS = 400


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def newcomer(browser: Any, server_of: Callable[..., ComfyServer]) -> Iterator[Callable[..., Any]]:
    """Open the page of a ComfyUI that nobody has used yet; an error in our files fails the test."""
    servers: list[ComfyServer] = []
    pages: list[ComfyPage] = []

    def open_page(nodes2: bool, **environment: str) -> tuple[ComfyPage, ComfyServer]:
        servers.append(server_of(pack_folder=PACK, environment=environment))
        servers[-1].start()
        change_settings(servers[-1].url, Comfy_TutorialCompleted=False, Comfy_VueNodes_Enabled=nodes2)
        context = browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
        pages.append(ComfyPage(context.new_page(), servers[-1].url, nodes2))
        pages[-1].open()
        return pages[-1], servers[-1]

    yield open_page
    for page in pages:
        page.page.context.close()
    for server in servers:
        server.stop()
    assert [error for page in pages for error in page.errors] == []


@pytest.mark.parametrize("nodes2", [CLASSIC, pytest.param(True, id="nodes2", marks=[NODES2, pytest.mark.slow])])
def test_the_first_example_makes_a_picture_by_one_click(newcomer: Callable[..., Any], nodes2: bool) -> None:
    """And the next click makes the same one by an engine, which was built meanwhile; one more finds it made."""
    page, server = newcomer(nodes2, **PRETENDED)
    page.page.get_by_role("dialog").first.wait_for()  # a new ComfyUI begins with its templates
    page.choose_template(PACK, FIRST, node=int(ACCELERATE))
    assert page.seen()["kind"] == "idle"
    with server.client() as client:
        page.press_run()
        check_picture(until_pictures(page, client, 1)[0])
        page.until_kind("queued", "building")
        page.until_button("Cancel")
        page.until_kind("ready")
        assert calls(client) == (0, STEPS)
        page.press_run()
        pictures = until_pictures(page, client, 2)
        page.until(lambda: calls(client) == (STEPS, 0), "a picture by the engine only")
        check_picture(pictures[1])
        page.press_run()
        page.until(lambda: len(client.get("/history")) == 3, "a third run")
        assert SAMPLER in cached(list(client.get("/history").values())[-1])


@pytest.mark.slow
@pytest.mark.parametrize("nodes2", [CLASSIC, NEW_NODES])
def test_build_engine_in_the_first_example(newcomer: Callable[..., Any], nodes2: bool) -> None:
    """Before there is any picture. On the canvas that a new ComfyUI shows a real engine is compiled."""
    page, server = newcomer(nodes2, **(PRETENDED if nodes2 else {}))
    page.page.get_by_role("dialog").first.wait_for()
    page.page.keyboard.press("Escape")
    page.page.get_by_role("dialog").first.wait_for(state="detached")
    page.open_templates()
    page.choose_template(PACK, FIRST, node=int(ACCELERATE))
    with server.client() as client:
        page.press()
        page.until(lambda: page.seen()["bar"], "a moving bar")
        assert "Cancel" in page.seen()["button"]
        page.until_kind("ready", seconds=COMPILING_SECONDS)
        page.until_toast("Engine ready")
        assert len(EngineStore(server.home).list()) == 1 and pictures_of(client) == []
        page.press_run()
        check_picture(until_pictures(page, client, 1)[0])
        page.until(lambda: calls(client) == (STEPS, 0), "a picture by the engine only")
        page.until_kind("ready")


def until_pictures(page: ComfyPage, client: ComfyClient, count: int) -> list[np.ndarray]:
    """The pictures that were saved, once there are so many."""
    page.until(lambda: len(pictures_of(client)) >= count, f"{count} pictures", seconds=120)
    return pictures_of(client)


def pictures_of(client: ComfyClient) -> list[np.ndarray]:
    """The pictures that the example saved, the oldest first."""
    runs = client.get("/history").values()
    files = [file for run in runs for file in run["outputs"].get(SAVE, {}).get("images", [])]
    return [np.asarray(Image.open(io.BytesIO(client.view(file))).convert("RGB")) for file in files]


def cached(run: dict[str, Any]) -> list[str]:
    """The nodes of a run whose last results were taken again."""
    (found,) = [data["nodes"] for name, data in run["status"]["messages"] if name == "execution_cached"]
    return list(found)


def check_picture(picture: np.ndarray) -> None:
    """What the example's prompt asks for: something red, something blue, and green around it."""
    assert picture.shape == (SIZE, SIZE, 3)
    strongest = picture.argmax(axis=2)
    shares = [float((strongest == channel).mean()) for channel in range(3)]
    assert shares[1] > 0.5 and shares[0] > 0.02 and shares[2] > 0.02, shares


def calls(client: ComfyClient) -> tuple[int, int]:
    """Calls of the engine and of the model itself since Accelerate Model ran: anew once its engine is there."""
    states = client.get("/slipstream/v1/nodes")["nodes"]
    [state] = [state for state in states if state["node"] == ACCELERATE]
    return state["engine_calls"], state["eager_calls"]
