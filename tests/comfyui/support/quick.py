"""Engines that are the model's own code, "built" at once in this process: for tests of what goes on around engines."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.runtime.building import build
from slipstream.runtime.provider import EngineProvider


def _part(name: str) -> Any:
    return importlib.import_module(f"slipstream.{name}")


def _quick_builds() -> Any:
    """By its file: the pack that it is in begins with a server."""
    file = Path(__file__).parent / "testing_pack" / "quick_builds.py"
    spec = importlib.util.spec_from_file_location("quick_builds", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def quick_provider(store: EngineStore) -> Iterator[EngineProvider]:
    """A provider of such engines; meanwhile builds take no time."""
    builds = _quick_builds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "run_build", builds.QuickWorker(_part))
        provider = EngineProvider(store, [builds.QuickBackend(_part)])
        yield provider
        provider.queue.cancel_all("the test is over")
