#!/usr/bin/env python3
"""The README's pictures, of a real ComfyUI: the demo model's engines are built by a click while they are taken.

    python tools/readme_pictures.py [--comfyui FOLDER]

Takes some minutes. What the pictures show was measured on the machine that ran this.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from screenshots import IMAGES, ROOT, again_inside, box_of_node, serve, shrink

BUILDING_SECONDS = 900
WORKFLOW = ROOT / "example_workflows" / "first_engine.json"
SIZE = {"width": 1120, "height": 720}
QUALITY = 70
"""Of the picture of the whole page, in per cent."""


def main(arguments: argparse.Namespace) -> int:
    """Take the pictures with the Python of a ComfyUI."""
    if os.environ.get("SLIPSTREAM_SCREENSHOTS") != "inside":
        return again_inside(arguments.comfyui, __file__)
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))  # makes the repository importable as `slipstream`
    from slipstream.tests.comfyui.support.browser import ComfyPage, change_settings, chromium  # type: ignore[import-not-found]

    IMAGES.mkdir(parents=True, exist_ok=True)
    with serve(arguments.comfyui) as server, chromium() as browser:
        change_settings(server.url, Comfy_VueNodes_Enabled=True, Comfy_Locale="en", Comfy_Minimap_Visible=False)
        page = ComfyPage(browser.new_context(viewport=SIZE, locale="en-US").new_page(), server.url, nodes2=True)
        page.open()
        _take(page)
        print(page.errors or "no errors on the page")
    return 0


def _take(page: Any) -> None:
    page.load(json.loads(WORKFLOW.read_text(encoding="utf-8")))
    page.press()
    page.until(lambda: (page.seen()["bar"] or 0) > 30, "a build that is under way", BUILDING_SECONDS)
    _shot(page, "node-building", box_of_node)
    page.until_button("Ready", BUILDING_SECONDS)
    _run(page)
    _shot(page, "node-ready", box_of_node)
    page.open_tab("Engines").locator(".slipstream-card").first.wait_for()
    page.page.evaluate("() => app.canvas.deselectAll?.()")
    page.page.wait_for_timeout(1500)
    _shot(page, "page")
    _as_webp(IMAGES / "page.png")


def _run(page: Any) -> None:
    """A picture by the engines, which are measured when they are first used."""
    page.page.evaluate("() => app.queuePrompt(0)")
    page.page.wait_for_timeout(2000)
    empty = (
        "async () => { const q = await (await app.api.fetchApi('/queue')).json(); "
        "return !q.queue_running.length && !q.queue_pending.length }"
    )
    page.until(lambda: page.page.evaluate(empty), "the picture", BUILDING_SECONDS)
    page.page.evaluate("() => app.extensionManager.toast.removeAll()")
    page.page.wait_for_timeout(2000)


def _shot(page: Any, name: str, box: Any = None) -> None:
    target = IMAGES / f"{name}.png"
    page.page.screenshot(path=target, clip=box(page) if box else None)
    if box:
        shrink(target)


def _as_webp(picture: Path) -> None:
    """Photographs and all: fewer bytes than a PNG."""
    from PIL import Image

    Image.open(picture).convert("RGB").save(picture.with_suffix(".webp"), quality=QUALITY, method=6)
    picture.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, help="the ComfyUI to show; default: the last that is found")
    sys.exit(main(parser.parse_args()))
