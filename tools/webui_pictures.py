#!/usr/bin/env python3
"""Pictures of the engine manager, and of Slipstream in Forge Neo, as real sessions: what they show is built meanwhile.

    python tools/webui_pictures.py [--comfyui FOLDER] [--only {manager,webui}]

The engine manager runs by ComfyUI's Python with Gradio 6, and builds engines of the demo model. Forge Neo is one of
`WEBUI_DIR` or ~/.cache/slipstream/webui-*, and has a tiny random checkpoint (see tests/webui/README.md). Its
buttons want a font of emoji (Debian: fonts-noto-color-emoji). Some minutes each. What the pictures show was measured on
the machine that ran this. On Escape Neo's own script reports an error on tabs that have no Interrupt button, as ours.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bootstrap import comfyui_python, find_comfyui, find_webuis, gradio_python, project_python
from screenshots import IMAGES, ROOT

BUILDING_SECONDS = 900
WIDTH, MARGIN = 1280, 6
ENGINES = (("unet", "128x128, 256x256", 2), ("vae_decode", "256x256", 1))
"""Of the demo model, with their batch, in the manager's list; the next one is shown while it is built."""
NEXT = ("unet", "256x384", 2)
COLOURS = 96


def main(arguments: argparse.Namespace) -> int:
    """Take the pictures, each with the Python of the program that they show."""
    if arguments.inside:
        runpy.run_path(str(ROOT / "tests" / "conftest.py"))  # makes the repository importable as `slipstream`
        IMAGES.mkdir(parents=True, exist_ok=True)
        {"manager": _manager, "webui": _webui}[arguments.inside](arguments.inside_of)
        return 0
    status = 0
    if arguments.only != "webui":
        checkout = arguments.comfyui or find_comfyui()[-1]
        packages = next(gradio_python("6", project_python()).parent.parent.glob("lib*/**/site-packages"))
        status |= _inside("manager", checkout, comfyui_python(checkout), PYTHONPATH=str(packages))
    if arguments.only != "manager":
        found = [each for each in find_webuis() if (each[0] / "modules_forge" / "packages").is_dir()]
        if not found:
            sys.exit("No Forge Neo was found; tests/webui/README.md says what it needs")
        status |= _inside("webui", *found[0])
    return status


def _inside(part: str, checkout: Path, python: Path, **environment: str) -> int:
    command = [str(python), "-W", "ignore", __file__, "--inside", part, str(checkout)]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}).returncode


# -------------------------------------------------------------------------------------------- the engine manager


def _manager(comfyui: str) -> None:
    from slipstream.tests.ui.support.driver import UiPage  # type: ignore[import-not-found]

    with _folder("ComfyUI") as base, _managing(base, comfyui) as url, _tab(1000) as tab:
        page = UiPage(tab, url)
        page.open()
        for engine in ENGINES:
            _order(page, *engine)
            page.until(lambda: _state(page) == "done", "the engines", BUILDING_SECONDS)
        page.tab("Engines")
        page.choose("slipstream_chosen", "SD15 256×256")
        page.press("Details")
        page.until_text("speed-up:", "slipstream_message")
        _shot(page, "ui-engines", last="#slipstream_message")
        _order(page, *NEXT)
        page.press("What will it take?")
        page.until(lambda: page.fraction() > 30, "a build that is under way", BUILDING_SECONDS)
        _shot(page, "ui-build", last="#slipstream_progress")
        page.press("Cancel")
        page.until_text("Cancelled", "slipstream_needs")


