"""Speed up this workflow: the nodes that it places, what it says, and undo."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.tests.comfyui.support.browser import (
    ROOT,
    ComfyPage,
    change_settings,
    example,
    new_size,
    why_no_browser,
)
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

ACCELERATE = ("SlipstreamAccelerateModel", "SlipstreamAccelerateControlNet", "SlipstreamAccelerateVAE")
READERS = ("SlipstreamEngineInfo", "PreviewAny")
SOON = 0.3

# What leads where: types of nodes, and slots. Ids of links are another matter.
_WIRES = """() => app.graph.serialize().links.map(([, from, out, to, slot]) => {
  const type = id => app.graph.getNodeById(id).type;
  return [type(from), out, type(to), slot].join(" ");
}).sort()"""
_LOAD = "workflow => app.loadGraphData(workflow)"
_PUT_BETWEEN = """kind => {
  const node = LiteGraph.createNode(kind);
  app.graph.add(node);
  app.graph.getNodeById(1).connect(0, node, 0);
  node.connect(0, app.graph.getNodeById(7), 0);
}"""
"""A node between the model's loader and the sampler."""


def without(name: str, kinds: Collection[str], size: int) -> dict[str, Any]:
    """An example with a small picture, nodes of some kinds taken out of the links that lead through them."""
    workflow = json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))
    workflow["id"] = str(uuid.uuid4())
    links = {link[0]: link for link in workflow["links"]}
    gone = {node["id"]: node for node in workflow["nodes"] if node["type"] in kinds}

    def source(link: list[Any]) -> list[Any]:
        return source(links[gone[link[1]]["inputs"][0]["link"]]) if link[1] in gone else link

    kept = [[link[0], *source(link)[1:3], *link[3:]] for link in workflow["links"] if link[3] not in gone]
    workflow["nodes"] = [node for node in workflow["nodes"] if node["id"] not in gone]
    workflow["links"] = kept
    for node in workflow["nodes"]:
        if node["type"] == "EmptyLatentImage":
            node["widgets_values"][:2] = [size, size]
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [link[0] for link in kept if link[1:3] == [node["id"], slot]]
    return workflow


def wires(page: ComfyPage) -> list[str]:
    return list(page.page.evaluate(_WIRES))


def accelerating(page: ComfyPage) -> set[str]:
    return {part for wire in wires(page) for part in wire.split() if part in ACCELERATE}


