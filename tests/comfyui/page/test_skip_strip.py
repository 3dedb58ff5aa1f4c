"""What Step Skip shows of its steps: before a run by the sampler behind it, and after it."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from slipstream.sampling import saved
from slipstream.sampling.saved_preset import SavedPreset
from slipstream.tests.comfyui.support.browser import ROOT, ComfyPage, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

SKIP, SAMPLER = 6, 9  # nodes of the example
SEEN = """id => {
  const widgets = app.graph.getNodeById(id).widgets;
  const [list, strip] = ["preset", "slipstream_steps"].map(name => widgets.find(each => each.name === name));
  const dots = [...strip.element.querySelectorAll(".slipstream-dots span")].map(dot => dot.className);
  const text = strip.element.querySelector(".slipstream-state-text").textContent;
  const { values, getOptionLabel } = list.options;
  return { dots, text, title: strip.element.title, offered: values, named: values.map(getOptionLabel) };
}"""
TOLD = """async () => {
  const { api } = await import("/scripts/api.js");
  api.dispatchEvent(new CustomEvent("slipstream.presets", { detail: { name: "Mine now" } }));
}"""
CHOOSE = "([id, name, value]) => { app.graph.getNodeById(id).widgets.find(each => each.name === name).value = value; }"


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
