"""Loaded engines have one owner at a time, and the store knows which are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from slipstream.core.errors import CorruptEngine, IncompatibleEngine, StoreError
from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.engine_cache import EngineStore, Entry
from slipstream.runtime.build import build_engine
from slipstream.runtime.plan import Plan
from slipstream.runtime.pool import EnginePool, LoadedEngine
from slipstream.tests.fakes import CPU, FakeWorker, NullBackend, make_plan

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


def test_a_loaded_engine_cannot_be_deleted(pool: EnginePool, take: Take, store: EngineStore) -> None:
    loaded = take(8)
    digest = loaded.entry.digest
    with pytest.raises(StoreError, match="in use"):
        store.delete(digest)
    pool.give_back(loaded)
    with pytest.raises(StoreError, match="in use"):
        store.delete(digest)
    pool.clear()
    assert loaded.engine.closed and store.delete(digest)


def test_a_closed_engine_can_be_deleted(pool: EnginePool, take: Take, store: EngineStore) -> None:
    engines = [take(size) for size in (8, 16, 24)]
    for loaded in engines:
        pool.give_back(loaded)
    assert store.delete(engines[0].entry.digest)
    with pytest.raises(StoreError, match="in use"):
        store.delete(engines[1].entry.digest)


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
