"""Engines that no maker's key vouches for: the page asks, and they are loaded from then on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.tests.comfyui.support.browser import ComfyPage, example, new_size, why_no_browser
from slipstream.tests.comfyui.support.client import ComfyClient
from slipstream.tests.unit.cli.support import current_key

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no browser: {why_no_browser()}")

SOON = 0.5


def forget_maker(entry: Entry) -> None:
    """As if the engine had been built before engines were signed."""
    path = entry.directory / MANIFEST_NAME
    facts = {**json.loads(path.read_bytes()), "seal": None, "signature": None}
    path.write_text(json.dumps(facts), encoding="utf-8")


@pytest.fixture
def of_nobody(store: EngineStore, tmp_path: Path) -> Iterator[Callable[..., Entry]]:
    """Store an engine that nobody built or signed."""
    (tmp_path / "engine.bin").write_bytes(bytes(1000))
    made: list[Entry] = []

    def put(height: int, label: str) -> Entry:
        artifact = Artifact(tmp_path, ("engine.bin",), {})
        made.append(store.put(current_key(height), artifact, label=label, build=BuildRecord(42.0)))
        forget_maker(made[-1])
        return made[-1]

    yield put
    for entry in made:
        store.delete(entry.digest)


def dialog_of(page: ComfyPage) -> Any:
    return page.page.get_by_role("dialog").filter(has_text="native code")


def test_the_tab_asks_and_trusts(page: ComfyPage, of_nobody: Callable[..., Entry], store: EngineStore) -> None:
    entries = [of_nobody(200, "SD15 512×1600 batch 2"), of_nobody(208, "SD15 512×1664 batch 2")]
    panel = page.open_tab()
    note = panel.locator(".slipstream-of-nobody")
    note.get_by_text("2 engines are not loaded").wait_for()
    assert "nobody signed it" in panel.locator(".slipstream-card").filter(has_text="512×1600").inner_text()
    note.get_by_role("button", name="Trust them…").click()
    dialog = dialog_of(page)
    dialog.wait_for()
    text = dialog.inner_text()
    assert "2 engines in" in text and str(store.root) in text and "2 are signed by nobody" in text
    assert "512×1600" in text and "512×1664" in text and "Did you build them" in text
    page.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert all(store.trusted(entry.digest) is None for entry in entries), "nothing is trusted unasked"
    note.get_by_role("button", name="Trust them…").click()
    dialog.get_by_role("button", name="Confirm").click()
    page.until_toast("2 engines are trusted")
    note.wait_for(state="hidden")
    assert all(store.trusted(entry.digest) for entry in entries)


def test_one_engine_is_trusted_in_its_page(
    page: ComfyPage, of_nobody: Callable[..., Entry], store: EngineStore
) -> None:
    entry, other = of_nobody(216, "SD15 512×1728 batch 2"), of_nobody(224, "SD15 512×1792 batch 2")
    panel = page.open_tab()
    panel.locator(".slipstream-card").filter(has_text="512×1728").click()
    panel.get_by_role("button", name="Trust it…").click()
    dialog_of(page).get_by_role("button", name="Confirm").click()
    page.until_toast("The engine is trusted")
    panel.get_by_role("button", name="Trust it…").wait_for(state="detached")
    assert store.trusted(entry.digest) and store.trusted(other.digest) is None


def test_the_button_of_a_node_asks_and_trusts(page: ComfyPage, client: ComfyClient, store: EngineStore) -> None:
    """Where engines are built by hand, one of nobody is refused when a workflow runs."""
    workflow = example(new_size(), build="manual")
    page.load(workflow)
    client.builds_take(SOON)
    page.press()
    page.until_kind("ready")
    made = max(store.list(), key=lambda entry: entry.manifest.created)
    forget_maker(made)
    page.page.evaluate("() => app.queuePrompt(0)")
    page.until_button("Trust its engine…")
    assert "nobody signed it" in page.until_kind("eager")["text"]
    page.press()
    dialog = dialog_of(page)
    dialog.get_by_text(made.digest[:12]).wait_for()
    dialog.get_by_role("button", name="Confirm").click()
    page.until_button("Ready", seconds=60)
    assert store.trusted(made.digest)
