"""Loaded engines have one owner at a time, and the store knows which are loaded."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import CorruptEngine, EngineInUse, IncompatibleEngine, StoreError
from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.engine_cache import EngineStore, Entry
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.loaded import freed_memory
from slipstream.runtime.loaded.canary import CAPTURE, Canary
from slipstream.runtime.loaded.engine_pool import EnginePool, LoadedEngine
from slipstream.runtime.planning.plan import Plan
from slipstream.tests.fakes import CPU, FakeWorker, NullBackend, make_plan
from slipstream.tests.unit.runtime.doomed import Doomed

Take = Callable[[int], LoadedEngine]


@pytest.fixture
def pool() -> EnginePool:
    return EnginePool(keep=2)


@pytest.fixture
def build(store: EngineStore, backend: NullBackend, worker: FakeWorker) -> Callable[[int], tuple[Plan, Entry]]:
    def build(size: int) -> tuple[Plan, Entry]:
        plan = make_plan(size, backend)
        return plan, build_engine(plan, store, ignore_progress, CancelToken())

    return build


@pytest.fixture
def take(pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]]) -> Take:
    """Takes the engine for a size, built where it has not been."""

    def take(size: int) -> LoadedEngine:
        return pool.take(*build(size), CPU)

    return take


def test_an_idle_engine_is_used_again(pool: EnginePool, take: Take, backend: NullBackend) -> None:
    first = take(8)
    pool.give_back(first)
    assert take(8) is first
    assert len(backend.engines) == 1


def test_an_engine_in_use_is_not_shared(take: Take) -> None:
    first, second = take(8), take(8)
    assert first is not second and first.engine is not second.engine


def test_an_idle_engine_makes_way_for_a_deletion(pool: EnginePool, take: Take, store: EngineStore) -> None:
    deleted, other, used = take(8), take(16), take(8)
    for loaded in (deleted, other):
        pool.give_back(loaded)
    pool.close_idle(deleted.entry.digest)
    assert [loaded.engine.closed for loaded in (deleted, other, used)] == [True, False, False]
    with pytest.raises(EngineInUse):
        store.delete(used.entry.digest)
    pool.give_back(used)
    pool.close_idle(used.entry.digest)
    assert store.delete(used.entry.digest)


def test_an_engine_serves_only_its_shapes(pool: EnginePool, take: Take) -> None:
    first = take(8)
    pool.give_back(first)
    assert take(16) is not first


def test_an_engine_serves_only_its_device(pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]]) -> None:
    plan, entry = build(8)
    first = pool.take(plan, entry, CPU)
    pool.give_back(first)
    assert pool.take(plan, entry, torch.device("cuda", 1)) is not first


def test_an_idle_engine_holds_no_weights(pool: EnginePool, take: Take) -> None:
    loaded = take(8)
    loaded.engine.update_weights({"scale": torch.ones(4, 1, 1)})
    pool.give_back(loaded)
    assert loaded.engine.weights == {} and not loaded.engine.closed


def test_the_least_recently_used_is_closed(pool: EnginePool, take: Take) -> None:
    first, second, third = take(8), take(16), take(24)
    for loaded in (first, second):
        pool.give_back(loaded)
    pool.give_back(take(8))
    pool.give_back(third)
    assert [loaded.engine.closed for loaded in (first, second, third)] == [False, True, False]


def test_an_engine_in_use_cannot_be_deleted(take: Take, store: EngineStore) -> None:
    loaded = take(8)
    with pytest.raises(StoreError, match="in use"):
        store.delete(loaded.entry.digest)


def test_an_idle_engine_can_be_deleted_and_is_closed_then(pool: EnginePool, take: Take, store: EngineStore) -> None:
    first, second = take(8), take(16)
    pool.give_back(first)
    assert store.delete(first.entry.digest)
    pool.give_back(second)
    assert first.engine.closed and not second.engine.closed


def test_an_engine_that_is_used_again_is_held_again(pool: EnginePool, take: Take, store: EngineStore) -> None:
    pool.give_back(take(8))
    loaded = take(8)
    with pytest.raises(StoreError, match="in use"):
        store.delete(loaded.entry.digest)
    pool.give_back(loaded)
    assert store.delete(loaded.entry.digest)


def test_an_idle_engine_without_files_is_not_used(
    pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]], store: EngineStore
) -> None:
    plan, entry = build(8)
    loaded = pool.take(plan, entry, CPU)
    pool.give_back(loaded)
    store.delete(entry.digest)
    with pytest.raises(StoreError):
        pool.take(plan, entry, CPU)
    assert loaded.engine.closed and not pool.in_use(CPU)


def test_an_engine_that_cannot_let_go_is_closed(
    pool: EnginePool, take: Take, monkeypatch: pytest.MonkeyPatch, store: EngineStore
) -> None:
    loaded = take(8)
    loaded.engine.device_bytes = 5

    def fail() -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(loaded.engine, "release_weights", fail)
    with pytest.raises(RuntimeError, match="driver"):
        pool.give_back(loaded)
    assert loaded.engine.closed and pool.device_bytes(CPU) == 0 and store.delete(loaded.entry.digest)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork here")
def test_an_engine_that_was_loaded_with_care_is_closed_when_that_is_over(
    store: EngineStore, build: Callable[[int], tuple[Plan, Entry]]
) -> None:
    plan, entry = build(8)
    canary = Canary(store.marks, dict)
    pool = EnginePool(canary=canary)
    Doomed(store.marks, entry.digest, CAPTURE, True, {}).end()
    careful = pool.take(plan, entry, CPU)
    pool.give_back(careful)
    assert pool.take(plan, entry, CPU) is careful and not careful.canary.allows_graphs
    told: list[torch.device] = []
    pool.on_change = told.append
    canary.forget(entry.digest)
    pool.give_back(careful)
    assert careful.engine.closed and told == [CPU]
    free = pool.take(plan, entry, CPU)
    assert free is not careful and free.canary.allows_graphs
    pool.give_back(free)
    assert pool.take(plan, entry, CPU) is free


# ------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def three(pool: EnginePool, take: Take) -> list[LoadedEngine]:
    """Engines of 1, 10 and 100 bytes, in use."""
    pool._keep = 8
    engines = [take(size) for size in (8, 16, 24)]
    for power, loaded in enumerate(engines):
        loaded.engine.device_bytes = 10**power
    return engines


def closed(engines: list[LoadedEngine]) -> list[bool]:
    return [loaded.engine.closed for loaded in engines]


def test_it_knows_what_engines_hold(pool: EnginePool, three: list[LoadedEngine]) -> None:
    pool.give_back(three[0])
    assert pool.device_bytes(CPU) == 111 and pool.device_bytes(torch.device("cuda", 0)) == 0
    pool.discard(three[2])
    assert pool.device_bytes(CPU) == 11 and three[2].engine.closed


def test_what_is_in_use_is_not_freed(pool: EnginePool, three: list[LoadedEngine]) -> None:
    pool.give_back(three[1])
    assert pool.free(CPU, float("inf")) == 10
    assert closed(three) == [False, True, False] and pool.device_bytes(CPU) == 101 and pool.in_use(CPU)


def test_no_more_is_freed_than_asked_for(pool: EnginePool, three: list[LoadedEngine]) -> None:
    for loaded in (three[1], three[0], three[2]):
        pool.give_back(loaded)
    assert pool.free(CPU, 0) == 0 and pool.free(CPU, 10) == 10
    assert closed(three) == [False, True, False]
    assert pool.free(CPU, 2) == 101, "the small one was used longer ago than the large one"


def test_engines_without_memory_stay(pool: EnginePool, three: list[LoadedEngine]) -> None:
    three[0].engine.device_bytes = 0
    for loaded in three:
        pool.give_back(loaded)
    assert pool.free(CPU, float("inf")) == 110 and closed(three) == [False, True, True]


def test_another_devices_engines_stay(pool: EnginePool, three: list[LoadedEngine]) -> None:
    pool.give_back(three[0])
    assert pool.free(torch.device("cuda", 0), float("inf")) == 0 and not three[0].engine.closed


def test_a_freed_engine_is_loaded_again(pool: EnginePool, three: list[LoadedEngine], take: Take) -> None:
    pool.give_back(three[0])
    pool.free(CPU, 1)
    again = take(8)
    assert again is not three[0] and not again.engine.closed


@pytest.mark.skipif(sys.platform != "linux", reason="no system to tell how much memory the process has")
def test_memory_between_blocks_that_stay_goes_back_to_the_system(pool: EnginePool, take: Take) -> None:
    loaded = [take(8), take(16)]
    blocks = [bytearray(64 << 10) for _ in range(4000)]  # 250 MB, too small each for memory of their own
    staying = blocks[::40]
    blocks.clear()
    before = resident_mb()
    pool.give_back(loaded[0])
    assert before - resident_mb() > 150 and len(staying) == 100


def test_memory_goes_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed, now = [], [100.0]
    monkeypatch.setattr(freed_memory, "_trim", lambda: trimmed.append)
    monkeypatch.setattr(freed_memory.time, "monotonic", lambda: now[0])
    freed = freed_memory.FreedMemory()
    for now[0] in (100.0, 101.0, 109.0, 110.5, 111.0):
        freed.give_back(CPU)
        freed.give_back(torch.device("cuda"))
    assert trimmed == [0, 0], "it costs some milliseconds each time"


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def test_changes_of_size_are_told(pool: EnginePool, take: Take) -> None:
    told: list[int] = []
    pool.on_change = lambda device: told.append(pool.device_bytes(device))
    loaded = take(8)
    loaded.engine.device_bytes = 7
    pool.give_back(loaded)
    pool.free(CPU, 1)
    assert told == [0, 7, 0]
    told.clear()
    pool.discard(take(8))
    pool.give_back(take(8))
    pool.clear()
    assert len(told) == 5


def test_what_cannot_be_loaded_is_not_held(take: Take, store: EngineStore, backend: NullBackend) -> None:
    backend.load_error = IncompatibleEngine("another libstdc++")
    with pytest.raises(IncompatibleEngine):
        take(8)
    (entry,) = store.list()
    assert store.delete(entry.digest)


def test_a_changed_file_is_never_loaded(
    pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]], store: EngineStore, backend: NullBackend
) -> None:
    plan, entry = build(8)
    entry.path("engine.txt").write_text("lulu")  # as long as before
    with pytest.raises(CorruptEngine, match="has another content"):
        pool.take(plan, entry, CPU)
    assert backend.engines == [] and store.list() == []


def test_an_engine_built_anew_replaces_the_loaded_one(
    pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]], store: EngineStore, backend: NullBackend
) -> None:
    """Somebody deleted a bad engine and built it again: the bad one must not come back from memory."""
    plan, entry = build(8)
    old = pool.take(plan, entry, CPU)
    pool.give_back(old)
    store.delete(entry.digest, force=True)
    backend.content = "better"
    assert pool.take(*build(8), CPU) is not old


def test_a_reused_engine_knows_what_the_store_knows_now(
    pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]], store: EngineStore
) -> None:
    plan, entry = build(8)
    pool.give_back(pool.take(plan, entry, CPU))
    newer = store.lookup(entry.digest)
    assert newer is not None and pool.take(plan, newer, CPU).entry is newer


def test_threads_never_get_the_same_engine(pool: EnginePool, build: Callable[[int], tuple[Plan, Entry]]) -> None:
    plan, entry = build(8)
    owned: set[int] = set()
    shared: list[int] = []
    lock = threading.Lock()

    def use() -> None:
        for _ in range(50):
            loaded = pool.take(plan, entry, CPU)
            with lock:
                shared.extend({id(loaded)} & owned)
                owned.add(id(loaded))
            with lock:
                owned.discard(id(loaded))
            pool.give_back(loaded)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared == []
