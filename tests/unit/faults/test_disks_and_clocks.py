"""Clocks that jump, disks without locks, and files that change under their names: nothing breaks."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from slipstream.core.errors import CorruptEngine, StoreError
from slipstream.engine_cache import EngineStore, Entry, WeightsMemo, file_identity
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.tests.fakes import FIRST_USE, MANUAL, FakeSource, FakeWorker, NullBackend, ask, make_inputs, run_once

Put = Callable[..., Entry]
CALL = CallShape.of(make_inputs())
YEAR = 365 * 24 * 3600.0


@pytest.fixture(params=[-20 * YEAR, 20 * YEAR], ids=["back", "forward"])
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the wall clock jump by twenty years, for this process and for the files that it touches."""

    def run() -> None:
        now, touch = time.time, Path.touch
        monkeypatch.setattr(time, "time", lambda: now() + request.param)

        def touched(path: Path, *arguments: Any, **named: Any) -> None:
            touch(path, *arguments, **named)
            os.utime(path, (now() + request.param,) * 2)

        monkeypatch.setattr(Path, "touch", touched)

    return run


def test_a_clock_that_jumps_costs_no_engine_in_use(store: EngineStore, put: Put, jump: Callable[[], None]) -> None:
    entry = put()
    with entry.hold():
        jump()
        store.touch(entry)
        store.prune(limit_bytes=0, older_than=timedelta(days=30))
        assert store.lookup(entry.digest) is not None
    assert store.prune(limit_bytes=0) == [entry.digest]


def test_a_clock_that_jumps_costs_no_engine_that_was_just_stored(
    tmp_path: Path, put: Put, jump: Callable[[], None]
) -> None:
    small = EngineStore(tmp_path / "small", limit_bytes=5000)
    first = put(64, into=small)
    jump()
    small.touch(first)  # after a jump forward, it seems to be used later than what is stored next
    newest = put(72, into=small)
    assert [entry.digest for entry in small.list()] == [newest.digest]


def test_a_clock_that_jumps_costs_no_build_under_way(store: EngineStore, jump: Callable[[], None]) -> None:
    with store.scratch("build") as folder:
        (folder / "half").write_text("x")
        jump()
        assert store.clean() == 0 and (folder / "half").exists()


