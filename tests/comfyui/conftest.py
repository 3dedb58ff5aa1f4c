"""A real ComfyUI for the tests: in this process and as a server. README.md here lists the fixtures."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slipstream.tests.comfyui.support.client import ComfyClient
    from slipstream.tests.comfyui.support.models.model_files import ModelFiles
    from slipstream.tests.comfyui.support.server import ComfyServer

HOW_TO = "run `python tools/test.py`, or set COMFYUI_DIR to one ComfyUI checkout and use its Python"
CHECKOUT = Path(os.environ["COMFYUI_DIR"]).resolve() if os.environ.get("COMFYUI_DIR") else None
HAS_COMFYUI = CHECKOUT is not None and (CHECKOUT / "main.py").is_file()

if HAS_COMFYUI:
    # Before any test module is imported, so that these may import `comfy` and `nodes` like any other module.
    from slipstream.tests.comfyui.support.in_process import enter

    BASE = Path(tempfile.mkdtemp(prefix="slipstream-comfyui-"))
    enter(CHECKOUT, BASE)
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes into a file where one is named."""
    if not HAS_COMFYUI:
        return
    from slipstream.tests.comfyui.support.report import VARIABLE, Report

    if file := os.environ.get(VARIABLE):
        import comfyui_version

        config.pluginmanager.register(Report(Path(file), comfyui_version.__version__))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly when the ComfyUI tests, or those with a browser, were left out."""
    if not HAS_COMFYUI:
        terminalreporter.write_line(f"tests/comfyui left out: no ComfyUI; {HOW_TO}", red=True)
        return
    from slipstream.tests.comfyui.support.browser import why_no_browser

    if why := why_no_browser():
        terminalreporter.write_line(f"tests/comfyui/page/test_page.py left out: {why}", red=True)


@pytest.fixture(scope="session")
def comfyui_dir() -> Path:
    """The ComfyUI checkout under test."""
    return CHECKOUT


@pytest.fixture(scope="session")
def comfyui_version() -> tuple[int, ...]:
    """The version of the ComfyUI under test, such as (0, 33, 0)."""
    import comfyui_version

    return tuple(int(part) for part in comfyui_version.__version__.split("."))


@pytest.fixture(scope="session", autouse=True)
def _base_directory() -> Iterator[None]:
    yield
    shutil.rmtree(BASE, ignore_errors=True)


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Random-weight model files that ComfyUI's stock loaders accept, made when first asked for."""
    from slipstream.tests.comfyui.support.models.model_files import ModelFiles

    return ModelFiles(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory, model_files: ModelFiles) -> Callable[..., ComfyServer]:
    """Build a `ComfyServer` that is not started yet; options as in its constructor."""
    return functools.partial(_server_of, tmp_path_factory, model_files.folder)


def _server_of(factory: pytest.TempPathFactory, models: Path, **options) -> ComfyServer:
    from slipstream.tests.comfyui.support.server import ComfyServer

    return ComfyServer(CHECKOUT, factory.mktemp("server"), models, **options)


@pytest.fixture(scope="session")
def comfy_server(server_of: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """One running ComfyUI with Slipstream in it, shared by the whole session."""
    with server_of() as server:
        yield server


@pytest.fixture
def start_comfy(server_of: Callable[..., ComfyServer]) -> Iterator[Callable[..., ComfyServer]]:
    """Start further servers of one's own (other options, restarts); all are stopped after the test."""
    started: list[ComfyServer] = []

    def start(**options) -> ComfyServer:
        server = server_of(**options)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def client(comfy_server: ComfyServer) -> Iterator[ComfyClient]:
    """A client of the shared server, whose queue is empty before and after the test."""
    with comfy_server.client() as client:
        client.clear()
        yield client
        client.clear()


@pytest.fixture(scope="session")
def engine_store(tmp_path_factory: pytest.TempPathFactory):
    """One engine store for all tests of this process: an engine is built once."""
    from slipstream.engine_cache import EngineStore

    return EngineStore(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session", autouse=True)
def _shared_compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Probes of the compiler (which vector instructions work?) are made once, not once a build."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    yield
    patch.undo()
