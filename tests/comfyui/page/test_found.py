"""How the pack is found on the page: its search, right-click menus, blueprints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.tests.comfyui.page.conftest import NEW
from slipstream.tests.comfyui.support.browser import ROOT, ComfyPage, example, why_no_browser
from slipstream.tests.comfyui.support.client import ComfyClient

pytestmark = [
    pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}"),
    pytest.mark.skipif(not NEW, reason="this ComfyUI's page has none of these"),
]

BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
PROMPT = """async workflow => {
  await app.loadGraphData(workflow);
  return Object.values((await app.graphToPrompt()).output);
}"""
EMPTY = [200, 760]
"""Where the canvas shows nothing."""


@pytest.mark.parametrize("word", ["tensorrt", "trt", "compile", "faster", "speed", "optimize"])
def test_nodes_are_found_by_what_people_look_for(client: ComfyClient, word: str) -> None:
    nodes = client.get("/object_info")
    assert word in nodes["SlipstreamAccelerateModel"]["search_aliases"]


def test_the_menus_of_node_and_canvas_have_entries(page: ComfyPage) -> None:
    page.load(example())
    x, y = page.page.evaluate("""id => {
      const canvas = app.canvas, node = app.graph.getNodeById(id), place = canvas.canvas.getBoundingClientRect();
      const [x, y] = [node.pos[0] + 120, node.pos[1] - 14];
      return [x + canvas.ds.offset[0] + place.left, y + canvas.ds.offset[1] + place.top];
    }""", page.node)  # fmt: skip
    page.page.mouse.click(x, y, button="right")
    page.page.get_by_text("Slipstream: Build engine").wait_for()
    page.page.keyboard.press("Escape")
    page.page.mouse.click(*EMPTY)
    page.page.mouse.click(*EMPTY, button="right")
    page.page.get_by_text("Slipstream: Speed up this workflow").wait_for()
    page.page.get_by_text("Slipstream: Show engines").last.click()
    page.page.locator(".slipstream-panel").get_by_role("tab", name="Engines", selected=True).wait_for()


def test_blueprints_are_offered(client: ComfyClient) -> None:
    offered = client.get("/global_subgraphs").values()
    assert {file.stem for file in BLUEPRINTS} <= {each["name"] for each in offered}
    assert len(BLUEPRINTS) == 3


@pytest.mark.parametrize("file", BLUEPRINTS, ids=lambda file: file.stem)
def test_a_blueprint_is_a_whole_workflow(page: ComfyPage, file: Any) -> None:
    """All inputs of its nodes are joined or given, except the picture that guides a ControlNet."""
    nodes = page.page.evaluate(PROMPT, json.loads(file.read_text(encoding="utf-8")))
    kinds = [node["class_type"] for node in nodes]
    assert {"SlipstreamAccelerateModel", "SlipstreamAccelerateVAE", "KSampler", "VAEDecode"} <= set(kinds)
    sampler = next(node for node in nodes if node["class_type"] == "KSampler")
    assert {"model", "positive", "negative", "latent_image", "seed", "denoise"} <= sampler["inputs"].keys()
    accelerate = next(node for node in nodes if node["class_type"] == "SlipstreamAccelerateModel")
    assert accelerate["inputs"]["build"] == "background" and "model" in accelerate["inputs"]
