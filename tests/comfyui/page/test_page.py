"""Slipstream in ComfyUI's page: a real server, a real browser, both renderers of nodes.

Builds go through the whole of Slipstream but compile nothing and take a few seconds; one test compiles.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.core.environment import versions_now
from slipstream.engine_cache import (
    EngineStore,
    Entry,
    Speed,
    WeightsMemo,
    file_identity,
)
from slipstream.runtime.checking.step_times import say_retired
from slipstream.runtime.loaded.canary import CAPTURE
from slipstream.tests.comfyui.support.browser import (
    ROOT,
    ComfyPage,
    accelerate,
    change_settings,
    example,
    new_size,
    why_no_browser,
)
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer
from slipstream.tests.unit.runtime.doomed import Doomed

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

SOON = 0.5
"""Seconds of a build, the one that runs included, once there is nothing more to see of its course."""
ROUTES = "/slipstream/v1"
GB = 2**30
LOADER, ACCELERATE, SAMPLER, DECODE, SAVE = 1, 4, 7, 8, 9  # nodes of the example
STICKING_OUT = """panel => {
  const right = element => element.getBoundingClientRect().right;
  const wide = [...panel.querySelectorAll("*")].filter(element => right(element) > right(panel) + 1);
  return wide.map(element => element.className);
}"""

# How often, and in how many ms, our files ask for the queue while ComfyUI says so many times, each 50 ms, that so many
# prompts are left.
ASKED_AFTER = """async ([events, remaining]) => {
  const fetch = app.api.fetchApi;
  const began = performance.now();
  let asked = 0;
  app.api.fetchApi = (path, options) => {
    if (path === "/queue" && options?.cache === "no-store") asked += 1;
    return fetch.call(app.api, path, options);
  };
  const wait = ms => new Promise(resolve => setTimeout(resolve, ms));
  for (let event = 0; event < events; event += 1) {
    const detail = { exec_info: { queue_remaining: remaining } };
    app.api.dispatchEvent(new CustomEvent("status", { detail }));
    await wait(50);
  }
  await wait(700);
  app.api.fetchApi = fetch;
  return [asked, performance.now() - began];
}"""

# A second node of the subgraph, wired as the first one is, with a picture of its own.
USE_AGAIN = """([loader, decode, save]) => {
  const graph = app.canvas.graph, first = graph._nodes.find(node => node.subgraph);
  const add = type => {
    const node = LiteGraph.createNode(type);
    graph.add(node);
    return node;
  };
  const again = add(first.type), [picture, file] = [decode, save].map(id => add(graph.getNodeById(id).type));
  first.inputs.forEach((input, slot) => {
    const link = graph.getLink(input.link);
    if (link) graph.getNodeById(link.origin_id).connect(link.origin_slot, again, slot);
  });
  again.connect(again.outputs.findIndex(output => output.type === "LATENT"), picture, "samples");
  graph.getNodeById(loader).connect(1, picture, "vae");
  picture.connect(0, file, "images");
}"""


def queued(client: ComfyClient) -> int:
    """How many prompts ran, run or wait."""
    return client.pending() + len(client.get("/history"))


# Building by a click


def workflow_of(page: ComfyPage) -> str:
    """Return the id of the open workflow; the page gives each that is opened a new one."""
    return str(page.page.evaluate("() => (app.rootGraph ?? app.graph).id"))


def tell(page: ComfyPage, workflow: str | None, kind: str, text: str, tip: str = "", **facts: Any) -> None:
    """Have the page hear of its node's state, as if the server had told it."""
    state = {"node": str(page.node), "workflow": workflow, "kind": kind, "text": text, "tip": tip, **facts}
    hear = """async state => {
        const { api } = await import("/scripts/api.js");
        api.dispatchEvent(new CustomEvent("slipstream.nodes", { detail: { nodes: [state] } }));
    }"""
    page.page.evaluate(hear, state)


