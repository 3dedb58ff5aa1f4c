"""ComfyUI's page in a browser, for tests of what Slipstream adds to it."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import time
import urllib.request
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "example_workflows" / "first_engine.json"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
OURS = "/extensions/slipstream/"
# Its spinner turns until it has opened its own first workflow, which else takes the place of one that a test opens.
READY = """() => window.app?.extensionManager && !app.extensionManager.spinner && app.canvas
  && document.getElementById("slipstream-style")"""
SECONDS = 120
"""Of every wait: far more than it takes, since two busy cores make a page ten times as slow."""
# Notices go after seconds, and a page on a busy machine is looked at less often than that.
_KEEP_NOTICES = """() => {
  window.slipstreamTestNotices = [];
  const keep = element => slipstreamTestNotices.push({ text: element.innerText, kind: element.className });
  new MutationObserver(changes => {
    for (const added of changes.flatMap(change => [...change.addedNodes])) {
      if (added.matches?.(".p-toast-message")) keep(added);
      else added.querySelectorAll?.(".p-toast-message").forEach(keep);
    }
  }).observe(document, { childList: true, subtree: true });
}"""
_NOTICES = "() => window.slipstreamTestNotices ?? []"
# All that our nodes say, in the graph that is open.
_LINES = """() => [...(window.app?.canvas?.graph?._nodes ?? [])].flatMap(node => {
  const named = name => node.widgets?.find(widget => widget.name === name);
  const line = named("slipstream_state")?.element;
  const button = named("slipstream_build")?.label;
  return line ? [`${node.id} ${node.type} [${button}] ${line.dataset.kind}: ${line.title}`] : [];
})"""
_MENU = ".comfyui-logo-wrapper, .comfyui-logo, .comfy-menu-button-wrapper"

_T = TypeVar("_T")
_sizes = itertools.count(64, 8)

# What a node shows, read from its widgets: the same in both renderers.
_SEEN = """id => {
  const node = app.canvas.graph.getNodeById(id);
  const named = name => node.widgets.find(widget => widget.name === name);
  const line = named("slipstream_state").element;
  const bar = line.querySelector(".slipstream-bar");
  return {
    button: named("slipstream_build").label,
    kind: line.dataset.kind,
    text: line.querySelector(".slipstream-state-text").textContent,
    tip: line.title,
    bar: bar.hidden ? null : parseFloat(bar.querySelector(".slipstream-bar-fill").style.width || "0"),
  };
}"""
_WHERE = """id => {
  const canvas = app.canvas, node = canvas.graph.getNodeById(id);
  const widget = node.widgets.find(widget => widget.name === "slipstream_build");
  const place = canvas.canvas.getBoundingClientRect();
  const x = node.pos[0] + node.size[0] / 2, y = node.pos[1] + (widget.last_y ?? widget.y) + 10;
  return [(x + canvas.ds.offset[0]) * canvas.ds.scale + place.left,
          (y + canvas.ds.offset[1]) * canvas.ds.scale + place.top];
}"""
_CENTRE = """id => {
  const canvas = app.canvas, node = canvas.graph.getNodeById(id);
  canvas.ds.scale = 1;
  canvas.ds.offset = [500 - node.pos[0], 140 - node.pos[1]];
  canvas.setDirty(true, true);
}"""
_HAS_WIDGETS = "id => app.canvas.graph?.getNodeById(id)?.widgets?.length"
_ENTER = """() => {
  const node = app.canvas.graph._nodes.find(node => node.subgraph);
  app.canvas.openSubgraph(node.subgraph, node);
  return node.id;
}"""
# As a page that was just loaded is; whether that could be had without loading it.
_AFRESH = """() => {
  const { toast, command } = app.extensionManager;
  toast.removeAll?.();
  window.slipstreamTestNotices = [];
  if (document.querySelector(".slipstream-panel")) command.execute("Slipstream.OpenTab");
  app.canvas.setGraph(app.canvas.graph.rootGraph ?? app.graph);
  return !document.querySelector("[role=dialog], .p-dialog-mask, .comfy-modal[style*=block]");
}"""
_LEAVE = "() => app.canvas.setGraph(app.canvas.graph.rootGraph)"
_SELECT = "ids => app.canvas.selectItems(ids.map(id => app.canvas.graph.getNodeById(id)))"
_INSERT = """([kind, from, output, to, input, values]) => {
  const node = LiteGraph.createNode(kind);
  app.graph.add(node);
  app.graph.getNodeById(from).connect(output, node, 0);
  if (to !== null) node.connect(0, app.graph.getNodeById(to), input);
  for (const widget of node.widgets) widget.value = values[widget.name] ?? widget.value;
  node.pos = [420, -600];
  return node.id;
}"""


def find_chromium() -> str | None:
    """The browser to test with, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def why_no_browser() -> str | None:
    """Why the page cannot be tested here, and what to do; None where it can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is missing; `python tools/test.py` installs it"
    if find_chromium() is None:
        return "no Chromium was found; on Debian: apt-get install --no-install-recommends chromium"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser of playwright's synchronous API."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as api:
        browser = api.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        yield browser
        browser.close()


def new_size() -> int:
    """Return a picture size that no engine was made for yet."""
    return next(_sizes)


def example(size: int = 64, **chosen: Any) -> dict[str, Any]:
    """The first example with a small picture, and the choices of its Accelerate Model replaced."""
    workflow = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    workflow["id"] = str(uuid.uuid4())  # what the server remembers of another test's is not shown
    for node in workflow["nodes"]:
        if node["type"] == "EmptyLatentImage":
            node["widgets_values"][:2] = [size, size]
        if node["type"] == "Note":
            node["pos"] = [node["pos"][0], 900]  # out of the way of clicks
    names = ("backend", "precision", "optimize", "build", "resolutions")
    values = accelerate(workflow)["widgets_values"]
    for name, value in chosen.items():
        values[names.index(name)] = value
    return workflow


def accelerate(workflow: dict[str, Any]) -> dict[str, Any]:
    """The node of a workflow that accelerates its model."""
    return next(node for node in workflow["nodes"] if node["type"] == "SlipstreamAccelerateModel")


def change_settings(url: str, **settings: Any) -> None:
    """Change ComfyUI's own settings, `Comfy_Locale` for `Comfy.Locale`, before a page is opened."""
    named = {name.replace("_", "."): value for name, value in settings.items()}
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/settings", json.dumps(named).encode(), headers)).close()


opened: weakref.WeakSet[ComfyPage] = weakref.WeakSet()
"""Tabs that may still be open."""


class ComfyPage:
    """One tab of the browser. `errors` lists what went wrong in Slipstream's own files."""

    def __init__(self, page: Any, url: str, nodes2: bool = False) -> None:
        self.page = page
        self.url = url
        self.nodes2 = nodes2
        self.errors: list[str] = []
        self.node: int | None = None
        self.loads = 0
        self._said: list[str] = []
        opened.add(self)
        page.set_default_timeout(SECONDS * 1000)
        page.add_init_script(f"({_KEEP_NOTICES})()")
        page.on("pageerror", lambda error: self._note(f"{error} {error.stack}"))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self._note(f"{message.text} {message.location.get('url', '')}")
        elif message.type == "warning":
            self._said.append(message.text[:300])

    def _note(self, text: str) -> None:
        self._said.append(text[:600])
        # The server's refusals are told to the user; the browser logs them as well.
        if OURS in text and "status of 4" not in text:
            self.errors.append(text[:2000])

    def open(self) -> None:
        """Load the page, or load it again."""
        self.loads += 1
        self.page.goto(self.url)
        self.page.wait_for_function(READY, timeout=SECONDS * 1000)

    def start_afresh(self) -> bool:
        """Clear away what a test left, and return whether all is as in a page that was just loaded."""
        self.page.unroute_all()
        self.node = None
        self.errors.clear()
        self._said.clear()
        from playwright.sync_api import Error

        try:
            return bool(self.page.evaluate(_AFRESH))
        except Error:  # the tab is gone, or does not answer
            return False

    def load(self, workflow: dict[str, Any]) -> None:
        """Open a workflow and bring its Accelerate Model into view."""
        self.page.evaluate("workflow => app.loadGraphData(workflow)", copy.deepcopy(workflow))
        self._look_at(accelerate(workflow)["id"])

    def open_templates(self) -> None:
        """Browse Templates, in ComfyUI's own menu."""
        self.page.locator(_MENU).first.click()
        self.page.get_by_role("menuitem", name="Browse Templates").last.click()

    def choose_template(self, pack: str, name: str, node: int) -> None:
        """Click an example of a pack in the template browser, which is open; `node` is looked at from then on."""
        dialog = self.page.get_by_role("dialog").first
        dialog.get_by_text(pack, exact=True).first.click()
        dialog.get_by_text(name, exact=True).first.click()
        dialog.wait_for(state="detached")
        self.node = node
        self.page.wait_for_function(_HAS_WIDGETS, arg=node)
        self.page.wait_for_timeout(500)

    def press_run(self) -> None:
        """ComfyUI's own button."""
        self.page.get_by_role("button", name="Run", exact=True).first.click()

    def insert(self, kind: str, source: tuple[int, int], target: tuple[int, int] | None = None, **values: Any) -> None:
        """Add a node behind an output (node, slot), before an input if named, and bring it into view."""
        place = [kind, *source, *(target or (None, None)), values]
        self._look_at(self.page.evaluate(_INSERT, place))

    def make_subgraph(self, *nodes: int) -> None:
        """Put nodes into a subgraph, as ComfyUI's menu does."""
        self.page.evaluate(_SELECT, list(nodes))
        self.page.evaluate("() => app.extensionManager.command.execute('Comfy.Graph.ConvertToSubgraph')")

    def enter_subgraph(self, node: int) -> str:
        """Open the subgraph and bring one of its nodes into view; returns this node's id in prompts."""
        outer = self.page.evaluate(_ENTER)
        self._look_at(node)
        return f"{outer}:{node}"

    def leave_subgraph(self) -> None:
        """Back to the whole workflow."""
        self.page.evaluate(_LEAVE)
        self.page.wait_for_timeout(500)

    def _look_at(self, node: int) -> None:
        self.node = node
        self.page.wait_for_function(_HAS_WIDGETS, arg=self.node)
        self.page.evaluate(_CENTRE, self.node)
        self.page.wait_for_timeout(500)  # until it is drawn, which gives widgets their place

    def seen(self) -> dict[str, Any]:
        """What the node shows: `button`, `kind`, `text`, `tip` and `bar` in percent, or None."""
        return dict(self.page.evaluate(_SEEN, self.node))

    def press(self, clicks: int = 1) -> None:
        """Click the node's button."""
        if self.nodes2:
            node = self.page.locator(f'[data-node-id="{self.node}"]')
            label = self.seen()["button"]
            node.get_by_role("button", name=label, exact=True).click(click_count=clicks)
            return
        x, y = self.page.evaluate(_WHERE, self.node)
        self.page.mouse.click(x, y, click_count=clicks)

    def until(self, ready: Callable[[], _T], what: str, seconds: float = SECONDS) -> _T:
        """Wait until `ready` gives something, with the page going on meanwhile."""
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}; {self._now()}"
            self.page.wait_for_timeout(100)
        return found

    def until_kind(self, *kinds: str, seconds: float = SECONDS) -> dict[str, Any]:
        """Wait until the node's line is of one of these kinds."""

        def found() -> dict[str, Any] | None:
            seen = self.seen()
            return seen if seen["kind"] in kinds else None

        return self.until(found, f"a line that is {' or '.join(kinds)}", seconds)

    def until_button(self, label: str, seconds: float = SECONDS) -> None:
        """Wait until the node's button says this, among other things."""
        self.until(lambda: label in self.seen()["button"], f"the button {label!r}", seconds)

    def until_toast(self, text: str, seconds: float = SECONDS) -> None:
        """Wait for a notice; one that was shown and went since the page was loaded counts too."""
        self.until(lambda: text in self.toasts(), f"the notice {text!r}", seconds)

    def toasts(self) -> str:
        """All notices that were shown since the page was loaded."""
        return "\n".join(notice["text"] for notice in self.page.evaluate(_NOTICES))

    def warnings(self) -> int:
        """How many of these were warnings."""
        return sum("p-toast-message-warn" in notice["kind"] for notice in self.page.evaluate(_NOTICES))

    def dump(self) -> str:
        """What the page shows and what its console said, for whoever reads that a test failed."""
        lines = [self.url, *self.page.evaluate(_LINES), f"notices: {self.toasts()!r}", "console:", *self._said[-20:]]
        return "\n".join(lines)

    def open_tab(self, view: str = "Engines") -> Any:
        """Open the sidebar tab at a view; returns the panel."""
        panel = self.page.locator(".slipstream-panel")
        if not panel.count():
            self.page.evaluate("() => app.extensionManager.command.execute('Slipstream.OpenTab')")
        panel.get_by_role("tab", name=view).click()
        return panel

    def setting(self, name: str) -> Any:
        """The value that ComfyUI's dialog shows."""
        return self.page.evaluate("id => app.extensionManager.setting.get(id)", f"Slipstream.{name}")

    def set(self, name: str, value: Any) -> None:
        """Choose a value, as ComfyUI's dialog does."""
        self.page.evaluate(
            "([id, value]) => app.extensionManager.setting.set(id, value)", [f"Slipstream.{name}", value]
        )

    def _now(self) -> str:
        return f"now {self.seen()}, notices {self.toasts()!r}, errors {self.errors}" if self.node else ""