def test_it_places_builds_and_is_undone(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    client.builds_take(SOON)
    before = len(store.list())
    page.page.evaluate(_LOAD, without("controlnet_and_vae", (*ACCELERATE, *READERS), new_size()))
    plain = wires(page)
    panel = page.open_tab("Workflow")
    panel.get_by_text("between Demo Model (Slipstream) and Apply ControlNet").wait_for()
    panel.get_by_role("button", name="Speed up this workflow").click()
    panel.get_by_text("All that can run on engines here does").wait_for(timeout=90_000)
    assert accelerating(page) == set(ACCELERATE)
    assert "SlipstreamDemoLoader 0 KSampler 0" not in wires(page)
    assert wires(page).count("SlipstreamAccelerateModel 0 KSampler 0") == 2
    assert len(store.list()) > before + 2, "of model, ControlNet and VAE"
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Undo')")
    page.until(lambda: wires(page) == plain, "the workflow as it was")


def test_what_is_accelerated_already_is_left_alone(page: ComfyPage) -> None:
    page.page.evaluate(_LOAD, without("controlnet_and_vae", READERS, new_size()))
    panel = page.open_tab("Workflow")
    panel.get_by_role("button", name="Build engines").wait_for()
    assert panel.get_by_text("between").count() == 0


def test_what_stays_on_the_model_is_said_before(page: ComfyPage) -> None:
    page.page.evaluate(_LOAD, without("first_engine", (*ACCELERATE, *READERS), new_size()))
    page.page.evaluate(_PUT_BETWEEN, "FreeU_V2")
    panel = page.open_tab("Workflow")
    panel.get_by_text("Patches the model's blocks: such calls run on your model.").wait_for()
    panel.get_by_text("between FreeU V2 and KSampler").or_(
        panel.get_by_text("between FreeU_V2 and KSampler")
    ).wait_for()


def test_what_stays_on_the_model_is_less_where_blocks_have_engines(page: ComfyPage) -> None:
    page.page.evaluate(_LOAD, without("first_engine", (*ACCELERATE, *READERS), new_size()))
    page.page.evaluate(_ON_A_GPU)
    page.page.evaluate(_PUT_BETWEEN, "HyperTile")
    panel = page.open_tab("Workflow")
    panel.get_by_text("the blocks that it reaches run on your model, the others on engines").wait_for()


def test_the_likely_time_is_said_before_and_what_it_gained_after(page: ComfyPage) -> None:
    page.page.evaluate(_LOAD, without("first_engine", (*ACCELERATE, *READERS), new_size()))
    page.page.evaluate(_BUILDS_TAKE, {"unet": 90.0, "vae": 30.0})
    panel = page.open_tab("Workflow")
    panel.get_by_text("Builds take about 2 min here, once.").wait_for()

    page.load(example())
    told = {"engine_ms": 104.0, "eager_ms": 312.0, "timed_by": "step", "engine_calls": 40, "eager_calls": 0}
    page.page.evaluate(_TELL, [str(page.node), {"kind": "ready", "text": "ready", **told}, 125_000])
    panel.get_by_text("312 → 104 ms a step · 3.0x").wait_for()
    panel.get_by_text("2 min 5 s saved since ComfyUI started, measured on your pictures").wait_for()
    page.until(lambda: badges(page) == ["3.0x"], "the badge")
    page.page.evaluate(_TELL, [str(page.node), {"kind": "eager", "text": "eager: of the moon"}, 125_000])
    page.until(lambda: badges(page) == [], "an engine that is not in use has none")


def test_what_no_build_would_change_is_no_missing_engine(page: ComfyPage) -> None:
    workflow = without("controlnet_and_vae", READERS, new_size())
    page.page.evaluate(_LOAD, workflow)
    nodes = [str(node["id"]) for node in workflow["nodes"] if node["type"] in ACCELERATE]
    panel = page.open_tab("Workflow")
    build = panel.get_by_role("button", name="Build engines")
    build.wait_for()

    def tell(kind: str, mend: str | None) -> None:
        for node in nodes:
            told = {
                "kind": kind,
                "text": f"{kind}: the engine…",
                "tip": f"{kind}: the engine takes 9.8 ms",
                "mend": mend,
            }
            page.page.evaluate(_TELL, [node, told, 0])

    for kind, mend in (("slower", "retry"), ("eager", None), ("off", "backend")):
        tell(kind, mend)
        build.wait_for(state="hidden")
        panel.get_by_text("Those that run on your model say why.").wait_for()
        assert panel.get_by_text("Runs on your model. The engine takes 9.8 ms").count() == len(nodes)
        tell("failed", "retry")
        build.wait_for()
    tell("eager", None)
    build.wait_for(state="hidden")
    tell("eager", "retry")  # its engines are built when somebody asks
    build.wait_for()


def test_a_ready_node_says_in_each_language_what_ran_on_the_model(page: ComfyPage, server: ComfyServer) -> None:
    told = {"kind": "ready", "text": "compiled fp16 · 312 → 104 ms a step · ready", "without_graphs": True}
    told |= {"last_run_calls": 40, "last_run_eager_calls": 20}
    page.load(workflow := example())
    page.page.evaluate(_TELL, [str(page.node), told, 0])
    wanted = "Compiled fp16 · ready · 20 of 40 calls ran on your model · without CUDA graphs"
    page.until(lambda: page.seen()["text"] == wanted, "English words")
    change_settings(server.url, Comfy_Locale="zh")
    try:
        page.open()
        page.load(workflow)
        page.page.evaluate(_TELL, [str(page.node), told, 0])
        wanted = "引擎就绪 · 40 次调用中有 20 次由你的模型运行 · 不使用 CUDA graph"
        page.until(lambda: page.seen()["text"] == wanted, "Chinese words")
    finally:
        change_settings(server.url, Comfy_Locale="en")


def test_times_are_rounded_before_they_are_split(page: ComfyPage) -> None:
    said = page.page.evaluate(_TIMES, [[5400, 7000, 12000, 89.6, 8.6], [119.7, 3599.6, 89.6, 9.97]])
    assert said == [["90 min", "120 min", "3 h", "2 min", "9 s"], ["2 min 0 s", "60 min 0 s", "1 min 30 s", "10 s"]]


def badges(page: ComfyPage) -> list[str]:
    """What our badge on the node says; in Nodes 2.0, where they are elements, what is seen."""
    if page.nodes2:
        text = page.page.locator(f'[data-node-id="{page.node}"]').inner_text()
        return re.findall(r"^[\d.]+x$", text, re.MULTILINE)
    shown = page.page.evaluate(_BADGES, page.node)
    return [text for text in shown if re.fullmatch(r"[\d.]+x", text)]


_STORE = 'const { store, tell } = await import("/extensions/slipstream/lib/store.js");'
_ON_A_GPU = f"""async () => {{
  {_STORE}
  store.system = {{ ...store.system, gpu: "a GPU" }};
}}"""
_BUILDS_TAKE = f"""async seconds => {{
  {_STORE}
  store.system = {{ ...store.system, build_s: seconds }};
}}"""
_TELL = """async ([node, state, saved]) => {
  const { api } = await import("/scripts/api.js");
  const workflow = (app.rootGraph ?? app.graph).id;
  const detail = { nodes: [{ tip: "", ...state, node, workflow }], saved_ms: saved };
  api.dispatchEvent(new CustomEvent("slipstream.nodes", { detail }));
}"""
_TIMES = """async ([rough, measured]) => {
  const { duration, roughly } = await import("/extensions/slipstream/lib/format.js");
  return [rough.map(roughly), measured.map(duration)];
}"""
_BADGES = """id => app.graph.getNodeById(id).badges
  .map(badge => (typeof badge === "function" ? badge() : badge))
  .filter(badge => badge.visible)
  .map(badge => badge.text)"""


def test_a_workflow_without_a_model_is_told(page: ComfyPage) -> None:
    page.page.evaluate("() => app.graph.clear()")
    page.page.evaluate("() => app.extensionManager.command.execute('Slipstream.SpeedUp')")
    page.until_toast("Nothing to speed up")