@pytest.fixture(params=[NotImplementedError(), OSError(errno.ENOLCK, "No locks"), OSError(errno.EOPNOTSUPP, "none")])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the disk know no locks from now on, as some network file systems."""

    def run() -> None:
        def refuse(*_: object, **__: object) -> None:
            raise request.param

        monkeypatch.setattr(FileLock, "acquire", refuse)

    return run


def test_a_store_without_locks_is_read(store: EngineStore, put: Put, no_locks: Callable[[], None]) -> None:
    entry = put()
    no_locks()
    found = EngineStore(store.root).lookup(entry.digest)
    assert found is not None
    with found.hold():
        found.verify_files()
    assert not store.is_used(entry.digest)


def test_a_store_without_locks_serves_pictures_and_says_why_nothing_is_built(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, no_locks: Callable[[], None]
) -> None:
    provider.make(source, CALL, MANUAL, HostHooks())
    no_locks()
    assert run_once(EngineProvider(EngineStore(provider.store.root), provider.backends), source).engine is not None
    larger = CallShape.of(make_inputs(16))
    offer = ask(provider, source, FIRST_USE, larger)
    assert offer.engine is None and "without file locks" in offer.reason and "SLIPSTREAM_HOME" in offer.reason
    assert worker.builds == 1


def test_a_store_without_locks_can_be_a_base(
    tmp_path: Path, store: EngineStore, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, acquire = put(), FileLock.acquire

    def refuse(lock: FileLock, *arguments: Any, **named: Any) -> Any:
        if Path(lock.lock_file).is_relative_to(store.root):
            raise OSError(errno.ENOLCK, "No locks")
        return acquire(lock, *arguments, **named)

    monkeypatch.setattr(FileLock, "acquire", refuse)
    upper = EngineStore(tmp_path / "upper", bases=[store.root])
    assert upper.lookup(entry.digest) is not None and put(72, into=upper)
    with pytest.raises(StoreError, match="SLIPSTREAM_BASE"):
        put(72)


def test_a_model_file_that_was_replaced_under_its_name_is_read_anew(tmp_path: Path) -> None:
    memo, model, other = WeightsMemo(tmp_path / "store"), tmp_path / "model.safetensors", tmp_path / "other"
    for path, content in ((model, b"a" * 100), (other, b"b" * 100)):
        path.write_bytes(content)
        os.utime(path, (time.time() - 100,) * 2)
    seen = file_identity(model)
    assert memo.put(model, "1" * 64, seen) and memo.get(model) == "1" * 64
    os.utime(other, ns=(seen[1], seen[1]))
    os.replace(other, model)
    assert memo.get(model) is None, "the digest of a file that is gone"
    assert not memo.put(model, "2" * 64, seen), "what was read from the old file is not kept for the new one"


def test_an_engine_of_another_torch_is_not_used(provider: EngineProvider, source: FakeSource, caplog: Any) -> None:
    """torch is updated under a store: its engines stay, others are built, and the log says why."""
    made = provider.make(source, CALL, MANUAL, HostHooks())

    class Updated(NullBackend):
        def environment(self, device: Any) -> Any:
            return replace(super().environment(device), torch="99.0")

    after = EngineProvider(EngineStore(provider.store.root), [Updated()])
    with caplog.at_level("INFO", "slipstream"):
        offer = ask(after, source, MANUAL)
    assert offer.engine is None and "99.0" in caplog.text
    assert provider.store.lookup(made.entry.digest) is not None


def test_an_engine_of_another_comfyui_is_not_used(provider: EngineProvider, source: FakeSource) -> None:
    """A host whose model code changed has another architecture digest, and so another key."""
    provider.make(source, CALL, MANUAL, HostHooks())
    source.architecture = replace(source.architecture, digest="f" * 64)
    assert ask(EngineProvider(EngineStore(provider.store.root), provider.backends), source, MANUAL).engine is None


@pytest.fixture
def layered(provider: EngineProvider, source: FakeSource, tmp_path: Path) -> EngineProvider:
    """A process whose store is empty but for a base, in which another one has built an engine."""
    provider.make(source, CALL, MANUAL, HostHooks())
    upper = EngineStore(tmp_path / "upper", bases=[provider.store.root])
    return EngineProvider(upper, provider.backends)


def test_a_base_that_goes_away_while_its_engine_runs(
    layered: EngineProvider, provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    """A volume is unmounted: what is loaded computes on, and whoever needs it anew builds it."""
    running = ask(layered, source, MANUAL)
    assert running.engine is not None
    (entry,) = layered.store.list()
    provider.store.root.rename(provider.store.root.with_name("unmounted"))
    assert layered.store.lookup(entry.digest) is None and layered.store.list() == []
    with pytest.raises(StoreError, match="was removed from the store meanwhile"):
        entry.hold()
    layered.pool.give_back(running.engine)
    assert ask(layered, source, MANUAL).engine is None, "nothing is built here unless asked for"
    assert run_once(layered, source, FIRST_USE).engine is not None and worker.builds == 2
    provider.store.root.with_name("unmounted").rename(provider.store.root)
    assert [entry.is_in_base for entry in layered.store.list()] == [False]


def test_a_base_whose_engine_is_exchanged_under_a_running_process(
    layered: EngineProvider, provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    """An image's folder is updated in place: the new build is checked anew, and a file of neither build is refused."""
    assert run_once(layered, source, MANUAL).engine is not None
    (before,) = layered.store.list()
    provider.store.delete(before.digest, force=True)
    provider.make(source, CALL, MANUAL, HostHooks())
    (after,) = layered.store.list()
    assert after.is_in_base and worker.builds == 2
    after.verify_files()
    name = next(iter(after.manifest.files))
    content = after.path(name).read_bytes()
    after.path(name).write_bytes(bytes(len(content)))
    with pytest.raises(CorruptEngine, match="another content"):
        after.verify_files()
    assert layered.store.lookup(after.digest) is None, "it is passed over from now on"
    assert run_once(layered, source, FIRST_USE).engine is not None and worker.builds == 3
