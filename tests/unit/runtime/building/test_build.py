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
from slipstream.engine_cache import BuildHistory, EngineStore, Entry
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.planning.plan import Plan
from slipstream.tests.fakes import FakeWorker, NullBackend, make_plan


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
    [
        UnsupportedModel("it cannot be traced"),
        BuildFailed("g++ crashed"),
        BuildCancelled("stop"),
        BuildDied("killed"),
        OSError("?"),
        KeyboardInterrupt(),
    ],
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


def test_a_disk_that_fills_up_in_the_compiler_is_said_as_such(
    plan: Plan, store: EngineStore, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is tried again, unlike what a compiler cannot do."""
    usage = namedtuple("usage", "total used free")
    free = iter([10**12, 2**20])
    worker.error = BuildFailed("g++ ended with code -6")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, next(free)))
    with pytest.raises(StoreError, match="1 MB are free"):
        build(plan, store)


def test_a_cancelled_build_does_not_begin(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    cancel = CancelToken()
    cancel.cancel("ComfyUI is closing")
    with pytest.raises(BuildCancelled, match="ComfyUI is closing"):
        build(plan, store, cancel)
    assert worker.builds == 0 and left_over(store) == []


def test_a_build_is_timed_and_remembered(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    worker.seconds = 12.0
    record = build(plan, store).manifest.build
    assert record.phases == {"export": 4.0, "compile": 8.0} and record.seconds == 12.0
    (past,) = BuildHistory(store.root).builds()
    assert (past.seconds, past.operations, past.backend) == (12.0, 3, plan.backend.name)
    build(plan, store)  # found, not built
    assert len(BuildHistory(store.root).builds()) == 1


def test_earlier_builds_pace_the_progress(plan: Plan, store: EngineStore, worker: FakeWorker) -> None:
    worker.seconds = 12.0
    build(plan, store)
    assert worker.expected(3) is None
    build(make_plan(16, plan.backend), store)
    assert worker.expected(3) == 12.0
