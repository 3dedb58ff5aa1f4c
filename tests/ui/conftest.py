"""A page that is given out for all tests of a module, and an engine store behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Speed, Verification
from slipstream.tests.comfyui.support.browser import chromium, why_no_browser
from slipstream.tests.ui.support.driver import UiPage, serving
from slipstream.tests.unit.cli.support import current_key

CHECKED = Verification(4e-4, 2e-4, 2, "fp32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests belong into the environments that `tools/bootstrap.py` makes."""
    if reason := why_no_browser():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"no browser: {reason}"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EngineStore:
    return EngineStore(tmp_path_factory.mktemp("ui") / "engines")


@pytest.fixture(scope="module")
def _until(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds") / "go-on"


@pytest.fixture
def go_on(_until: Path) -> Iterator[Callable[[], object]]:
    """Lets builds end, which go on until then."""
    _until.unlink(missing_ok=True)
    yield _until.touch
    _until.touch()


@pytest.fixture(scope="module")
def url(store: EngineStore, _until: Path) -> Iterator[str]:
    with serving(store.root, "--until", str(_until)) as url:
        yield url


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[str], UiPage]]:
    """Open an address in a new tab of the browser; errors of its scripts fail the test."""
    opened: list[UiPage] = []

    def open_page(url: str) -> UiPage:
        page = UiPage(browser.new_page(viewport={"width": 1400, "height": 1000}), url)
        opened.append(page)
        page.open()
        return page

    yield open_page
    for page in opened:
        page.page.close()
        assert not page.errors


@pytest.fixture
def put(store: EngineStore, tmp_path: Path) -> Callable[..., Entry]:
    """Store an engine for this machine, unless `environment` says otherwise; it was timed."""
    (tmp_path / "engine.bin").write_bytes(bytes(1 << 20))

    def put(height: int, **environment: Any) -> Entry:
        entry = store.put(
            current_key(height, **environment),
            Artifact(tmp_path, ("engine.bin",), {"nodes": 7}),
            label=f"SD15 512×{8 * height} batch 2",
            build=BuildRecord(3.5, {"compile": 3.0}),
            verifications={"w" * 64: CHECKED},
        )
        return store.record_speed(entry, Speed(2.0, 5.0))

    return put
