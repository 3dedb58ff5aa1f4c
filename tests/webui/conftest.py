"""A real WebUI in this process; skips loudly where there is none. See README.md here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "slipstream"
HOW_TO = "set WEBUI_DIR to a checkout of a WebUI, and use a Python that has its packages; see tests/webui/README.md"
CHECKOUT = Path(os.environ["WEBUI_DIR"]).resolve() if os.environ.get("WEBUI_DIR") else None


def _start(checkout: Path | None) -> str | None:
    """Why no WebUI runs in this process; None where one does."""
    if checkout is None:
        found = ", ".join(sorted(path.name for path in CACHE.glob("webui-*"))) or "none"
        return f"no WEBUI_DIR; {HOW_TO} (in {CACHE}: {found})"
    from slipstream.tests.webui.support import boot, boot_a1111, boot_patched

    try:
        if (checkout / "backend").is_dir():
            boot.enter(checkout, DATA, ROOT)
        elif (checkout / "ldm_patched").is_dir():
            boot_patched.enter(checkout, DATA)
        elif boot_a1111.has_parts(checkout):
            boot_a1111.enter(checkout, DATA)
        else:
            return f"{checkout} is no checkout of Forge Neo, Forge, reForge or AUTOMATIC1111; {HOW_TO}"
    except ImportError as error:
        return f"{checkout.name} cannot be started here ({error}); {HOW_TO}"
    return None


DATA = Path(tempfile.mkdtemp(prefix="slipstream-webui-")) / "data"
LEFT_OUT = _start(CHECKOUT)  # before any test module is imported, so that these may import `modules` and `backend`
_TESTS = {
    "backend": ("test_engines.py", "test_loading.py", "test_step_skip.py"),
    "ldm_patched": ("test_patched.py",),
    "modules": ("test_a1111.py",),
}
"""A folder that a WebUI has -> the tests that are for it; the first one counts."""


def _others() -> list[str]:
    """Tests that are for other WebUIs than the one that runs here."""
    ours = next((name for name in _TESTS if CHECKOUT and (CHECKOUT / name).is_dir() and not LEFT_OUT), None)
    return [test for name, tests in _TESTS.items() if name != ours for test in tests]


collect_ignore = _others()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly when these tests were left out."""
    if LEFT_OUT:
        terminalreporter.write_line(f"tests/webui left out: {LEFT_OUT}", red=True)


@pytest.fixture(scope="session", autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    shutil.rmtree(DATA.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The WebUI under test."""
    assert CHECKOUT is not None
    return CHECKOUT


@pytest.fixture(scope="session", autouse=True)
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One engine store and one compiler cache for all tests of this process: an engine is built once."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SLIPSTREAM_HOME", str(tmp_path_factory.mktemp("engines")))
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    yield
    patch.undo()
