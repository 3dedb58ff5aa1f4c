"""The engine manager's page out of ComfyUI: how it is started, and that its orders go through ComfyUI's queue."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.spec import Role
from slipstream.hosts.comfy.building.prompt_builder import prompt_of
from slipstream.runtime.requests.build_requests import Wanted
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.comfyui.support.browser import ComfyPage, chromium, why_no_browser
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer
from slipstream.tests.ui.support.driver import UiPage

ROUTE = "/slipstream/v1/ui"
BUILD_SECONDS = 300
VENV = Path.home() / ".cache" / "slipstream" / "venvs" / "gradio-6"
GRADIO = next((folder.parent for folder in VENV.glob("lib/python*/site-packages/gradio")), None)


def post(url: str, **headers: str) -> dict[str, Any]:
    """Start the page; what the server answers.

    Raises:
        HTTPError: it refuses.
    """
    asked = urllib.request.Request(url + ROUTE, b"{}", {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(asked) as answer:
        return dict(json.load(answer))


@pytest.mark.skipif(importlib.util.find_spec("gradio") is not None, reason="Gradio is installed")
def test_without_gradio_it_is_said_how_to_get_it(comfy_server: ComfyServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as told:
        post(comfy_server.url)
    error = json.load(told.value)["error"]
    assert error["code"] == "failed" and 'pip install "slipstream[ui]"' in error["message"]


@pytest.mark.parametrize("headers", [{"Origin": "http://elsewhere.example"}, {"Sec-Fetch-Site": "same-site"}])
def test_other_pages_do_not_start_it(comfy_server: ComfyServer, headers: dict[str, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as told:
        post(comfy_server.url, **headers)
    assert told.value.code == 403  # ComfyUI's own, or ours


def test_an_order_is_a_prompt(client: ComfyClient, model_files) -> None:
    settings = Settings.of_text(resolutions="64x64, 96x64", precision="fp32", engines="one for a range")
    prompt = prompt_of(Wanted("checkpoints/a/b.safetensors", Role.UNET, settings, 4, 154))
    assert prompt["1"] == {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a/b.safetensors"}}
    given, known = prompt["2"]["inputs"], client.object_info("SlipstreamBuildEngine")["input"]
    assert given.keys() == {*known["required"], *known.get("optional", {})}
    assert given["resolutions"] == "64x64, 96x64" and (given["batch"], given["tokens"]) == (4, 154)
    assert prompt_of(Wanted("demo", Role.UNET, settings, 2, 77))["1"]["class_type"] == "SlipstreamDemoLoader"


@pytest.mark.skipif(GRADIO is None, reason="no Gradio to share; `python tools/test.py` sets it up")
@pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")
def test_the_sidebars_button_opens_it_and_orders_wait_in_comfyuis_queue(
    start_comfy: Callable[..., ComfyServer], model_files
) -> None:
    checkpoint = model_files.checkpoint("sd15")
    environment = {"PYTHONPATH": str(GRADIO), "SLIPSTREAM_TEST_BUILD_SECONDS": str(BUILD_SECONDS)}
    server = start_comfy(environment=environment)
    with server.client() as client, chromium() as browser:
        client.run(_anything(client))  # quick builds are put in place by the first prompt
        comfy = ComfyPage(browser.new_page(), server.url)
        comfy.open()
        comfy.open_tab()
        with comfy.page.expect_popup() as opened:
            comfy.page.locator(".slipstream-head button").click()
        page = UiPage(opened.value, post(server.url)["url"])
        page.until_text("free on its disk", seconds=60)
        page.order(f"checkpoints/{checkpoint}", "64x64")
        page.until_text("ComfyUI's queue", "slipstream_progress")
        client.builds_take(0.5)
        page.until_text("64×64 batch 2 · done", "slipstream_progress", 60)
        client.builds_take(BUILD_SECONDS)
        page.order(f"checkpoints/{checkpoint}", "96x64")
        page.until_text("SD15 96×64 batch 2 · running", "slipstream_progress")
        page.press("Cancel")
        page.until_text("96×64 batch 2 · cancelled", "slipstream_progress")
        page.until(lambda: not client.pending(), "an empty queue")
        page.tab("Engines")
        page.until(lambda: page.row("64×64 batch 2"), "the engine in the table")
        assert not page.row("96×64") and not comfy.errors and not page.errors


def _anything(client: ComfyClient) -> Any:
    from slipstream.tests.comfyui.support.graph import Graph

    graph = Graph()
    graph.add("SlipstreamTestSleep", seconds=0.1)
    return graph
