"""A process that gives the page out, with a builder of tiny models. It ends when its standard input does.

    python serve.py HOME [--until FILE] [--tab]

Without `--until` builds are real ones; with it they go on until there is such a file, and compile nothing. `--tab` puts
the page into a tab of another one, as a WebUI does. The first line that it prints is the page's address.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
runpy.run_path(str(ROOT / "__main__.py"))["register"]()

import torch  # noqa: E402

from slipstream.core.progress import Progress  # noqa: E402
from slipstream.core.spec import Role  # noqa: E402
from slipstream.engine_cache import EngineStore  # noqa: E402
from slipstream.runtime.building import build  # noqa: E402
from slipstream.runtime.planning.plan import CallShape  # noqa: E402
from slipstream.runtime.provider import EngineProvider, HostHooks  # noqa: E402
from slipstream.runtime.requests.build_requests import Wanted  # noqa: E402
from slipstream.runtime.requests.make_engines import LoadedModel, make_engines  # noqa: E402
from slipstream.runtime.settings.model_settings import Resolution  # noqa: E402
from slipstream.tests.fakes import FakeSource, make_inputs  # noqa: E402
from slipstream.tests.unit.cli.support import FakeBackend, fake_model  # noqa: E402
from slipstream.ui import compat, page, serve  # noqa: E402
from slipstream.ui.manager import Manager  # noqa: E402

NUMBERS = 8_000_000


class TinyWorkshop:
    """Offers `tiny`, which has engines, and `broken`, which cannot be loaded."""

    roles: tuple[Role, ...] = (Role.UNET, Role.VAE_DECODE)

    def __init__(self, provider: EngineProvider, load: Callable[[], LoadedModel]) -> None:
        self._provider = provider
        self._load = load

    def device(self) -> torch.device:
        return torch.device("cpu")

    def models(self) -> list[str]:
        return ["tiny", "broken"]

    def file_of(self, model: str) -> str:
        return ""

    def parameter_count(self, model: str, role: Role) -> int | None:
        return NUMBERS

    def make(self, wanted: Wanted, hooks: HostHooks) -> Iterator[str]:
        hooks.progress(Progress("load", None, "loading the model"))
        if wanted.model == "broken":
            raise OSError("its disk is on fire")
        model, settings = self._load(), self._provider.with_preferences(wanted.settings)
        calls = (model.call(resolution, wanted.batch, wanted.tokens) for resolution in settings.resolutions)
        for made in make_engines(self._provider, model.source, calls, settings, hooks):
            yield str(made)

    def rest(self) -> None:
        self._provider.pool.clear()


def real_model() -> LoadedModel:
    """The smallest model that a compiler compiles."""

    def call(resolution: Resolution, batch: int, tokens: int) -> CallShape:
        return CallShape.of(make_inputs(resolution.height // 8, batch))

    return LoadedModel("a host", FakeSource(), call)


def held(backend: FakeBackend, until: Path) -> Callable[..., Any]:
    """In place of the build process: builds that go on until a file is there."""

    def run_build(job: Any, progress: Any, cancel: Any, **_: Any) -> Any:
        fraction = 0.0
        while not until.exists():
            cancel.raise_if_cancelled("The build")
            fraction = min(0.9, fraction + 0.01)
            progress(Progress("compile", fraction, "pretending"))
            time.sleep(0.1)
        return backend.run_build(job, progress)

    return run_build


def main() -> None:
    """Give the page out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--tab", action="store_true")
    options = parser.parse_args()
    backend = None if options.until is None else FakeBackend()
    if backend is not None:
        build.run_build = held(backend, options.until)
    provider = EngineProvider(EngineStore(options.home), [backend] if backend else None)
    manager = Manager(provider, TinyWorkshop(provider, real_model if backend is None else fake_model))
    server = _in_a_tab(manager) if options.tab else serve.start(manager).url
    print(server, flush=True)  # noqa: T201
    while sys.stdin.read(1):
        pass
    manager.cancel_all()
    manager.requests.wait(10)
    os._exit(0)


def _in_a_tab(manager: Manager) -> str:
    gr = compat.gradio()
    inner = page.blocks(manager)
    with gr.Blocks(analytics_enabled=False) as host, gr.Tabs():
        with gr.Tab("Pictures"):
            gr.Markdown("a WebUI")
        with gr.Tab("Slipstream"):
            inner.render()
    return str(compat.queued(host).launch(prevent_thread_lock=True, quiet=True, **compat.launch_options())[1])


if __name__ == "__main__":
    main()
