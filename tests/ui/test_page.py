"""The engine manager's page in a browser, with the Gradio of this environment."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

gradio = pytest.importorskip("gradio", reason="no Gradio; `python tools/test.py` runs this with several")

from slipstream.engine_cache import EngineStore, Entry  # noqa: E402
from slipstream.tests.ui.support.driver import UiPage, serving  # noqa: E402

GRADIO = tuple(map(int, gradio.__version__.split(".")[:2]))
OpenPage = Callable[[str], UiPage]
Put = Callable[..., Entry]
GoOn = Callable[[], object]


@pytest.fixture
def page(open_page: OpenPage, url: str) -> UiPage:
    return open_page(url)


def test_engines_are_listed_with_what_is_stale(page: UiPage, put: Put) -> None:
    fresh, stale = put(40), put(41, torch="1.0")
    page.press("Refresh")
    page.until(lambda: page.row(fresh.digest[:12]) and page.row(stale.digest[:12]), "both rows")
    row = page.row(fresh.digest[:12])
    for text in ("SD15", "unet", "512×320 batch 2", "fp32", "CPU", "1.0", "0.04 %", "2.5x", "ok"):
        assert text in row
    assert "stale: torch" in page.row(stale.digest[:12])


def test_a_click_on_a_row_chooses_its_engine(page: UiPage, put: Put) -> None:
    first, second = put(42), put(43)
    page.press("Refresh")
    for engine in (first, second):
        page.click_row(engine.digest[:12])
        page.until(lambda: engine.digest[:12] in page.chosen(), "the engine among those chosen")  # noqa: B023
    page.click_row(first.digest[:12])
    page.until(lambda: first.digest[:12] not in page.chosen(), "a second click to take it back")
    assert second.digest[:12] in page.chosen()


def test_bad_input_says_what_to_do(page: UiPage) -> None:
    page.tab("Build")
    page.press("Build")
    page.until_text("Choose a model first")
    page.order("tiny", "500x500")
    page.until_text("multiples of 8")
    page.fill("slipstream_sizes", "64x64")
    page.fill("slipstream_model", "tyni")
    page.press("Build")
    page.until_text("There is no model file 'tyni'; the closest: tiny")
    page.fill("slipstream_sizes", "")
    page.press("What will it take?")
    page.until_text("Name at least one resolution")
    # Gradio writes seconds beside it for a moment.
    page.until(lambda: page.text("slipstream_progress").strip() == "Nothing is being built.", "a page without orders")


def test_what_it_will_take_is_said_before(page: UiPage) -> None:
    page.tab("Build")
    page.choose("slipstream_model", "tiny")
    page.fill("slipstream_sizes", "64x64, 128x64")
    page.press("What will it take?")
    page.until_text("2 engines, by aotinductor", "slipstream_needs")
    told = page.text("slipstream_needs")
    assert "Disk: 512.0 MB during the build" in told and "about 30.5 MB for the model" in told


def test_a_build_shows_its_progress_and_survives_a_reload(page: UiPage, store: EngineStore, go_on: GoOn) -> None:
    page.order("tiny", "64x64")
    page.until_text("pretending", "slipstream_progress")
    before = page.fraction()
    page.open()
    page.tab("Build")
    page.until_text("tiny 64×64 batch 2 · running", "slipstream_progress")
    page.until(lambda: page.fraction() > before, "the bar to go on")
    go_on()
    page.until_text("tiny 64×64 batch 2 · done", "slipstream_progress")
    assert "Fake 64×64 batch 2" in page.text("slipstream_progress")
    page.tab("Engines")
    page.until(lambda: "ok" in page.row("64×64 batch 2"), "the engine in the table")
    assert [entry for entry in store.list() if entry.manifest.label == "Fake 64×64 batch 2"]


def test_a_build_goes_on_when_the_page_is_closed(
    page: UiPage, open_page: OpenPage, store: EngineStore, go_on: GoOn
) -> None:
    page.order("tiny", "72x64")
    page.until_text("72×64 batch 2 · running", "slipstream_progress")
    page.page.goto("about:blank")
    go_on()
    page.until(lambda: any("72×64" in entry.manifest.label for entry in store.list()), "the engine in the store")
    again = open_page(page.url)
    again.tab("Build")
    again.until_text("72×64 batch 2 · done", "slipstream_progress")


def test_cancel_leaves_nothing(page: UiPage, store: EngineStore, go_on: GoOn) -> None:
    page.order("tiny", "80x64")
    page.until_text("pretending", "slipstream_progress")
    page.press("Cancel")
    page.until_text("80×64 batch 2 · cancelled", "slipstream_progress")
    assert "Nothing was kept" in page.text("slipstream_progress")
    assert not [entry for entry in store.list() if "80×64" in entry.manifest.label]
    assert not list((store.root / "tmp").iterdir())
    page.press("Cancel")
    page.until_text("Nothing is being built that could be cancelled")


def test_a_model_that_does_not_load_is_told(page: UiPage) -> None:
    page.order("broken", "64x64")
    page.until_text("broken 64×64 batch 2 · failed", "slipstream_progress")
    page.until_text("its disk is on fire", "slipstream_progress")
    page.tab("Log")
    lines = page.page.locator("textarea:visible").first
    page.until(lambda: "its disk is on fire" in lines.input_value(), "lines of the log")


def test_delete_asks_first(page: UiPage, put: Put, store: EngineStore) -> None:
    kept, gone = put(50), put(51)
    page.press("Refresh")
    page.until(lambda: page.row(gone.digest[:12]), "the row")
    page.press("Delete chosen…")
    page.until_text("Choose engines first")
    page.choose("slipstream_chosen", gone.digest[:12])
    page.press("Delete chosen…")
    page.until_text("Delete for good?")
    page.press("Keep them")
    page.until(lambda: "Delete for good?" not in page.text(), "the question to go")
    assert store.has(gone.digest)
    page.press("Delete chosen…")
    page.until_text("Delete for good?")
    page.choose("slipstream_chosen", kept.digest[:12])  # which the question does not name
    page.press("Yes, delete them")
    page.until_text("1 deleted.", "slipstream_message")
    page.until(lambda: not page.row(gone.digest[:12]), "the row to go")
    assert page.row(kept.digest[:12]) and not store.has(gone.digest) and store.has(kept.digest)


def test_the_page_is_given_out_where_a_proxy_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with serving(tmp_path / "engines") as url, direct.open(url) as answer:
        assert answer.status == 200


def test_details_and_verify(page: UiPage, put: Put) -> None:
    whole, broken = put(60), put(61)
    (broken.directory / "engine.bin").write_bytes(bytes((1 << 20) - 1) + b"x")
    page.press("Refresh")
    page.until(lambda: page.row(broken.digest[:12]), "the row")
    page.choose("slipstream_chosen", whole.digest[:12])
    page.press("Details")
    page.until_text(whole.digest, "slipstream_message")
    page.press("Verify chosen")
    page.until_text("1 checked, 0 bad.", "slipstream_message")
    page.press("Verify all")
    page.until_text("1 bad.", "slipstream_message")
    page.until(lambda: not page.row(broken.digest[:12]), "what was set aside to go")


def test_an_engine_that_went_meanwhile_is_told(page: UiPage, put: Put, store: EngineStore) -> None:
    entry = put(65)
    page.press("Refresh")
    page.until(lambda: page.row(entry.digest[:12]), "the row")
    page.choose("slipstream_chosen", entry.digest[:12])
    store.delete(entry.digest)
    page.until(lambda: not page.row(entry.digest[:12]), "the row to go")
    page.press("Details")
    page.until(lambda: "any more; press Refresh" in page.text(), "what to do")
    page.press("Refresh")
    page.until(lambda: entry.digest[:12] not in page.text("slipstream_chosen"), "the choice to go")
    page.press("Details")
    page.until(lambda: "Choose engines first" in page.text(), "that nothing is chosen")


def test_a_grid_of_models_and_sizes_builds_by_a_click(page: UiPage, store: EngineStore, go_on: GoOn) -> None:
    page.tab("My models")
    page.fill("slipstream_more_sizes", "104x64, 770x64")
    page.press("Show")
    page.until_text("multiples of 8")
    page.fill("slipstream_more_sizes", "104x64")
    page.press("Show")
    page.until(lambda: "104×64" in page.text("slipstream_grid"), "a column of that size")
    assert page.cell("tiny", "104×64").inner_text().strip() == "no engine yet"
    page.cell("tiny", "104×64").click()
    if GRADIO < (5,):
        page.until_text("does not say which row was clicked")
        return
    page.until_text("Requested: tiny 104×64 batch 2", "slipstream_grid_message")
    page.until(lambda: page.cell("tiny", "104×64").inner_text().strip() == "being built", "the cell to say so")
    assert page.cell("tiny", "512×512").inner_text().strip() == "no engine yet"
    go_on()
    page.until(lambda: "ready" in page.cell("tiny", "104×64").inner_text(), "an engine")
    assert [entry for entry in store.list() if "104×64" in entry.manifest.label]
    page.cell("broken", "104×64").click()
    page.until(lambda: "its disk is on fire" in page.cell("broken", "104×64").inner_text(), "the reason in its cell")


def test_prune_is_confirmed(page: UiPage, put: Put, store: EngineStore) -> None:
    put(75)
    page.page.get_by_text("Prune: make room on the disk").first.click()
    page.press("Prune")
    page.until_text("Tick “Yes, remove them” first")
    assert store.list()


def test_charts(page: UiPage, put: Put) -> None:
    put(80)
    page.press("Refresh")
    page.tab("Charts")
    page.until_text("SD15 512×640 batch 2, fp32 compiled: 5.0 → 2.0 ms a step (2.5x)")
    page.until_text("Nothing was calibrated here yet")
    assert page.page.locator("img[alt^='Step skipping']").evaluate("picture => picture.naturalWidth") > 0


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "elsewhere.example"}],
    ids=["origin", "site", "host"],
)
def test_other_pages_are_refused(url: str, headers: dict[str, str]) -> None:
    asked = urllib.request.Request(f"{url}run/predict", b"{}", {"Content-Type": "application/json", **headers})
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(asked)
    assert told.value.code == 403 and b"Refused" in told.value.read()


def test_as_a_tab_of_a_webui(browser: Any, tmp_path: Path) -> None:
    until = tmp_path / "go-on"
    with serving(tmp_path / "engines", "--until", str(until), "--tab") as url:
        page = UiPage(browser.new_page(viewport={"width": 1400, "height": 1000}), url)
        page.page.goto(url)
        page.until_text("a WebUI")
        page.tab("Slipstream")
        page.until_text("free on its disk")
        page.order("tiny", "64x64")
        page.until_text("tiny 64×64 batch 2 · running", "slipstream_progress")
        until.touch()
        page.until_text("tiny 64×64 batch 2 · done", "slipstream_progress")
        page.page.close()
        assert not page.errors


@pytest.mark.slow
def test_a_real_build(open_page: OpenPage, tmp_path: Path) -> None:
    store = EngineStore(tmp_path / "engines")
    with serving(store.root) as url:
        page = open_page(url)
        page.order("tiny", "64x64")
        page.until_text("tiny 64×64 batch 2 · running", "slipstream_progress")
        page.until_text("tiny 64×64 batch 2 · done", "slipstream_progress", 240)
        assert "Tiny 64×64 batch 2: aotinductor fp32" in page.text("slipstream_progress")
        page.tab("Engines")
        page.until(lambda: "ok" in page.row("64×64 batch 2"), "the engine in the table")
    (entry,) = store.list()
    assert entry.manifest.verifications
