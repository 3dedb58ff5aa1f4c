"""What Step Skip shows of its steps: before a run by the sampler behind it, and after it."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from slipstream.sampling import saved
from slipstream.sampling.saved_preset import SavedPreset
from slipstream.tests.comfyui.page.conftest import NEW
from slipstream.tests.comfyui.support.browser import ROOT, ComfyPage, change_settings, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

SKIP, SAMPLER = 6, 9  # nodes of the example
SEEN = """id => {
  const root = app.rootGraph ?? app.graph;
  const inner = root._nodes.flatMap(node => node.subgraph?._nodes ?? []);
  const { widgets } = [...root._nodes, ...inner].find(node => node.type === "SlipstreamStepSkip");
  const [list, strip] = ["preset", "slipstream_steps"].map(name => widgets.find(each => each.name === name));
  const dots = [...strip.element.querySelectorAll(".slipstream-dots span")].map(dot => dot.className);
  const text = strip.element.querySelector(".slipstream-state-text").textContent;
  const { values, getOptionLabel } = list.options;
  const named = getOptionLabel ? values.map(getOptionLabel) : values;
  return { dots, text, title: strip.element.title, offered: values, named };
}"""
TOLD = """async () => {
  const { api } = await import("/scripts/api.js");
  api.dispatchEvent(new CustomEvent("slipstream.presets", { detail: { name: "Mine now" } }));
}"""
CHOOSE = "([id, name, value]) => { app.graph.getNodeById(id).widgets.find(each => each.name === name).value = value; }"

MASK = """id => {
  const sampler = app.graph.getNodeById(id), slot = sampler.inputs.findIndex(input => input.type === "LATENT");
  const node = LiteGraph.createNode("SetLatentNoiseMask");
  app.graph.add(node);
  const latent = app.graph.getNodeById(app.graph._nodes.find(each => each.type === "EmptyLatentImage").id);
  latent.connect(0, node, 0);
  node.connect(0, sampler, slot);
}"""
# Another sampler in the place of the one behind Step Skip (0: of the one that this put there), with these values.
REPLACE = """([skip, old, type, values]) => {
  app.graph.getNodeById(old || window.slipstreamTestSampler).disconnectInput(0);
  const node = LiteGraph.createNode(type);
  app.graph.add(node);
  window.slipstreamTestSampler = node.id;
  app.graph.getNodeById(skip).connect(0, node, 0);
  for (const [name, value] of Object.entries(values)) node.widgets.find(each => each.name === name).value = value;
}"""
CHOSEN = 91
CUSTOM_SAMPLING = """([skip, old]) => {
  app.graph.getNodeById(old).disconnectInput(0);
  const add = type => {
    const node = LiteGraph.createNode(type);
    app.graph.add(node);
    return node;
  };
  const [custom, chosen, scheduler] = ["SamplerCustom", "KSamplerSelect", "BasicScheduler"].map(add);
  app.graph.remove(chosen);
  chosen.id = 91;
  app.graph.add(chosen);
  const [loader] = app.graph._nodes.filter(node => node.type === "SlipstreamDemoLoader");
  const slot = name => custom.inputs.findIndex(input => input.name === name);
  app.graph.getNodeById(skip).connect(0, custom, slot("model"));
  loader.connect(0, scheduler, 0);
  chosen.connect(0, custom, slot("sampler"));
  scheduler.connect(0, custom, slot("sigmas"));
  const put = (node, name, value) => { node.widgets.find(each => each.name === name).value = value; };
  put(scheduler, "steps", 30);
  put(scheduler, "scheduler", "normal");
  put(custom, "cfg", 5);
  put(chosen, "sampler_name", "euler");
}"""
ONE_METHOD = """id => {
  const [custom] = app.graph._nodes.filter(node => node.type === "SamplerCustom");
  const node = LiteGraph.createNode("SamplerDPMPP_2M_SDE");
  app.graph.add(node);
  node.connect(0, custom, custom.inputs.findIndex(input => input.name === "sampler"));
}"""


# A node that gives a sampler's input its value; widgets of these names have these values.
GIVE = """([sampler, name, type, values]) => {
  const node = LiteGraph.createNode(type);
  app.graph.add(node);
  const target = app.graph.getNodeById(sampler);
  node.connect(0, target, target.inputs.findIndex(input => input.name === name));
  for (const [each, value] of Object.entries(values)) node.widgets.find(one => one.name === each).value = value;
}"""
ANOTHER_SAMPLER = """([skip, steps]) => {
  const node = LiteGraph.createNode("KSampler");
  app.graph.add(node);
  app.graph.getNodeById(skip).connect(0, node, 0);
  node.widgets.find(each => each.name === "steps").value = steps;
}"""
# A widget of the only subgraph's node, for an input of a node inside.
PROMOTE = """([inside, name, value]) => {
  const outer = app.graph._nodes.find(node => node.subgraph);
  const node = outer.subgraph._nodes.find(node => node.type === inside);
  outer.subgraph.addInput(name, "INT").connect(node.inputs.find(input => input.name === name), node);
  outer.widgets.find(each => each.name === name).value = value;
}"""
DEPENDS = "Depends on the sampler"


def seen(page: ComfyPage) -> dict[str, Any]:
    return dict(page.page.evaluate(SEEN, SKIP))


@pytest.fixture
def skipping(page: ComfyPage) -> ComfyPage:
    """A page with the example of step skipping, whose pictures are small and made by the model itself."""
    workflow = json.loads((ROOT / "example_workflows" / "step_skipping.json").read_text(encoding="utf-8"))
    workflow["id"] = str(uuid.uuid4())
    for node in workflow["nodes"]:
        if node["type"] == "SlipstreamAccelerateModel":
            node["widgets_values"][0] = "off"
        if node["type"] == "EmptyLatentImage":
            node["widgets_values"][:2] = [64, 64]
    page.load(workflow)
    page.until(lambda: seen(page)["text"] == "14 of 20 steps computed · about 30 % less time", "what it saves")
    return page


def test_the_strip_and_the_list_say_what_is_saved(skipping: ComfyPage) -> None:
    found = seen(skipping)
    assert found["dots"].count("computed") == 14 and len(found["dots"]) == 20 and found["dots"][0] == "computed"
    assert "hackathon" not in found["offered"], "only by its name, in workflows that have it"
    assert "save 30 % · balanced" in found["named"] and "extreme · skips nothing here" in found["named"]
    assert found["named"][:4] == ["save 25 % · quality", "save 30 % · balanced", "save 50 % · fast", "custom"]
    assert "dB to the picture of all steps" in found["title"]


@pytest.mark.skipif(not NEW, reason="this ComfyUI's lists show values as they are")
def test_the_list_is_seen_to_say_what_is_saved(skipping: ComfyPage) -> None:
    if not skipping.nodes2:
        shown = "id => app.graph.getNodeById(id).widgets.find(each => each.name === 'preset')._displayValue"
        assert skipping.page.evaluate(shown, SKIP) == "save 30 % · balanced"
        return
    node = skipping.page.locator(f'[data-node-id="{SKIP}"]')
    skipping.until(lambda: "save 30 % · balanced" in node.inner_text(), "the label of what is chosen")
    node.get_by_text("save 30 % · balanced").click()
    options = skipping.page.get_by_role("option")
    options.filter(has_text="save 50 % · fast").wait_for()
    assert "hackathon" not in "".join(options.all_inner_texts())
    options.filter(has_text="save 25 % · quality").click()
    skipping.until(lambda: seen(skipping)["dots"].count("computed") == 15, "the steps of what was chosen")


def test_the_strip_follows_the_sampler(skipping: ComfyPage) -> None:
    skipping.page.evaluate(CHOOSE, [SAMPLER, "steps", 30])
    skipping.until(lambda: len(seen(skipping)["dots"]) == 30, "a longer run")
    skipping.page.evaluate(CHOOSE, [SAMPLER, "steps", 20])
    skipping.page.evaluate(CHOOSE, [SAMPLER, "cfg", 8])
    skipping.page.evaluate(CHOOSE, [SAMPLER, "sampler_name", "dpmpp_2m"])
    skipping.page.evaluate(CHOOSE, [SAMPLER, "scheduler", "karras"])
    skipping.until(lambda: seen(skipping)["dots"].count("computed") == 17, "more steps where 14 are too far off")
    assert seen(skipping)["named"][:2] == ["save 15 % · balanced", "custom"]
    skipping.page.evaluate(CHOOSE, [SAMPLER, "sampler_name", "heun"])
    skipping.until(lambda: "several times a step" in seen(skipping)["text"], "why all steps are computed")
    assert set(seen(skipping)["dots"]) == {"computed"}
    skipping.page.evaluate(CHOOSE, [SKIP, "preset", "hackathon"])
    skipping.until(lambda: "hackathon" in seen(skipping)["offered"], "the name that is chosen")


def test_a_mask_is_seen_before_the_run(skipping: ComfyPage) -> None:
    """Presets compute every step of inpainting; the strip must not promise less time."""
    skipping.page.evaluate(MASK, SAMPLER)
    skipping.until(lambda: "Computes every step: with a mask for inpainting" in seen(skipping)["text"], "the warning")
    assert set(seen(skipping)["dots"]) == {"computed"}


def test_a_part_of_a_run_has_its_own_steps(skipping: ComfyPage) -> None:
    """22 steps of 30 skip some, 12 are a short run at any denoise; KSampler has all of its own at any denoise."""
    skipping.page.evaluate(REPLACE, [SKIP, SAMPLER, "KSamplerAdvanced", {"steps": 30, "cfg": 5, "start_at_step": 8}])
    skipping.until(lambda: len(seen(skipping)["dots"]) == 22, "the steps that are left")
    assert "of 22 steps computed" in seen(skipping)["text"] and "skipped" in seen(skipping)["dots"]
    skipping.page.evaluate(REPLACE, [SKIP, 0, "KSampler", {"steps": 12, "cfg": 5, "denoise": 1}])
    skipping.until(lambda: "a run of 12 steps is short" in seen(skipping)["text"], "the warning")
    skipping.page.evaluate(REPLACE, [SKIP, 0, "KSampler", {"steps": 20, "cfg": 5, "denoise": 0.5}])
    skipping.until(lambda: seen(skipping)["text"].startswith("14 of 20 steps computed"), "a part of a run of 40")
    skipping.page.evaluate(REPLACE, [SKIP, 0, "KSampler", {"steps": 13, "cfg": 5, "denoise": 0.5}])
    skipping.until(lambda: "a run of 13 steps is short" in seen(skipping)["text"], "a part of a run of 26")


def test_custom_sampling_is_told_by_the_nodes_beside_the_sampler(skipping: ComfyPage) -> None:
    skipping.page.evaluate(CUSTOM_SAMPLING, [SKIP, SAMPLER])
    skipping.until(lambda: seen(skipping)["text"].startswith("21 of 30 steps computed"), "steps of the scheduler")
    skipping.page.evaluate(CHOOSE, [CHOSEN, "sampler_name", "heun"])
    skipping.until(lambda: "several times a step" in seen(skipping)["text"], "the method of the SAMPLER")
    skipping.page.evaluate(ONE_METHOD, CHOSEN)
    skipping.until(lambda: "stochastic multistep samplers" in seen(skipping)["text"], "the method of a node's class")


@pytest.mark.skipif(not NEW, reason="this ComfyUI's subgraphs are made otherwise")
@pytest.mark.parametrize("inside", [SKIP, SAMPLER], ids=["Step Skip", "the sampler"])
def test_the_sampler_is_found_across_a_subgraphs_border(skipping: ComfyPage, inside: int) -> None:
    skipping.page.evaluate(CHOOSE, [SAMPLER, "steps", 30])
    skipping.page.evaluate(CHOOSE, [SAMPLER, "cfg", 5])
    skipping.make_subgraph(inside)
    if inside == SKIP:
        skipping.enter_subgraph(inside)  # a strip that nobody sees asks nothing
    skipping.until(lambda: seen(skipping)["text"].startswith("21 of 30 steps computed"), "the sampler's steps")
    if inside == SAMPLER:
        skipping.page.evaluate(PROMOTE, ["KSampler", "steps", 40])
        skipping.until(
            lambda: seen(skipping)["text"].startswith("28 of 40 steps computed"), "the subgraph's own widget"
        )


def test_a_linked_value_is_read_of_a_primitive_alone(skipping: ComfyPage) -> None:
    skipping.page.evaluate(GIVE, [SAMPLER, "steps", "PrimitiveInt", {"value": 30}])
    skipping.until(lambda: seen(skipping)["text"].startswith("21 of 30 steps computed"), "the primitive's steps")
    skipping.page.evaluate(GIVE, [SAMPLER, "steps", "StringLength", {"string": "twenty"}])
    skipping.until(lambda: seen(skipping)["text"] == DEPENDS, "no guess")
    assert seen(skipping)["dots"] == [] and seen(skipping)["named"][:2] == ["quality", "balanced"]


def test_without_a_sampler_nothing_is_promised(skipping: ComfyPage) -> None:
    skipping.page.evaluate("id => app.graph.getNodeById(id).disconnectInput(0)", SAMPLER)
    skipping.until(lambda: seen(skipping)["text"] == DEPENDS, "no guess")


def test_of_several_samplers_one_is_told(skipping: ComfyPage) -> None:
    skipping.page.evaluate(ANOTHER_SAMPLER, [SKIP, 40])
    wanted = "14 of 20 steps computed · about 30 % less time · for one of 2 samplers"
    skipping.until(lambda: seen(skipping)["text"] == wanted, "that there are more")


def test_a_run_has_the_steps_that_its_scheduler_makes(skipping: ComfyPage) -> None:
    for name, value in {"cfg": 5, "steps": 19, "scheduler": "ddim_uniform"}.items():
        skipping.page.evaluate(CHOOSE, [SAMPLER, name, value])
    skipping.until(lambda: seen(skipping)["text"].startswith("14 of 20 steps computed"), "20 where 19 are asked for")
    skipping.page.evaluate(CHOOSE, [SAMPLER, "denoise", 0.7])
    skipping.until(lambda: "a run of 19 steps is short" in seen(skipping)["text"], "the last 19 of a longer schedule")


def test_a_question_that_failed_is_asked_again(skipping: ComfyPage) -> None:
    asked: list[str] = []

    def refuse(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=502, body="") if len(asked) == 1 else route.continue_()

    skipping.page.route("**/step-skip?*", refuse)
    skipping.page.evaluate(CHOOSE, [SAMPLER, "steps", 30])
    skipping.until(lambda: "502" in seen(skipping)["text"], "what went wrong")
    skipping.until(lambda: len(seen(skipping)["dots"]) == 30, "the answer, with nothing changed")
    skipping.page.wait_for_timeout(3000)
    skipping.errors[:] = [error for error in skipping.errors if "502" not in error]
    assert len(asked) == 2, "what is answered is not asked again"


def test_reasons_are_said_in_chinese(skipping: ComfyPage, server: Any) -> None:
    workflow = skipping.page.evaluate("() => app.graph.serialize()")
    change_settings(server.url, Comfy_Locale="zh")
    try:
        skipping.open()
        skipping.page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
        skipping.until(lambda: seen(skipping)["text"] == "计算 20 步中的 14 步 · 约省时 30 %", "what it saves")
        skipping.page.evaluate(CHOOSE, [SAMPLER, "sampler_name", "heun"])
        skipping.until(lambda: seen(skipping)["text"].startswith("计算每一步：此采样器每步多次调用模型"), "the reason")
    finally:
        change_settings(server.url, Comfy_Locale="en")


def test_what_is_saved_while_the_page_is_open_is_offered(skipping: ComfyPage, server: Any) -> None:
    folder = server.home / "step_skipping"
    mine = SavedPreset("Mine now", 20, (0, 1, 2, 5, 19), "SD15", "euler", "normal", 7.0, 40.0, "2025-11-30")
    saved.save(mine, folder)
    try:
        skipping.page.evaluate(TOLD)
        skipping.until(lambda: "save 75 % · Mine now" in seen(skipping)["named"], "without a reload")
    finally:
        saved.delete("Mine now", folder)


def test_the_strip_tells_of_the_last_run(skipping: ComfyPage) -> None:
    skipping.page.evaluate(CHOOSE, [SAMPLER, "seed", uuid.uuid4().int % 2**32])  # else ComfyUI may have the latent yet
    skipping.page.evaluate("() => app.queuePrompt(0)")
    skipping.until(lambda: seen(skipping)["text"] == "Last run: 14 of 20 computed", "the run's own count")
