#!/usr/bin/env python3
"""Pictures of what Slipstream adds to ComfyUI's page, to look at.

    python tools/screenshots.py [--comfyui FOLDER] [--out FOLDER] [--classic] [--locale zh]

Takes each view in both themes and two widths into a scratch folder. The engines and builds shown are made up; the
README's pictures are of real ones: tools/readme_pictures.py.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTHS = {1280: 800, 1920: 1080}
THEMES = ("dark", "light")
MOST_BYTES = 200_000

# Made up: picture height, label, size in MB, milliseconds with and without the engine, relative error
ENGINES = (
    (512, "SD15 512×512 batch 2", 21, 6.6, 23.9, 4.1e-4),
    (768, "SD15 512×768 batch 2", 22, 9.8, 33.2, 4.4e-4),
    (1024, "SD15 512×1024 batch 2", 24, 13.1, 42.0, 3.9e-4),
)
STALE = (640, "SD15 512×640 batch 2", 21, 8.1, 28.0, 4.0e-4)

BUILD = {
    "id": "5c" * 32,
    "label": "SD15 512×512 batch 2",
    "role": "unet",
    "backend": "aotinductor",
    "precision": "fp16",
    "state": "running",
    "held": False,
    "phase": "compile",
    "fraction": 0.42,
    "message": "compiling 767 operations",
    "estimate_s": 86.0,
    "seconds": 36.0,
    "left_s": 50.0,
    "nodes": [],
}
WAITING = {
    **BUILD,
    "id": "7e" * 32,
    "label": "VAE decoder 512×512",
    "role": "vae_decode",
    "state": "queued",
    "held": True,
    "message": "",
}
READY = {
    "kind": "ready",
    "text": "compiled fp16 · 512×512 · 24 → 6.6 ms a step · ready",
    "tip": "SD15 512×512 batch 2",
    "engine_ms": 6.6,
    "eager_ms": 23.9,
    "timed_by": "step",
    "engine_calls": 40,
    "eager_calls": 0,
}
FAILED = {
    "kind": "failed",
    "text": "failed: no C++ compiler was found",
    "tip": "No C++ compiler was found. Install one, such as g++, and start ComfyUI again.",
}
EAGER = {
    "kind": "eager",
    "text": "eager: a custom node patched the model with transformer_options it cannot trace",
    "tip": "eager: a custom node patched the model with transformer_options it cannot trace",
    "engine_calls": 0,
    "eager_calls": 40,
}
OFF = {"kind": "off", "text": "off", "tip": "backend is off here"}
BLOCKS = {
    "kind": "building",
    "text": "building: 3 of 9 blocks' engines built",
    "tip": "blocks SD15 ResBlock 192: compiling 31 operations",
    "fraction": 0.42,
    "blocks_built": 3,
    "blocks_wanted": 9,
}
MIXED = {**READY, "text": "compiled fp16 · 24 → 6.6 ms a step · ready · 20 of 40 calls plain", "eager_calls": 20}
BUILT = {
    "result": "built",
    "label": "SD15 512×512 batch 2",
    "seconds": 86.0,
    "message": "",
    "nodes": [],
}

LOG = (
    {"level": "info", "text": "SD15 512×512 batch 2: building (aotinductor, fp16)"},
    {"level": "info", "text": "SD15 512×512 batch 2: built in 86 s"},
    {"level": "warning", "text": "SD15 512×640 batch 2 is not used: torch: 2.9.0 → 2.13.0"},
    {"level": "error", "text": FAILED["tip"]},
)


def main(arguments: argparse.Namespace) -> int:
    """Take the pictures with the Python of a ComfyUI."""
    if os.environ.get("SLIPSTREAM_SCREENSHOTS") != "inside":
        return again_inside(arguments.comfyui, __file__)
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))  # makes the repository importable as `slipstream`
    out = arguments.out or Path(tempfile.mkdtemp(prefix="slipstream-pictures-"))
    with serve(arguments.comfyui) as server:
        _fill(server.home)
        _take_all(server, out, arguments)
    print(f"{len(list(out.rglob('*.png')))} pictures in {out}")
    return 0


def again_inside(chosen: Path | None, script: str) -> int:
    """Run `script` with the Python of a ComfyUI, by default of the last that is found."""
    from bootstrap import comfyui_python, find_comfyui

    checkout = chosen or find_comfyui()[-1]
    environment = {**os.environ, "SLIPSTREAM_SCREENSHOTS": "inside", "OMP_NUM_THREADS": "1"}
    command = [str(comfyui_python(checkout)), script, *sys.argv[1:], "--comfyui", str(checkout)]
    return subprocess.run(command, env=environment).returncode


@contextmanager
def serve(checkout: Path) -> Iterator[Any]:
    """A ComfyUI with nothing in it but Slipstream."""
    from slipstream.tests.comfyui.support.server import ComfyServer  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as base:
        with ComfyServer(checkout, Path(base), Path(base) / "no-models") as server:
            yield server


def _fill(home: Path) -> None:
    """Put engines into a store."""
    from slipstream.core.protocols import Artifact  # type: ignore[import-not-found]
    from slipstream.engine_cache import BuildRecord, EngineStore, Speed, Verification  # type: ignore[import-not-found]
    from slipstream.tests.unit.cli.support import current_key  # type: ignore[import-not-found]

    store = EngineStore(home)
    for height, label, size, engine, eager, error in (STALE, *ENGINES):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "engine.pt2").write_bytes(os.urandom(1024) * (size * 1024))
            environment = {"torch": "2.9.0"} if height == STALE[0] else {}
            checked = Verification(error, error / 2, 2, "fp32")
            entry = store.put(
                current_key(height // 8, **environment),
                Artifact(Path(folder), ("engine.pt2",), {}),
                label=label,
                build=BuildRecord(86.0, {"export": 14.0, "compile": 72.0}),
                verifications={"3f" * 32: checked},
            )
            store.record_speed(entry, Speed(engine, eager))
    file = entry.directory / "manifest.json"  # the last one is from before engines were signed
    manifest = {**json.loads(file.read_bytes()), "seal": None, "signature": None}
    file.write_text(json.dumps(manifest), encoding="utf-8")


def _take_all(server: Any, out: Path, arguments: argparse.Namespace) -> None:
    from slipstream.tests.comfyui.support.browser import ComfyPage, change_settings, chromium  # type: ignore[import-not-found]

    with chromium() as browser:
        for theme in THEMES:
            for width, height in WIDTHS.items():
                palette = "light" if theme == "light" else "dark"
                change_settings(
                    server.url,
                    Comfy_ColorPalette=palette,
                    Comfy_VueNodes_Enabled=not arguments.classic,
                    Comfy_Locale=arguments.locale,
                    Comfy_Minimap_Visible=False,
                )
                context = browser.new_context(viewport={"width": width, "height": height}, locale="en-US")
                page = ComfyPage(context.new_page(), server.url, nodes2=not arguments.classic)
                page.open()
                _Views(page, out / f"{theme}-{width}").take()
                context.close()
                print(f"{theme} {width}: {page.errors or 'no errors'}", flush=True)


class _Views:
    """Goes through the views of one page."""

    def __init__(self, page: Any, folder: Path) -> None:
        self.page, self.folder = page, folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self) -> None:
        """All of them."""
        self._node()
        self._tab()
        self._close_tab()
        self._help()
        self._other_nodes()
        self._settings()

    def _node(self) -> None:
        from slipstream.tests.comfyui.support.browser import example

        page = self.page
        page.load(example(512))
        self._shot("node-idle")
        self._say("slipstream.builds", {"policy": "idle", "builds": [{**WAITING, "nodes": [self._here()]}]})
        self._shot("node-queued")
        self._say("slipstream.builds", {"policy": "idle", "builds": [{**BUILD, "nodes": [self._here()]}, WAITING]})
        self._shot("node-building")
        page.open_tab(self._named("builds"))
        self._shot("builds")
        self._say("slipstream.builds", {"policy": "idle", "builds": []})
        self._shot("builds-none")
        self._close_tab()
        states: Mapping[str, Mapping[str, object]] = {
            "failed": FAILED,
            "eager": EAGER,
            "off": OFF,
            "mixed": MIXED,
            "blocks": BLOCKS,
            "ready": READY,
        }
        for name, state in states.items():
            self._say("slipstream.nodes", {"nodes": [{**state, **self._here()}]})
            self._shot(f"node-{name}")
        self._say("slipstream.result", BUILT)
        self._say("slipstream.result", {**BUILT, "result": "failed", "message": FAILED["tip"]})
        self._shot("toast")
        page.page.evaluate("() => app.extensionManager.toast.removeAll()")

    def _other_nodes(self) -> None:
        """All nodes of the pack as they are added, with nothing chosen yet."""
        page = self.page.page
        page.evaluate(_ADD_ALL)
        page.wait_for_timeout(1000)
        page.evaluate("() => app.canvas.setDirty(true, true)")  # the first drawing gives nodes their size
        page.wait_for_timeout(500)
        self._shot("nodes")

    def _help(self) -> None:
        """ComfyUI's panel about a chosen node."""
        page = self.page.page
        page.evaluate("id => app.canvas.selectItems([app.canvas.graph.getNodeById(id)])", self.page.node)
        page.locator(_INFO).first.click()
        page.locator(_HELP).first.wait_for()
        page.wait_for_timeout(800)
        self._shot("help")
        page.evaluate("() => app.canvas.deselectAll()")

    def _close_tab(self) -> None:
        page = self.page.page
        if page.locator(".slipstream-panel").count():
            page.evaluate("() => app.extensionManager.command.execute('Slipstream.OpenTab')")
            page.locator(".slipstream-panel").wait_for(state="detached")
            page.wait_for_timeout(400)

    def _here(self) -> dict[str, Any]:
        workflow = self.page.page.evaluate("() => (app.rootGraph ?? app.graph).id")
        return {"node": str(self.page.node), "workflow": workflow}

    def _say(self, event: str, detail: dict[str, Any]) -> None:
        """Let the page hear an event as if the server had sent it."""
        self.page.page.evaluate(_SAY, [event, detail])
        self.page.page.wait_for_timeout(800)

    def _tab(self) -> None:
        panel = self.page.open_tab(self._named("engines"))
        panel.locator(".slipstream-card").first.wait_for()
        self._shot("engines")
        panel.get_by_role("searchbox").fill("768")
        self._shot("filter")
        panel.get_by_role("searchbox").fill("no such engine")
        self._shot("filter-none")
        panel.get_by_role("searchbox").fill("")
        for question in ("prune", "adopt"):
            panel.locator(f"[data-key={question}]").click()
            self._dialog(question)
        panel.locator(".slipstream-card.stale").first.click()
        panel.locator(".slipstream-table").first.wait_for()
        self._shot("details")
        panel.locator("[data-key=delete]").click()
        self._dialog("delete")
        panel.evaluate("panel => panel.querySelectorAll('details').forEach(each => { each.open = true; })")
        panel.locator("details").nth(3).scroll_into_view_if_needed()
        self._shot("details-all")
        self.page.page.route("**/slipstream/v1/log?*", _answer_log)
        self.page.open_tab(self._named("log"))
        self.page.page.wait_for_timeout(1500)
        self._shot("log")
        for view in ("models", "speedup"):
            self.page.open_tab(self._named(view))
            self.page.page.wait_for_timeout(1000)
            self._shot(view)

    def _dialog(self, name: str) -> None:
        """Show a question and leave it unanswered."""
        dialog = self.page.page.get_by_role("dialog").first
        dialog.wait_for()
        self.page.page.wait_for_timeout(500)
        self._shot(name)
        self.page.page.keyboard.press("Escape")
        dialog.wait_for(state="detached")

    def _settings(self) -> None:
        page = self.page.page
        page.evaluate("() => app.extensionManager.toast.removeAll()")
        page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        page.get_by_role("dialog").first.get_by_text("Slipstream", exact=True).last.click()
        page.wait_for_timeout(800)
        self._shot("settings")

    def _named(self, view: str) -> Any:
        """The label of a view in the page's language."""
        panel = self.page.page.locator(".slipstream-panel")
        if not panel.count():
            self.page.page.evaluate("() => app.extensionManager.command.execute('Slipstream.OpenTab')")
        return panel.locator(f"[data-name={view}]").inner_text()

    def _shot(self, name: str) -> None:
        self.page.page.screenshot(path=self.folder / f"{name}.png")


