"""A provider whose builds are pretended, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.runtime.building import build as build_module
from slipstream.runtime.building import build_queue as queue_module
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.fakes import FakeSource, FakeWorker, NullBackend


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "_IDLE_POLL_SECONDS", 0.02)


@pytest.fixture(scope="module", autouse=True)
def _shared_compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiler's probes of this machine, seconds each, run once in a session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        yield


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "engines")


@pytest.fixture
def backend() -> NullBackend:
    return NullBackend()


@pytest.fixture
def worker(backend: NullBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorker]:
    """Takes the place of the build process."""
    fake = FakeWorker([backend])
    monkeypatch.setattr(build_module, "run_build", fake)
    yield fake
    fake.gate.set()


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def provider(store: EngineStore, backend: NullBackend, worker: FakeWorker) -> Iterator[EngineProvider]:
    made = EngineProvider(store, [backend])
    yield made
    made.queue.cancel_all("the test is over")