@contextmanager
def _managing(base: Path, comfyui: str) -> Iterator[str]:
    options = ["ui", "--json", "--home", "models/slipstream", "--comfyui", comfyui]
    command = [sys.executable, "-W", "ignore", str(ROOT), *options]
    process = subprocess.Popen(command, cwd=base, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, f"the page was not given out: {text}"
            text += line
        yield json.loads(text[text.index("{") :])["url"]
    finally:
        process.terminate()
        process.wait(60)


# ------------------------------------------------------------------------------------------------------ the WebUI


def _webui(checkout: str) -> None:
    from slipstream.tests.ui.support.driver import UiPage

    with _folder("webui") as base:
        os.environ["SLIPSTREAM_HOME"] = str(base / "models" / "slipstream")
        url = _start(Path(checkout), base / "data")
        with _tab(1400) as tab:
            page = UiPage(tab, url)
            tab.goto(url)
            tab.locator("#slipstream_txt2img_accordion").wait_for()
            tab.wait_for_timeout(5000)  # its own scripts put the page in order
            _choices(page)
            _shot(page, "webui-choices", first="#tabs > .tab-nav", last="#slipstream_txt2img_accordion")
            page.tab("Slipstream")
            page.order("tiny", "64x64, 64x96")
            page.until(lambda: _state(page) == "done", "the engines", BUILDING_SECONDS)
            page.tab("Engines")
            _shot(page, "webui-tab", first="#tabs > .tab-nav", last="#slipstream_message")


def _start(checkout: Path, data: Path) -> str:
    """Give the WebUI's page out, as its webui.py does."""
    from slipstream.tests.webui.support import boot  # type: ignore[import-not-found]

    data.mkdir()
    # What is switched off has no English name.
    (data / "config.json").write_text(json.dumps({"disabled_extensions": ["sd_forge_image_stitch"]}))
    boot.enter(checkout, data, ROOT)
    importlib.import_module("slipstream.tests.webui.support.tiny").load()

    def module(name: str) -> Any:
        return importlib.import_module(f"modules.{name}")

    for lists, method in _LISTS:
        getattr(module(lists), method)()
    options = module("shared_cmd_options").cmd_opts
    module("localization").list_localizations(options.localizations_dir)
    module("script_callbacks").before_ui_callback()
    page = module("shared").demo = module("ui").create_ui()
    page.queue(default_concurrency_limit=32)
    canvas = importlib.import_module("modules_forge.forge_canvas.canvas").canvas_js_root_path
    # Gradio gives nothing out of folders that begin with a dot, unless they are named.
    app, url, _ = page.launch(prevent_thread_lock=True, quiet=True, allowed_paths=[canvas, str(checkout)])
    module("progress").setup_progress_api(app)
    module("ui").setup_ui_api(app)
    module("ui_extra_networks").add_pages_to_demo(app)
    module("script_callbacks").app_started_callback(page, app)
    return str(url)


_LISTS = (
    ("sd_models", "list_models"),
    ("sd_vae", "refresh_vae_list"),
    ("sd_unet", "list_unets"),
    ("ui_extra_networks", "initialize"),
    ("ui_extra_networks", "register_default_pages"),
    ("extra_networks", "initialize"),
)


def _choices(page: Any) -> None:
    page.page.locator("#slipstream_txt2img_accordion .label-wrap").first.click()
    for name, choice in {"backend": "auto", "preset": "balanced"}.items():
        page.choose(f"slipstream_txt2img_{name}", choice)


# ----------------------------------------------------------------------------------------------------------- both


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    """One whose path tells nothing of this machine: it is to be read in the pictures."""
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _tab(height: int) -> Iterator[Any]:
    from slipstream.tests.comfyui.support.browser import chromium  # type: ignore[import-not-found]

    with chromium() as browser:
        yield browser.new_page(viewport={"width": WIDTH, "height": height}, locale="en-US")


def _order(page: Any, role: str, sizes: str, batch: int) -> None:
    page.tab("Build")
    page.page.get_by_label(role, exact=True).check()
    page.page.get_by_label("number input for Batch").first.fill(str(batch))
    page.order("demo", sizes)
    page.until(lambda: _state(page) not in ("", "done"), "the order")


def _state(page: Any) -> str:
    """Of what is built now, or was built last."""
    orders = page.page.locator(".slipstream-request")
    return str(orders.first.get_attribute("data-state")) if orders.count() else ""


def _shot(page: Any, name: str, last: str, first: str = "body") -> None:
    """From one element to the end of another."""
    page.page.mouse.move(0, 0)
    page.page.evaluate("() => document.activeElement.blur()")
    page.page.wait_for_timeout(1500)
    top = max(0, page.page.locator(first).first.bounding_box()["y"] - MARGIN)
    end = page.page.locator(last).first.bounding_box()
    height = end["y"] + end["height"] + MARGIN - top
    picture = IMAGES / f"{name}.png"
    page.page.screenshot(path=picture, full_page=True, clip={"x": 0, "y": top, "width": WIDTH, "height": height})
    _to_webp(picture)
    print(f"{name}: {page.errors or 'no errors on the page'}", flush=True)


def _to_webp(picture: Path) -> None:
    """A third of the size."""
    from PIL import Image

    drawn = Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).convert("RGB")
    drawn.save(picture.with_suffix(".webp"), lossless=True, quality=100, method=6)
    picture.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, help="the ComfyUI to build with; default: the last that is found")
    parser.add_argument("--only", choices=("manager", "webui"), help="these pictures alone")
    parser.add_argument("--inside", choices=("manager", "webui"), help=argparse.SUPPRESS)  # in the Python of a host
    parser.add_argument("inside_of", nargs="?", help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
