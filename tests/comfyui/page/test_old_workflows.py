"""Workflows that were saved with nine widgets in sight on Accelerate Model: they load, and mean what they meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.tests.comfyui.page.conftest import NEW
from slipstream.tests.comfyui.support.browser import ROOT, ComfyPage, accelerate, example, why_no_browser
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.workflow import to_graph

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

OLD = sorted((ROOT / "tests" / "comfyui" / "support" / "old_examples").glob("*.json"))
PROMPT = """async workflow => {
  await app.loadGraphData(workflow);
  return (await app.graphToPrompt()).output;
}"""
IN_SIGHT = """id => {
  const node = app.graph.getNodeById(id);
  return node.widgets.filter(widget => !widget.hidden).map(widget => widget.name);
}"""
NAMES = (
    "backend", "precision", "optimize", "build", "resolutions", "engines", "max_batch", "max_tokens", "bake",
)  # fmt: skip
NINE = ["tensorrt", "fp16", "max", "first use", "256x256, 512x512", "one for a range", 4, 154, True]


def test_there_are_old_examples() -> None:
    assert len(OLD) == 9


@pytest.mark.parametrize("file", OLD, ids=lambda file: file.stem)
def test_an_old_example_opens_with_its_settings(page: ComfyPage, client: ComfyClient, file: Path) -> None:
    workflow = json.loads(file.read_text(encoding="utf-8"))
    info = client.get("/object_info")
    info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"] = ["STRING", {}]  # of a file that is not here
    info["LoraLoader"]["input"]["required"]["lora_name"] = ["STRING", {}]
    then = to_graph(workflow, info).prompt
    now = page.page.evaluate(PROMPT, workflow)
    assert now.keys() == then.keys()
    for node, old in then.items():
        assert now[node]["class_type"] == old["class_type"]
        assert {name: now[node]["inputs"][name] for name in old["inputs"]} == old["inputs"]


def test_nine_values_are_kept_and_four_are_in_sight(page: ComfyPage) -> None:
    workflow = example()
    accelerate(workflow)["widgets_values"] = list(NINE)
    page.load(workflow)
    assert inputs_of(page) == dict(zip(NAMES, NINE, strict=True))
    if not NEW:
        assert page.page.evaluate(IN_SIGHT, page.node)[:9] == list(NAMES), "that page cannot fold"
    elif not page.nodes2:
        assert page.page.evaluate(IN_SIGHT, page.node)[:4] == list(NAMES[:4])
        assert not set(NAMES[4:]) & set(page.page.evaluate(IN_SIGHT, page.node))
        page.page.evaluate("""id => {
          const more = app.graph.getNodeById(id).widgets.find(widget => widget.name === "slipstream_more");
          more.callback();
        }""", page.node)  # fmt: skip
        assert page.page.evaluate(IN_SIGHT, page.node)[:9] == list(NAMES)
    else:
        labels = page.page.locator(f'[data-node-id="{page.node}"]').inner_text()
        assert "backend" in labels and "max_tokens" not in labels
    assert inputs_of(page) == dict(zip(NAMES, NINE, strict=True))


def inputs_of(page: ComfyPage) -> dict[str, Any]:
    """The widgets' values of the node in the prompt that the page would queue."""
    inputs = page.page.evaluate("async id => (await app.graphToPrompt()).output[id].inputs", page.node)
    return {name: value for name, value in inputs.items() if name != "model"}
