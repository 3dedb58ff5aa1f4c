"""Of many machines, one builds an engine; a machine that dies loses its turn."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.engine_cache.travel import lease as lease_module
from slipstream.engine_cache.travel.lease import Lease
from slipstream.engine_cache.travel.remote_store import RemoteStore

DIGEST = "a" * 64


@pytest.fixture(params=["folder", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteStore:
    if request.param == "folder":
        return RemoteStore(str(tmp_path / "remote"))
    bucket: Callable[..., RemoteStore] = request.getfixturevalue("bucket")
    return bucket()


def taken_at_once(takers: list[Lease]) -> list[bool]:
    """What each of them gets, in threads of their own."""
    taken: list[bool] = []
    threads = [threading.Thread(target=lambda taker=taker: taken.append(taker.try_take())) for taker in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return taken


def taken_within(seconds: float, lease: Lease) -> bool:
    """Whether it can be taken, asked for again and again."""
    deadline = time.monotonic() + seconds
    while not (taken := lease.try_take()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return taken


def test_one_of_many_gets_it(remote: RemoteStore) -> None:
    assert sorted(taken_at_once([Lease(remote, DIGEST) for _ in range(8)])) == [False] * 7 + [True]


def test_it_is_free_again_after_use_and_for_other_engines_all_along(remote: RemoteStore) -> None:
    first, second = Lease(remote, DIGEST), Lease(remote, DIGEST)
    assert first.try_take() and not second.try_take() and Lease(remote, "b" * 64).try_take()
    with first.kept():
        assert not second.try_take()
    assert second.try_take()


def test_a_dead_holder_loses_it_and_a_living_one_does_not(remote: RemoteStore) -> None:
    dead, living, other = Lease(remote, DIGEST, 1.0), Lease(remote, "b" * 64, 1.0), Lease(remote, DIGEST, 1.0)
    assert dead.try_take() and living.try_take()
    asking = Lease(remote, "b" * 64, 1.0)
    with living.kept():
        assert not taken_within(2.5, asking)
    assert taken_within(20, other)


def test_clocks_that_jump_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteStore(str(tmp_path / "remote"))
    holder, other = Lease(remote, DIGEST, 30), Lease(remote, DIGEST, 30)
    assert holder.try_take() and not other.try_take()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not other.try_take()
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert not other.try_take()


def test_an_answer_that_was_lost(remote: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was created, and the second attempt finds it there."""
    create = RemoteStore.create_small

    def twice(self: RemoteStore, name: str, content: bytes) -> bool:
        create(self, name, content)
        return create(self, name, content)

    monkeypatch.setattr(RemoteStore, "create_small", twice)
    assert Lease(remote, DIGEST).try_take() and not Lease(remote, DIGEST).try_take()


_HOLDER = """
from slipstream.engine_cache.travel.lease import Lease
from slipstream.engine_cache.travel.remote_store import RemoteStore
lease = Lease(RemoteStore(sys.argv[1]), "a" * 64, 0.5)
assert lease.try_take()
with lease.kept():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_machine_gives_way(tmp_path: Path, python: Callable[..., subprocess.Popen[str]]) -> None:
    holder = python(_HOLDER, tmp_path / "remote")
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    lease = Lease(RemoteStore(str(tmp_path / "remote")), DIGEST, 0.5)
    assert not taken_within(1.2, lease), "a living machine lost it"
    holder.kill()
    assert taken_within(20, lease)
    assert lease_module.LEASE_SECONDS >= 30
