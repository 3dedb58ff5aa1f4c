"""A worker that is killed in any phase of a build leaves a clear error, nothing half, and the next build works."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable

import pytest

from slipstream.core.errors import BuildCancelled, BuildDied
from slipstream.core.progress import CancelToken, Progress, ignore_progress
from slipstream.engine_cache import EngineStore
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.building.fork_server import FORK
from slipstream.runtime.building.worker import SERVE
from slipstream.runtime.building.worker_pool import WorkerPool
from slipstream.tests.fakes import wait_until
from slipstream.tests.unit.runtime.building.test_whole_build import left_over, make_plan
from slipstream.tests.unit.runtime.processes import Process, in_session, processes, workers_in

pytestmark = [
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]


def killer(find: Callable[[], list[Process]], phase: str, killed: list[int]) -> Callable[[Progress], None]:
    """Progress that kills the workers that `find` gives as soon as one is in `phase`."""

    def progress(update: Progress) -> None:
        if update.phase == phase and not killed:
            for worker in find():
                killed.append(worker.session)
                os.kill(worker.pid, signal.SIGKILL)

    return progress


def serving() -> list[Process]:
    """Workers of this process that take several jobs, as those of blocks do."""
    found = processes()
    forking = [each.pid for each in found if each.parent == os.getpid() and f" worker {FORK}" in each.command]
    own = [each for each in found if each.parent == os.getpid() and f" worker {SERVE}" in each.command]
    return own + [each for each in found if each.parent in forking]


@pytest.mark.parametrize("phase", ["start", "export"])
def test_a_worker_that_is_killed(phase: str, store: EngineStore) -> None:
    """In the compiler: `test_whole_build.py`."""
    plan, killed = make_plan(), list[int]()
    with pytest.raises(BuildDied, match="killed from outside"):
        build_engine(plan, store, killer(lambda: workers_in(store.root), phase, killed), CancelToken())
    assert killed and left_over(store) == [] and store.digests() == []
    wait_until(lambda: in_session(killed[0]) == [], 5)  # a compiler ends a moment after it was killed


def test_a_worker_of_several_jobs_that_is_killed(store: EngineStore) -> None:
    """It is not kept: the next job begins in a new process."""
    plan, killed, pool = make_plan(), list[int](), WorkerPool()
    with pytest.raises(BuildDied, match="killed from outside"):
        build_engine(plan, store, killer(serving, "compile", killed), CancelToken(), workers=pool)
    assert len(killed) == 1 and left_over(store) == [] and store.digests() == []
    wait_until(lambda: in_session(killed[0]) == [], 5)  # a compiler ends a moment after it was killed
    again, cancel = list[int](), CancelToken()

    def stop(update: Progress) -> None:
        if update.phase == "compile":
            again.extend(each.session for each in serving())
            cancel.cancel()

    with pytest.raises(BuildCancelled):
        build_engine(plan, store, stop, cancel, workers=pool)
    assert again and again != killed and serving() == []


@pytest.mark.slow
def test_a_disk_that_fills_up_while_storing(store: EngineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.core.errors import StoreError
    from slipstream.engine_cache import store as store_module

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "copy_durably", full)
        with pytest.raises(StoreError, match="disk .* is full"):
            build_engine(make_plan(), store, ignore_progress, CancelToken())
    assert left_over(store) == [] and store.digests() == []
    assert build_engine(make_plan(), store, ignore_progress, CancelToken()).why_untrusted() is None