def _answer_log(route: Any) -> None:
    asked = int(route.request.url.rpartition("=")[2])
    lines = [{"n": n, "time": 1.76e9 + 7 * n, **line} for n, line in enumerate(LOG, 1)]
    route.fulfill(json={"lines": lines[asked:], "next": len(lines)})


def box_of_node(page: Any) -> dict[str, float]:
    """Where the page's node is on the screen."""
    return dict(page.page.evaluate(_BOX, page.node))


def box_of_panel(page: Any) -> dict[str, float]:
    """Where the sidebar's tab is on the screen."""
    box = page.page.locator(".slipstream-panel").bounding_box()
    return {**box, "x": 0, "width": box["x"] + box["width"], "height": min(box["height"], 620)}


_SAY = "([name, detail]) => app.api.dispatchEvent(new CustomEvent(name, { detail }))"
_INFO = ".selection-toolbox [data-testid=info-button], [data-testid=info-button], button:has(.icon-\\[lucide--info\\])"
_HELP = ".node-help-content"
_ADD_ALL = """() => {
  const kinds = Object.keys(LiteGraph.registered_node_types).filter(kind => kind.startsWith("Slipstream"));
  app.graph.clear();
  kinds.map(kind => LiteGraph.createNode(kind)).forEach((node, index) => {
    app.graph.add(node);
    node.pos = [(index % 4) * 460, Math.floor(index / 4) * 520];
  });
  app.canvas.ds.scale = 0.6;
  app.canvas.ds.offset = [160, 130];
  app.canvas.setDirty(true, true);
}"""
_BOX = """id => {
  const node = app.graph.getNodeById(id), canvas = app.canvas, place = canvas.canvas.getBoundingClientRect();
  const title = 40, edge = 14, scale = canvas.ds.scale;
  return {
    x: (node.pos[0] - edge + canvas.ds.offset[0]) * scale + place.left,
    y: (node.pos[1] - title - edge + canvas.ds.offset[1]) * scale + place.top,
    width: (node.size[0] + 2 * edge) * scale,
    height: (node.size[1] + title + 2 * edge) * scale,
  };
}"""


def shrink(picture: Path) -> None:
    """Fewer colours, which pages have few of."""
    from PIL import Image

    Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)
    if picture.stat().st_size > MOST_BYTES:
        print(f"{picture.name} has {picture.stat().st_size} bytes, more than {MOST_BYTES}", file=sys.stderr)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, help="the ComfyUI to show; default: the last that is found")
    parser.add_argument("--out", type=Path, help="where to put the pictures; default: a new scratch folder")
    parser.add_argument("--classic", action="store_true", help="the classic canvas instead of Nodes 2.0")
    parser.add_argument("--locale", default="en", help="the page's language")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_parse()))