def test_a_click_builds_and_the_line_follows(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    before, size = len(store.list()), new_size()
    page.load(example(size))
    assert page.seen()["kind"] == "idle" and page.seen()["button"].startswith("Build engine")
    page.press()
    page.until_button("Cancel")
    bars: list[float] = []

    def has_moved() -> bool:
        seen = page.seen()
        assert seen["kind"] in ("queued", "building"), page.dump()
        bars.extend([seen["bar"]] if seen["bar"] else [])
        return len(set(bars)) > 3

    page.until(has_moved, "a bar that moves")
    assert bars == sorted(bars)
    client.builds_take(SOON)
    assert page.until_kind("ready")["button"].startswith("Ready")
    page.until_toast("Engine ready")
    assert len(store.list()) == before + 1
    page.press()
    page.until_toast("was there already")
    assert len(store.list()) == before + 1


def test_the_time_it_takes_is_said_before(page: ComfyPage) -> None:
    """By the build of the test before."""
    page.load(example(new_size()))
    page.until(lambda: "about" in page.seen()["button"], "the estimate on the button")
    before = page.seen()["button"]
    choose = """([id, value]) => {
        app.graph.getNodeById(id).widgets.find(each => each.name === "optimize").value = value;
    }"""
    for optimize, told in (("blocks", "Build engine"), ("balanced", before)):
        page.page.evaluate(choose, [page.node, optimize])
        tell(page, "another workflow", "idle", "not run yet")
        page.until(lambda told=told: page.seen()["button"] == told, "an estimate by builds of what the button builds")
    tell(page, workflow_of(page), "ready", "ready")
    page.until_kind("ready")
    assert page.seen()["button"] == "Ready", "what is there takes no time"


def test_a_double_click_builds_once_and_cancel_leaves_nothing(
    page: ComfyPage, client: ComfyClient, store: EngineStore
) -> None:
    page.load(example(new_size()))
    before, engines = queued(client), len(store.list())
    page.press(clicks=2)
    page.until(lambda: page.seen()["bar"], "a moving bar")
    page.page.wait_for_timeout(1500)
    assert queued(client) == before + 1 and "Cancel" in page.seen()["button"]
    page.press()
    page.until_button("Build engine", seconds=60)  # far less than the build would take
    page.until_toast("Build cancelled")
    assert page.seen()["kind"] != "ready" and len(store.list()) == engines
    assert client.pending() == 0 and client.get(f"{ROUTES}/builds")["builds"] == []
    client.builds_take(SOON)
    page.press()  # and again
    page.until_kind("ready")
    assert len(store.list()) == engines + 1


def test_a_build_that_waits_in_the_queue_is_taken_out(page: ComfyPage, client: ComfyClient) -> None:
    from slipstream.tests.comfyui.support.graph import Graph

    graph = Graph()
    graph.add("SlipstreamTestSleep", seconds=300.0)
    sleeping = client.queue(graph)
    page.load(example(new_size()))
    page.press()
    page.until_kind("queued")
    page.page.wait_for_timeout(1200)
    page.press()
    page.until_button("Build engine")
    assert client.pending() == 1, "the prompt that runs has nothing to do with it"
    client.interrupt()
    client.wait(sleeping)


def test_a_running_build_shows_after_a_reload_and_in_another_tab(
    page: ComfyPage, tab: Callable[[], ComfyPage], client: ComfyClient
) -> None:
    workflow, other = example(new_size()), tab()
    other.load(workflow)
    page.load(workflow)
    page.press()
    page.until(lambda: page.seen()["bar"], "a moving bar")
    other.until_button("Cancel")
    page.open()
    page.load(workflow)
    page.until_button("Cancel")
    assert page.until_kind("building")["bar"]
    other.press()
    other.until_button("Build engine")
    page.until_button("Build engine")
    assert client.pending() == 0


def test_what_cannot_be_built_is_told(page: ComfyPage, client: ComfyClient) -> None:
    workflow = example(new_size())
    page.load(workflow)
    page.page.evaluate("id => { app.graph.getNodeById(id).mode = 2; }", page.node)
    page.press()
    assert "muted" in page.until_kind("failed")["text"], "the reason stands on the node"
    page.until_toast("was not built")
    assert client.pending() == 0


def test_a_click_on_build_engine(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    """Its prompt has no node that only dry runs have."""
    before, size = len(store.list()), new_size()
    page.load(example(size))
    page.insert("SlipstreamBuildEngine", (LOADER, 0), resolutions=f"{size}x{size}")
    page.press()
    page.until(lambda: page.seen()["bar"], "a moving bar")
    page.page.wait_for_timeout(4000)
    assert "Cancel" in page.seen()["button"] and page.toasts() == ""
    client.builds_take(SOON)
    assert "built in" in until_notice(page, "Engine ready")
    assert page.until_kind("ready")["button"].startswith("Ready") and len(store.list()) == before + 1


def until_notice(page: ComfyPage, text: str) -> str:
    """All notices, once one has this text."""
    page.until_toast(text)
    return page.toasts()


def test_a_workflow_out_of_a_clicks_prompt_is_an_ordinary_one(page: ComfyPage) -> None:
    workflow = example(new_size())
    workflow["extra"]["slipstream_build"] = "4"
    page.load(workflow)
    queued = page.page.evaluate("async () => (await app.graphToPrompt()).workflow")
    assert queued["nodes"] and "slipstream_build" not in queued["extra"]


def test_a_click_that_gives_no_engine_warns(page: ComfyPage, client: ComfyClient) -> None:
    page.load(example(new_size()))
    state = {
        "node": str(page.node),
        "workflow": workflow_of(page),
        "kind": "eager",
        "text": "eager: of the moon",
        "tip": "the moon",
    }
    page.page.route(f"**{ROUTES}/nodes", lambda route: route.fulfill(json={"nodes": [state]}))
    client.builds_take(SOON)
    page.press()
    notices = until_notice(page, "No engine for this node")
    assert "the moon" in notices and "1 engine built" in notices and "Engine ready" not in notices
    assert page.warnings() == 1
    assert page.seen()["kind"] == "eager" and page.seen()["text"] == "The moon"


def test_a_click_counts_the_engines_of_other_nodes(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    before = len(store.list())
    page.load(example(new_size()))
    page.insert("SlipstreamAccelerateVAE", (LOADER, 1), (DECODE, 1))
    page.press()
    page.until_button("Cancel")
    client.builds_take(SOON)
    page.until_button("Ready")
    page.until_toast("2 engines built")
    assert page.seen()["kind"] == "ready" and len(store.list()) == before + 2


def test_an_answer_that_is_lost_is_asked_for_again(page: ComfyPage, client: ComfyClient) -> None:
    lost: list[str] = []

    def lose(route: Any) -> None:
        lost.append(route.request.url)
        route.abort() if len(lost) == 1 else route.continue_()

    page.load(example(new_size()))
    page.press()
    page.until(lambda: page.seen()["bar"], "a moving bar")
    page.page.route(re.compile("/history/[0-9a-f-]{36}"), lose)
    client.interrupt()
    page.until(lambda: lost, "the question")
    page.until_button("Build engine")
    assert len(lost) > 1


def test_the_queue_is_not_asked_for_at_each_event(page: ComfyPage) -> None:
    page.load(example())
    page.page.wait_for_timeout(1500)
    assert page.page.evaluate(ASKED_AFTER, [30, 0])[0] == 0
    asked, took = page.page.evaluate(ASKED_AFTER, [30, 2])
    assert 1 <= asked <= took / 500 + 2, "twice a second, and one look after the last"


def test_notices_can_be_switched_off(page: ComfyPage, client: ComfyClient) -> None:
    client.post(f"{ROUTES}/settings", {"notifications": False})
    page.open()
    page.load(example(new_size()))
    client.builds_take(SOON)
    try:
        page.until(lambda: page.setting("Notifications") is False, "the server's setting")
        page.press()
        page.until_kind("ready")
        page.page.wait_for_timeout(1500)
        assert page.toasts() == ""
    finally:
        client.post(f"{ROUTES}/settings", {"notifications": True})


def test_keys_build_cancel_and_open_the_tab(page: ComfyPage, client: ComfyClient) -> None:
    page.load(example(new_size()))
    page.page.mouse.click(900, 760)  # the canvas, where no node is
    page.page.keyboard.press("Control+Shift+B")
    page.until(lambda: page.seen()["bar"], "a moving bar")
    page.page.wait_for_timeout(1100)
    page.page.keyboard.press("Control+Shift+X")
    page.until_button("Build engine")
    page.page.keyboard.press("Control+Shift+L")
    page.page.locator(".slipstream-panel").wait_for()
    page.page.keyboard.press("Control+Shift+L")
    page.page.locator(".slipstream-panel").wait_for(state="detached")


# Subgraphs


def test_a_click_within_a_subgraph(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    before = len(store.list())
    page.load(example(new_size()))
    page.make_subgraph(ACCELERATE, SAMPLER)
    inner = page.enter_subgraph(ACCELERATE)
    assert page.seen()["button"].startswith("Build engine")
    page.press()
    page.until(lambda: page.seen()["bar"], "a moving bar")
    page.leave_subgraph()
    page.enter_subgraph(ACCELERATE)
    assert "Cancel" in page.until_kind("building")["button"]
    client.builds_take(SOON)
    page.until_kind("ready")
    page.until_toast("Engine ready")
    assert len(store.list()) == before + 1
    page.page.evaluate("() => app.queuePrompt(0)")

    def calls() -> int:
        """Of the engine, by the node in the subgraph."""
        states = client.get(f"{ROUTES}/nodes")["nodes"]
        return sum(state["engine_calls"] for state in states if state["node"] == inner)

    page.until(calls, "engine calls")
    assert page.until_kind("ready")["button"].startswith("Ready")


def test_a_build_within_a_subgraph_shows_after_a_reload_and_is_cancelled(page: ComfyPage, client: ComfyClient) -> None:
    page.load(example(new_size()))
    page.make_subgraph(ACCELERATE, SAMPLER)
    workflow = page.page.evaluate("async () => (await app.graphToPrompt()).workflow")
    page.enter_subgraph(ACCELERATE)
    page.press()
    page.until(lambda: page.seen()["bar"], "a moving bar")
    page.open()
    page.page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
    page.enter_subgraph(ACCELERATE)
    page.until_button("Cancel")
    page.press()
    page.until_button("Build engine")
    assert client.pending() == 0 and client.get(f"{ROUTES}/builds")["builds"] == []


def test_a_subgraph_that_is_used_twice(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    """Its node stands for both: a click builds what the first needs, and the state is the newest of either."""
    before = len(store.list())
    page.load(example(new_size()))
    page.make_subgraph(ACCELERATE, SAMPLER)
    page.page.evaluate(USE_AGAIN, [LOADER, DECODE, SAVE])
    page.enter_subgraph(ACCELERATE)
    page.press()
    page.until(lambda: page.seen()["bar"], "a moving bar")
    client.builds_take(SOON)
    page.until_kind("ready")
    assert len(store.list()) == before + 1 and client.pending() == 0


# Workflows


def test_widgets_keep_their_values(page: ComfyPage) -> None:
    """Also of workflows that were saved before nodes had a button and a line."""
    workflow = example(128, precision="fp16", build="manual", resolutions="128x128")
    saved = list(accelerate(workflow)["widgets_values"])
    page.load(workflow)
    node = "app.graph.getNodeById(id)"
    first = page.page.evaluate(f"id => {node}.serialize().widgets_values", page.node)
    assert first[: len(saved)] == saved and len(first) == 9, first
    again = copy.deepcopy(workflow)
    accelerate(again)["widgets_values"] = first
    page.load(again)
    assert page.page.evaluate(f"id => {node}.serialize().widgets_values", page.node) == first
    prompt = page.page.evaluate("async id => (await app.graphToPrompt()).output[id].inputs", page.node)
    assert prompt["build"] == "manual" and not [name for name in prompt if name.startswith("slipstream")]


EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
# Left, top, right and bottom of each node as the page draws it, in the graph's places; Nodes 2.0 has them higher.
DRAWN = """nodes2 => app.graph._nodes.map(node => {
  const [left, top] = node.pos, [width, height] = node.size;
  if (!nodes2) return [node.type, left, top - 30, left + width, top + height];
  const { scale, offset } = app.canvas.ds, place = app.canvas.canvas.getBoundingClientRect();
  const box = document.querySelector(`[data-node-id="${node.id}"]`).getBoundingClientRect();
  const x = (box.left - place.left) / scale - offset[0], y = (box.top - place.top) / scale - offset[1];
  return [node.type, x, y, x + box.width / scale, y + box.height / scale];
})"""
GROUPS = """() => app.graph._groups.map(({ pos, size }) => [pos[0], pos[1], pos[0] + size[0], pos[1] + size[1]])"""


def test_nodes_of_examples_lie_apart_and_in_their_groups(page: ComfyPage) -> None:
    page.page.set_viewport_size({"width": 1400, "height": 900})
    try:
        for file in EXAMPLES:
            page.page.evaluate("workflow => app.loadGraphData(workflow)", json.loads(file.read_text(encoding="utf-8")))
            page.page.wait_for_timeout(1200)  # until all of them have their size
            boxes, groups = page.page.evaluate(DRAWN, page.nodes2), page.page.evaluate(GROUPS)
            for (one, *first), (other, *second) in itertools.combinations(boxes, 2):
                assert not overlap(first, second), f"{file.stem}: {one} and {other}"
            for kind, left, top, right, bottom in boxes:
                around = [group for group in groups if group[0] <= left + 1 and group[1] <= top + 1]
                assert any(right <= group[2] + 1 and bottom <= group[3] + 1 for group in around), f"{file.stem}: {kind}"
    finally:
        page.page.set_viewport_size({"width": 1280, "height": 800})


def overlap(one: list[float], other: list[float]) -> bool:
    """By more than a pixel, for which rounding is to blame."""
    wide, high = (min(one[at + 2], other[at + 2]) - max(one[at], other[at]) for at in (0, 1))
    return wide > 1 and high > 1


def test_states_of_other_workflows_are_not_shown(page: ComfyPage, client: ComfyClient) -> None:
    page.load(example())
    tell(page, "11111111-2222-4333-8444-555555555555", "ready", "another workflow's")
    tell(page, None, "ready", "a program's")
    page.page.wait_for_timeout(300)
    assert page.until_kind("idle")["text"] == "Not run yet"
    tell(page, workflow_of(page), "eager", "ours", "why\nand why")
    assert page.until_kind("eager")["text"] == "Why\nand why"


LONG = "the engine could not be built. " + "A compiler says much, and all of it may matter. " * 6


def test_the_button_and_the_line_say_how_it_is(page: ComfyPage) -> None:
    """The line holds all of a reason, for which the node grows; it is as before once that is gone."""
    page.load(example())
    page.until_kind("idle")
    height = node_height(page)
    times = {"engine_ms": 104.0, "eager_ms": 312.0, "timed_by": "step"}
    tell(page, workflow_of(page), "ready", "compiled fp16 · 64×64 · 312 → 104 ms a step · ready", **times)
    assert page.until_kind("ready")["button"] == "Ready · 312 → 104 ms a step"
    assert page.seen()["text"] == "Compiled fp16 · 64×64 · ready"
    tell(page, workflow_of(page), "ready", "blocks", "12 of 16 blocks; another node patches the attention")
    page.until_button("Ready, block by block")
    assert page.seen()["text"] == "12 of 16 blocks; another node patches the attention"
    tell(page, workflow_of(page), "failed", "failed: the engine…", f"failed: {LONG}", mend="retry")
    assert page.until_kind("failed")["button"] == "Build failed · Try again"
    assert page.seen()["text"].split() == LONG.capitalize().replace(". a", ". A").split()
    page.until(lambda: is_whole(page), "a line that shows all of the reason")
    tell(page, workflow_of(page), "slower", "slower: by much", "slower: by much", mend="retry")
    assert page.until_kind("slower")["button"] == "Slower here, not used" and page.seen()["text"] == "By much"
    page.until(lambda: node_height(page) == height, "a node as high as before")


def node_height(page: ComfyPage) -> float:
    return float(page.page.evaluate("id => app.graph.getNodeById(id).size[1]", page.node))


def is_whole(page: ComfyPage) -> bool:
    """Whether the line, which is not cut, lies within its node."""
    fits = """id => {
      const line = app.graph.getNodeById(id).widgets.find(each => each.name === "slipstream_state").element;
      return line.clientHeight > 60 && line.scrollHeight <= line.clientHeight + 1;
    }"""
    return bool(page.page.evaluate(fits, page.node))


def test_a_click_mends_what_can_be_mended(page: ComfyPage, client: ComfyClient) -> None:
    page.load(example(new_size(), precision="fp8"))
    tell(page, workflow_of(page), "eager", "eager: fp8", "eager: fp8 needs another GPU", mend="precision")
    page.until_button("Use the model's precision")
    client.builds_take(SOON)
    page.press()
    page.until_kind("ready")
    values = page.page.evaluate("id => app.graph.getNodeById(id).widgets.map(each => each.value)", page.node)
    assert values[1] == "auto"
    reason = "no C++ compiler was found (g++); install one"
    tell(page, workflow_of(page), "failed", "failed", f"failed: {reason}", mend="compiler")
    page.until_button("How to get a compiler")
    page.press()
    dialog = page.page.get_by_role("dialog").filter(has_text="Engines need a C++ compiler")
    dialog.get_by_text(reason).wait_for()
    page.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    tell(page, workflow_of(page), "off", "off", "switched off", mend="settings")
    page.until_button("Open settings")
    page.page.wait_for_timeout(600)  # a click this soon after another is half of a double click
    page.press()
    page.page.get_by_role("dialog").get_by_text("Settings").first.wait_for()


def test_a_size_that_is_none_is_told_while_it_is_written(page: ComfyPage) -> None:
    page.load(example())
    page.until_kind("idle")
    write = """([id, text]) => {
        const widget = app.graph.getNodeById(id).widgets.find(each => each.name === "resolutions");
        widget.value = text;
        widget.callback(text);
    }"""
    for text, wrong in (("512x512, 770x512", "770x512"), ("big", "big"), ("512 x 512;64x72", None), ("auto", None)):
        page.page.evaluate(write, [page.node, text])
        seen = page.until_kind("failed" if wrong else "idle")
        assert wrong is None or (wrong in seen["text"] and "multiples of 8" in seen["text"])


def test_two_pictures_are_compared_under_a_slider(page: ComfyPage) -> None:
    workflow = json.loads((ROOT / "example_workflows" / "comparing.json").read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] == "EmptyLatentImage":
            node["widgets_values"][:2] = [64, 64]
        if node["type"] == "KSampler":
            node["widgets_values"][2] = 2
        if node["type"] == "SlipstreamAccelerateModel":
            node["widgets_values"][0] = "off"
    page.load(workflow)
    page.page.evaluate("() => app.queuePrompt(0)")
    both = "() => [...document.querySelectorAll('.slipstream-ab img')].every(image => image.naturalWidth === 64)"
    page.page.wait_for_function(both, timeout=60_000)
    stage = page.page.locator(".slipstream-ab-stage")
    page.page.evaluate(_LOOK_AT, "SlipstreamCompareImages")
    page.page.wait_for_timeout(500)
    box = stage.bounding_box()
    page.page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + box["height"] / 2)
    slider = page.page.get_by_role("slider", name="Picture and reference")
    page.until(lambda: slider.get_attribute("aria-valuenow") == "25", "a line where the pointer is")
    slider.focus()
    page.page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuenow") == "30"


_LOOK_AT = """type => {
  const node = app.graph._nodes.find(node => node.type === type);
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [400 - node.pos[0], 140 - node.pos[1]];
  app.canvas.setDirty(true, true);
}"""


# The tab


def test_engines_are_listed_filtered_shown_and_deleted(
    page: ComfyPage, put: Callable[..., Entry], store: EngineStore
) -> None:
    ready = put(80, "SD15 512×640 batch 2")
    stale = put(88, "SDXL 704×512 batch 2", torch="1.0.0")
    panel = page.open_tab()
    cards = panel.locator(".slipstream-card")
    cards.filter(has_text="SD15 512×640").get_by_text("ready", exact=True).wait_for()
    assert "torch" in cards.filter(has_text="SDXL 704").inner_text()
    assert "5.0 → 2.0 ms a step" in cards.filter(has_text="SD15 512×640").inner_text()
    panel.get_by_role("searchbox").fill("sdxl stale")
    assert cards.count() == 1
    panel.get_by_role("searchbox").fill("no such")
    panel.get_by_text("No engine fits").wait_for()
    panel.get_by_role("searchbox").fill("SDXL 704")
    cards.first.focus()
    page.page.keyboard.press("Enter")
    panel.get_by_text("Why it is not used now").wait_for()
    panel.get_by_text("5.0 → 2.0 ms a step (2.5x)").wait_for()
    panel.get_by_role("button", name="Verify").click()
    page.until_toast("as they were stored")
    panel.get_by_role("button", name="Delete").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.until_toast("Engine deleted")
    assert store.lookup(stale.digest) is None and store.lookup(ready.digest) is not None
    page.until(lambda: not cards.filter(has_text="SDXL 704").count(), "the card to go")


def test_an_engine_that_ended_a_process_is_tried_again(
    page: ComfyPage, put: Callable[..., Entry], store: EngineStore, client: ComfyClient
) -> None:
    entry = put(96, "SD15 512×768 batch 2")
    Doomed(store.marks, entry.digest, CAPTURE, True, versions_now()).end()
    panel = page.open_tab()
    card = panel.locator(".slipstream-card").filter(has_text="SD15 512×768")
    card.get_by_text("with care", exact=True).wait_for()
    card.click()
    panel.get_by_text("It runs without CUDA graphs: the program ended").wait_for()
    panel.get_by_role("button", name="Try again").click()
    page.until_toast("The next picture uses it again")
    panel.get_by_text("It runs without CUDA graphs").wait_for(state="detached")
    assert client.get(f"{ROUTES}/engines/{entry.digest}")["caution"] == ""


def test_the_store_is_verified_and_pruned(
    page: ComfyPage, put: Callable[..., Entry], store: EngineStore, client: ComfyClient
) -> None:
    put(96, "SD15 512×768 batch 2")
    damaged = put(104, "SD15 512×832 batch 2")
    (damaged.directory / "engine.bin").write_bytes(b"x" * 1000)
    panel = page.open_tab()
    panel.get_by_role("button", name="Verify the files").click()
    page.until_toast("1 damaged")
    panel.get_by_role("button", name="Remove what exceeds").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    page.until_toast("0 engines removed")


def test_builds_show_their_progress_and_can_be_cancelled(page: ComfyPage, client: ComfyClient) -> None:
    panel = page.open_tab("Builds")
    panel.get_by_text("Nothing is being built").wait_for()
    page.load(example(new_size()))
    page.page.evaluate("() => app.queuePrompt(0)")
    row = panel.locator(".slipstream-card")
    row.wait_for(timeout=60_000)
    page.until_kind("queued", "building")
    page.until(lambda: row.locator(".slipstream-bar-fill").get_attribute("style"), "progress")
    row.get_by_role("button", name="Cancel").click()
    row.wait_for(state="detached")
    assert client.get(f"{ROUTES}/builds")["builds"] == []


def test_the_log_is_asked_for_only_while_it_is_open(page: ComfyPage) -> None:
    asked: list[str] = []
    page.page.on("request", lambda request: f"{ROUTES}/log" in request.url and asked.append(request.url))
    panel = page.open_tab("Log")
    panel.locator(".slipstream-log li").first.wait_for()
    page.open_tab("Engines")
    page.page.wait_for_timeout(200)
    count = len(asked)
    page.page.wait_for_timeout(3500)
    assert count > 0 and len(asked) == count


def test_a_grid_of_models_and_sizes_builds_by_a_click(
    page: ComfyPage, client: ComfyClient, store: EngineStore, put: Callable[..., Entry], server: ComfyServer
) -> None:
    """A file is known by its weights; an engine that they have used names it."""
    file = server.base / "models" / "checkpoints" / "my_model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"weights")
    os.utime(file, (1, 1))
    WeightsMemo(store.root).put(file, "1" * 64, file_identity(file), "unet")
    ready, stale = put(112, "SD15 512×896 batch 2"), put(120, "SD15 512×960 batch 2", torch="1.0.0")
    panel = page.open_tab("Models")
    panel.get_by_role("button", name="my_model, 512x896: ready").wait_for()
    assert "torch" in panel.get_by_role("button", name="my_model, 512x960: to be built again").get_attribute("title")
    client.builds_take(SOON)
    size = "{0}x{0}".format(new_size())
    panel.get_by_label("More picture sizes").fill(size)
    panel.get_by_label("More picture sizes").press("Enter")
    panel.get_by_role("button", name=f"demo, {size}: no engine yet").click()
    panel.get_by_role("button", name=f"demo, {size}: ready").wait_for(timeout=60_000)
    assert len(store.list()) > 2
    page.open_tab("Engines").get_by_text("Used by my_model").first.wait_for()
    assert {ready.digest, stale.digest} <= {entry.digest for entry in store.list()}


def test_the_tab_works_by_keyboard_and_when_narrow(page: ComfyPage, put: Callable[..., Entry]) -> None:
    put(120, "SD15 512×960 batch 2 of a model with a rather long name")
    panel = page.open_tab()
    panel.locator(".slipstream-card").first.wait_for()
    panel.get_by_role("tab", name="Engines").focus()
    page.page.keyboard.press("ArrowRight")
    assert panel.get_by_role("tab", name="Builds").get_attribute("aria-selected") == "true"
    page.page.keyboard.press("ArrowLeft")
    panel.evaluate("panel => { panel.style.width = '250px'; }")
    assert panel.evaluate(STICKING_OUT) == []


# Settings and language


def test_settings_are_the_servers(page: ComfyPage, client: ComfyClient) -> None:
    page.until(lambda: page.setting("SizeLimit") == 20, "the server's settings")
    try:
        page.set("SizeLimit", 5)
        page.until(lambda: client.get(f"{ROUTES}/settings")["settings"]["limit_bytes"] == 5 * GB, "the server's limit")
        client.post(f"{ROUTES}/settings", {"background": "always"})
        page.open()
        page.until(lambda: page.setting("Background") == "always" and page.setting("SizeLimit") == 5, "the values")
        page.set("Precision", "fp4")
        page.until_toast("setting was not changed")
        page.until(lambda: page.setting("Precision") == "auto", "the old value")
    finally:
        client.post(f"{ROUTES}/settings", {"background": "idle", "limit_bytes": 20 * GB})


def test_the_settings_dialog_shows_them(page: ComfyPage) -> None:
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    dialog = page.page.get_by_role("dialog").first
    dialog.get_by_text("Slipstream", exact=True).last.click()
    for name in ("Engine folder", "Size limit (GB)", "Backend", "Precision", "Build in the background"):
        dialog.get_by_text(name, exact=True).wait_for()
    folder = dialog.locator("input.slipstream-setting")
    assert folder.is_disabled(), "SLIPSTREAM_HOME decides here"
    assert "SLIPSTREAM_HOME" in folder.get_attribute("title")


def test_the_page_speaks_chinese(page: ComfyPage, server: ComfyServer) -> None:
    page.page.route(f"**{ROUTES}/nodes", lambda route: route.fulfill(json={"nodes": []}))
    change_settings(server.url, **{"Comfy_Locale": "zh"})
    try:
        page.open()
        page.load(example(new_size()))
        assert page.seen()["button"].startswith("构建引擎") and page.seen()["text"] == "尚未运行"
        panel = page.open_tab("日志")
        panel.get_by_role("tab", name="引擎").wait_for()
        page.page.evaluate("() => app.queuePrompt(0)")
        panel.get_by_text("Slipstream：尚无").first.wait_for()
    finally:
        change_settings(server.url, **{"Comfy_Locale": "en"})


def test_fixed_reasons_are_said_in_chinese(page: ComfyPage, server: ComfyServer) -> None:
    reason = "another node replaces the attention function"
    change_settings(server.url, **{"Comfy_Locale": "zh"})
    try:
        page.open()
        page.load(example())
        ours = workflow_of(page)
        tell(page, ours, "eager", f"eager: {reason}"[:20] + "…", f"eager: {reason}")
        assert page.until_kind("eager")["text"] == "另一个节点替换了注意力函数"
        tell(page, ours, "idle", "its engine was deleted", "of the moon")
        assert page.until_kind("idle")["text"] == "引擎已被删除" and "of the moon" in page.seen()["tip"]
        tell(page, ours, "ready", "in English", engine_ms=9.62, eager_ms=312.4, timed_by="step")
        assert page.until_kind("ready")["text"] == "引擎就绪"
        assert page.seen()["button"] == "就绪 · 每步 312 → 9.6 毫秒"
        retired = Speed(104.3, 98.0, retired=versions_now())
        tell(page, ours, "eager", "eager: the…", f"eager: {say_retired(retired, 'step')}")
        assert page.until_kind("eager")["text"].startswith(
            "引擎每步 104.3 毫秒，不使用 Slipstream 的模型每步 98.0 毫秒"
        )
    finally:
        change_settings(server.url, **{"Comfy_Locale": "en"})


def test_the_menu_has_the_commands(page: ComfyPage) -> None:
    found = page.page.evaluate("() => app.extensionManager.command.commands.map(each => each.id)")
    assert {"Slipstream.BuildEngine", "Slipstream.CancelBuild", "Slipstream.OpenTab"} <= set(found)


# A build that compiles


def test_a_click_compiles_an_engine_that_the_next_run_uses(
    browser: Any, server_of: Callable[..., ComfyServer], model_files: Any
) -> None:
    checkpoint = model_files.checkpoint("sd15", 1)
    with server_of() as server, server.client() as client:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, locale="en-US")
        page = ComfyPage(context.new_page(), server.url)
        page.open()
        page.load(tiny_workflow(checkpoint))
        page.press()
        page.until(lambda: page.seen()["bar"], "a moving bar")
        page.until_kind("ready", seconds=400)
        assert len(EngineStore(server.home).list()) == 1
        page.page.evaluate("() => app.queuePrompt(0)")
        page.until(lambda: any(s["engine_calls"] for s in client.get(f"{ROUTES}/nodes")["nodes"]), "engine calls")
        page.until_kind("ready")
        context.close()
        assert page.errors == []


def tiny_workflow(checkpoint: str) -> dict[str, Any]:
    """The example with a small model from a file in place of the demo model."""
    workflow = example(64, optimize="fast build")
    loader = next(node for node in workflow["nodes"] if node["type"] == "SlipstreamDemoLoader")
    for node in workflow["nodes"]:
        if node["type"] == "SlipstreamDemoPrompt":
            node["type"], node["widgets_values"] = "SlipstreamTestConditioning", [node["id"], "fixed", 77, 768, 0]
    model, vae, _ = loader["outputs"]
    clip = {"name": "CLIP", "type": "CLIP", "links": []}
    loader.update(type="CheckpointLoaderSimple", widgets_values=[checkpoint], outputs=[model, clip, vae])
    for link in workflow["links"]:
        if link[1] == loader["id"] and link[5] == "VAE":
            link[2] = 2
    return workflow
