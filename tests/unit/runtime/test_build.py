"""From a plan to an engine in the store: whole or not at all."""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from slipstream.core.errors import (
    BackendUnavailable,
    BuildCancelled,
    BuildDied,
    BuildFailed,
    StoreError,
    UnsupportedModel,
)
from slipstream.core.progress import CancelToken, Progress, ignore_progress
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import EngineStore, Entry
from slipstream.runtime import build as build_module
from slipstream.runtime.build import build_engine, expected_seconds, export_lock
from slipstream.runtime.plan import Plan
from slipstream.tests.fakes import FakeWorker, NullBackend, make_plan, wait_until


@pytest.fixture
def plan(backend: NullBackend) -> Plan:
    return make_plan(8, backend)


def build(plan: Plan, store: EngineStore, cancel: CancelToken | None = None) -> Entry:
    return build_engine(plan, store, ignore_progress, cancel or CancelToken())


def left_over(store: EngineStore) -> list[Path]:
    return [path for folder in ("tmp", "in_use") for path in (store.root / folder).iterdir()]


def test_an_engine_is_stored_with_what_is_known_of_its_build(
    plan: Plan, store: EngineStore, worker: FakeWorker
) -> None:
    entry = build(plan, store)
    assert entry.digest == plan.key.digest and store.lookup(plan.key.digest) == entry
    assert entry.path("engine.txt").read_text() == "null"
    assert entry.manifest.label == "Tiny 64×64 batch 1"
    assert set(entry.manifest.build.phases) == {"export", "compile"}
    assert entry.manifest.verifications == {}
    assert left_over(store) == []


def test_what_is_there_is_not_built_again(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    assert build(plan, store) == build(plan, store)
    assert worker.builds == 1


def test_two_builders_of_one_engine_build_it_once(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    worker.gate.clear()
    found: list[Entry] = []
    threads = [threading.Thread(target=lambda: found.append(build(plan, EngineStore(store.root)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert worker.started.wait(30)
    worker.gate.set()
    for thread in threads:
        thread.join(30)
    assert worker.builds == 1 and len(found) == 2 and found[0].digest == found[1].digest


def test_waiting_for_another_process_can_be_cancelled(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    cancel = CancelToken()
    shown: list[Progress] = []
    with store.reserve(plan.key.digest):
        threading.Timer(0.3, cancel.cancel).start()
        with pytest.raises(BuildCancelled):
            build_engine(plan, EngineStore(store.root), shown.append, cancel)
    assert worker.builds == 0
    assert shown[0].message == "another process is building this engine"


@pytest.mark.parametrize(
    "error",
    [BuildFailed("g++ crashed"), BuildCancelled("stop"), BuildDied("killed"), OSError("?"), KeyboardInterrupt()],
)
def test_a_failed_build_leaves_nothing(
    plan: Plan, store: EngineStore, worker: FakeWorker, error: BaseException
) -> None:
    worker.error = error
    with pytest.raises(type(error)):
        build(plan, store)
    assert store.list() == [] and left_over(store) == []
    worker.error = None
    assert build(plan, store)


def test_an_artifact_without_its_files_is_refused(
    plan: Plan, store: EngineStore, backend: NullBackend, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        backend, "build", lambda job, progress: Artifact(job.directory, ("engine.txt", "lost.txt"), {"nodes": 3})
    )
    with pytest.raises(BuildFailed, match="lost.txt|engine.txt"):
        build(plan, store)
    assert store.list() == [] and left_over(store) == []


def test_a_model_that_cannot_be_traced(
    plan: Plan, store: EngineStore, backend: NullBackend, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object) -> None:
        raise UnsupportedModel("torch.export cannot trace it")

    monkeypatch.setattr(backend, "export", export)
    with pytest.raises(UnsupportedModel):
        build(plan, store)
    assert left_over(store) == [] and worker.builds == 0
    assert not export_lock.locked()


@pytest.mark.parametrize("what", ["cannot_build", "unsupported"])
def test_a_backend_that_cannot_says_why(plan: Plan, store: EngineStore, backend: NullBackend, what: str) -> None:
    setattr(backend, what, "there is no compiler")
    with pytest.raises(BackendUnavailable, match="Tiny 64×64 batch 1 cannot be built here: there is no compiler"):
        build(plan, store)
    assert not store.root.exists()


def test_a_full_disk_is_noticed_before_work_begins(
    plan: Plan, store: EngineStore, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 100 * 2**20))
        with pytest.raises(StoreError, match=r"needs about 512 MB in .*, 100 MB are free.*SLIPSTREAM_HOME"):
            build(plan, store)
    assert worker.builds == 0 and left_over(store) == []
    assert build(plan, store), "the next try works"


def test_a_cancelled_build_does_not_begin(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    cancel = CancelToken()
    cancel.cancel("ComfyUI is closing")
    with pytest.raises(BuildCancelled, match="ComfyUI is closing"):
        build(plan, store, cancel)
    assert worker.builds == 0 and left_over(store) == []


def test_a_model_is_traced_only_while_it_may_run(
    plan: Plan, store: EngineStore, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing switches flags of all torch: never while a sampling run is active."""
    may_run, traced = threading.Event(), threading.Event()
    export = plan.backend.export
    monkeypatch.setattr(plan.backend, "export", lambda *args: traced.set() or export(*args))
    thread = threading.Thread(
        target=build_engine, args=(plan, store, ignore_progress, CancelToken(), may_run.is_set), daemon=True
    )
    thread.start()
    assert not traced.wait(0.5)
    assert export_lock.acquire(timeout=5), "a run may begin meanwhile"
    export_lock.release()
    may_run.set()
    thread.join(30)
    assert traced.is_set() and store.lookup(plan.key.digest)


def test_a_build_that_may_not_trace_can_be_cancelled(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    cancel = CancelToken()
    threading.Timer(0.3, cancel.cancel).start()
    with pytest.raises(BuildCancelled):
        build_engine(plan, store, ignore_progress, cancel, lambda: False)


def test_the_lock_is_held_while_a_model_is_traced(
    plan: Plan, store: EngineStore, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    export = plan.backend.export
    monkeypatch.setattr(plan.backend, "export", lambda *args: held.append(export_lock.locked()) or export(*args))
    worker.gate.clear()
    thread = threading.Thread(target=build, args=(plan, store), daemon=True)
    thread.start()
    assert worker.started.wait(30)
    wait_until(lambda: not export_lock.locked())  # compiling needs it no more
    worker.gate.set()
    thread.join(30)
    assert held == [True]


def test_earlier_builds_tell_how_long_one_takes(
    plan: Plan, store: EngineStore, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected_seconds(store, plan, 100) is None
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(build_module.time, "monotonic", lambda: next(clock))
    build(plan, store)
    found = expected_seconds(store, make_plan(16, plan.backend), 6)
    monkeypatch.undo()
    assert found == pytest.approx(2 * build_seconds(store))
    assert expected_seconds(store, plan, 0) is None


def build_seconds(store: EngineStore) -> float:
    (entry,) = store.list()
    return entry.manifest.build.phases["compile"]
