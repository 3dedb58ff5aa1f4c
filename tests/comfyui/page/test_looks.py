"""All that Slipstream adds to the page, in both palettes, in English and in Chinese: read, not only there.

Each text is told apart from what lies behind it, lies within its panel, and is in the page's language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slipstream.compile_backend.cpp import toolchain
from slipstream.core.environment import versions_now
from slipstream.engine_cache import Entry, Speed
from slipstream.runtime.checking.step_times import say_retired
from slipstream.tests.comfyui.page.conftest import new_tab
from slipstream.tests.comfyui.page.test_trust import forget_maker
from slipstream.tests.comfyui.support.browser import ComfyPage, change_settings, example, why_no_browser
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.comfyui.support.server import ComfyServer

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

LEAST_CONTRAST = 4.5
"""Of a text to what lies behind it: WCAG 2.2, level AA."""
SLOW = pytest.mark.slow
LOOKS = [
    pytest.param(("light", "zh"), id="light-zh"),
    pytest.param(("dark", "en"), id="dark-en", marks=SLOW),
    pytest.param(("dark", "zh"), id="dark-zh", marks=SLOW),
    pytest.param(("light", "en"), id="light-en", marks=SLOW),
]
VIEWS = ("speedup", "engines", "builds", "models", "log")
ENGLISH = re.compile(r"(?<![\w'./-])[A-Za-z][a-z]+(?: [a-z]+){2,}")
NAMES = ("sudo apt install g++",)

BUILD = {
    "id": "5c" * 32, "label": "SD15 512×512 batch 2", "role": "unet", "backend": "aotinductor", "precision": "fp16",
    "state": "running", "held": False, "phase": "compile", "fraction": 0.43, "message": "compiling 767 operations",
    "estimate_s": 86.0, "seconds": 36.0, "left_s": 20.0, "nodes": [],
}  # fmt: skip
TIMES = {"engine_ms": 104.0, "eager_ms": 312.0, "timed_by": "step", "engine_calls": 40, "eager_calls": 0}


def states() -> dict[str, dict[str, Any]]:
    """By kind, what the server tells of a node, in its own words."""
    retired = say_retired(Speed(104.3, 98.0, retired=versions_now()), "step")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain.shutil, "which", lambda name: None)
        missing = toolchain.why_no_cpp_compiler()
    patched = "another node replaces parts of the model (attn2), as IP-Adapter and PAG do"
    return {
        "ready": {"text": "compiled fp16 · 512×512 · 312 → 104 ms a step · ready", "tip": "SD15 512×512", **TIMES},
        "slower": {"text": "slower: the…", "tip": f"slower: {retired}", "mend": "retry"},
        "failed": {
            "text": "failed: No engine…",
            "tip": f"failed: No engine can be built on this machine. aotinductor: {missing}",
            "mend": "compiler",
        },
        "eager": {"text": "eager: another…", "tip": f"eager: {patched}"},
        "off": {
            "text": "off",
            "tip": "acceleration is switched off, in the node or in Slipstream's settings",
            "mend": "settings",
        },
    }


@pytest.fixture(params=LOOKS)
def look(request: pytest.FixtureRequest, server: ComfyServer) -> Iterator[tuple[str, str]]:
    """Palette and language of ComfyUI."""
    palette, language = request.param
    change_settings(server.url, Comfy_ColorPalette=palette, Comfy_Locale=language)
    yield palette, language
    change_settings(server.url, Comfy_ColorPalette="dark", Comfy_Locale="en")


@pytest.fixture
def page(browser: Any, server: ComfyServer, nodes2: bool, client: ComfyClient, look: tuple[str, str]) -> Iterator[Any]:
    page = new_tab(browser, server, nodes2)
    yield page
    page.page.context.close()
    assert page.errors == []


def test_all_views_can_be_read(page: ComfyPage, look: tuple[str, str], put: Callable[..., Entry]) -> None:
    put(80, "SD15 512×640 batch 2")
    put(88, "SDXL 704×512 batch 2", torch="1.0.0")
    forget_maker(put(96, "SD15 512×768 batch 2"))
    page.load(example(512))
    assert is_dark(page) == (look[0] == "dark")
    for kind, state in states().items():
        tell(page, "slipstream.nodes", {"nodes": [{"kind": kind, **here(page), **state}]})
        page.until_kind(kind)
        check(page, ".slipstream-state", look[1], kind, page.seen()["button"])
    for build in (BUILD, {**BUILD, "state": "queued", "held": True, "fraction": None, "message": ""}):
        tell(page, "slipstream.builds", {"policy": "idle", "builds": [{**build, "nodes": [here(page)]}]})
        page.until_kind("building" if build is BUILD else "queued")
        check(page, ".slipstream-state", look[1], build["state"], page.seen()["button"])
    page.page.evaluate("() => app.extensionManager.command.execute('Slipstream.OpenTab')")
    panel = page.page.locator(".slipstream-panel")
    for view in VIEWS:
        panel.locator(f"[data-name={view}]").click()
        page.page.wait_for_timeout(1000)
        check(page, ".slipstream-panel", look[1], view)
    panel.locator("[data-name=engines]").click()
    panel.locator("[data-key=adopt]").click()
    dialog = page.page.get_by_role("dialog").first
    dialog.wait_for()
    check_language(dialog.inner_text(), look[1], "the question about engines of nobody")
    page.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    panel.locator(".slipstream-card.stale").first.click()
    panel.locator(".slipstream-table").first.wait_for()
    check(page, ".slipstream-panel", look[1], "details of an engine")


def test_the_strip_can_be_read(page: ComfyPage, look: tuple[str, str]) -> None:
    add = """() => {
      const node = LiteGraph.createNode("SlipstreamKSamplerStepSkip");
      app.graph.clear();
      app.graph.add(node);
      node.pos = [300, 150];
      app.canvas.ds.scale = 1;
      app.canvas.ds.offset = [0, 0];
      const put = (name, value) => { node.widgets.find(each => each.name === name).value = value; };
      put("sampler_name", "heun");
      put("preset", "fast");
    }"""
    page.page.evaluate(add)
    page.page.locator(".slipstream-strip[data-kind=eager]").wait_for()
    check(page, ".slipstream-strip", look[1], "a warning")


def here(page: ComfyPage) -> dict[str, Any]:
    workflow = page.page.evaluate("() => (app.rootGraph ?? app.graph).id")
    return {"node": str(page.node), "workflow": workflow}


def tell(page: ComfyPage, event: str, detail: dict[str, Any]) -> None:
    """Have the page hear of an event as if the server had sent it."""
    page.page.evaluate("([name, detail]) => app.api.dispatchEvent(new CustomEvent(name, { detail }))", [event, detail])


def is_dark(page: ComfyPage) -> bool:
    colour = page.page.evaluate("() => getComputedStyle(document.body).getPropertyValue('--fg-color').trim()")
    return bool(colour.lower() in ("#fff", "#ffffff"))


def check(page: ComfyPage, root: str, language: str, what: str, more: str = "") -> None:
    """What is in sight of our elements can be read."""
    page.page.wait_for_timeout(200)  # colours fade in
    seen = page.page.evaluate(_TEXTS, root)
    assert seen, f"{what}: nothing is in sight"
    assert [each for each in seen if each["contrast"] < LEAST_CONTRAST] == [], what
    assert [each["text"] for each in seen if each["sticks_out"]] == [], what
    check_language("\n".join([more, *(each["text"] for each in seen)]), language, what)


def check_language(text: str, language: str, what: str) -> None:
    """In Chinese no words of English are left, but names."""
    if language != "zh":
        return
    for name in NAMES:
        text = text.replace(name, "")
    assert re.search("[\u4e00-\u9fff]", text), what
    assert ENGLISH.findall(text) == [], what


# Each text of ours in sight, with its contrast to what is painted behind it, and whether it leaves its panel.
_TEXTS = """root => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = colour => {
    brush.clearRect(0, 0, 1, 1);
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((part, at) => part * a + under[at] * (1 - a));
  const behind = element => {
    const layers = [];
    let solid = null;
    for (let each = element; each && !solid; each = each.parentElement) {
      const colour = rgba(getComputedStyle(each).backgroundColor);
      if (colour[3] === 1) solid = colour;
      else if (colour[3] > 0) layers.push(colour);
    }
    const node = LiteGraph.NODE_DEFAULT_BGCOLOR;  // painted on the canvas, below the elements of the classic nodes
    const start = solid ?? rgba(element.closest(".dom-widget") ? node : "white");
    return layers.reverse().reduce((under, layer) => over(layer, under), start.slice(0, 3));
  };
  const light = colour => {
    const [r, g, b] = colour.map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const panel of document.querySelectorAll(root)) {
    const right = panel.getBoundingClientRect().right;
    const walker = document.createTreeWalker(panel, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
      if (!text || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
      if (element.closest(":disabled") || !element.getBoundingClientRect().width) continue;
      const under = behind(element), style = getComputedStyle(element);
      const [one, other] = [light(over(rgba(style.color), under)), light(under)].sort((a, b) => b - a);
      const scrolls = element.closest(".slipstream-grid-place");
      found.push({
        text,
        contrast: Math.round(100 * (one + 0.05) / (other + 0.05)) / 100,
        colours: [style.color, under.map(Math.round).join(" ")],
        sticks_out: !scrolls && element.getBoundingClientRect().right > right + 1,
      });
    }
  }
  return found;
}"""
