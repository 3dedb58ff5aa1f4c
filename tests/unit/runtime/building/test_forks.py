"""Build processes that another one forks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.core.programs import TooLong, kill_group
from slipstream.runtime.building import fork_server
from slipstream.runtime.building.forks import ARE_POSSIBLE, Forked, Forks
from slipstream.runtime.building.worker_pool import WorkerPool
from slipstream.runtime.building.worker_start import ROOT, environment_of_many
from slipstream.tests.fakes import wait_until

pytestmark = pytest.mark.skipif(not ARE_POSSIBLE, reason="processes are forked on Linux alone")


VARIABLES = environment_of_many()


@pytest.fixture(scope="module")
def kept() -> Iterator[Forks]:
    """One for tests that leave it as it is."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


def forked(forks: Forks) -> Forked:
    process = forks.fork(VARIABLES)
    assert process is not None
    return process


def with_library(folder: Path, code: str) -> dict[str, str]:
    """The variables with which builds import this in the place of a library."""
    (folder / "einops.py").write_text(code)
    return {**VARIABLES, "PYTHONPATH": str(folder)}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_there(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


def say(process: Forked, folder: Path) -> list[str]:
    """Its answer to a job that is not there."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"folder": str(folder), "environment": {}}).encode() + b"\n")
    process.stdin.flush()
    lines = []
    while "done" not in (line := json.loads(process.stdout.readline())):
        lines.append(line["phase"])
    return [*lines, line["done"]]


def test_it_serves_jobs_and_begins_at_once(kept: Forks, tmp_path: Path) -> None:
    first = forked(kept)
    began = time.monotonic()
    second = forked(kept)
    assert time.monotonic() - began < 1, "nothing is imported again"
    assert parent_of(first.pid) == parent_of(second.pid) != os.getpid()
    assert os.getpgid(first.pid) == first.pid != os.getpgid(second.pid)
    assert say(first, tmp_path) == ["start", 1] == say(second, tmp_path)
    assert first.poll() is None and "job.json" in (tmp_path / "worker.log").read_text()
    modules = Path(f"/proc/{first.pid}/maps").read_text()
    assert "libtorch" in modules


def test_the_end_of_one_is_told_with_its_code(kept: Forks) -> None:
    killed, other = forked(kept), forked(kept)
    with pytest.raises(TooLong):
        killed.wait(0.1)
    kill_group(killed)
    assert killed.returncode == -signal.SIGKILL and not is_there(killed.pid)
    assert other.poll() is None and is_there(other.pid)
    assert other.stdin is not None
    other.stdin.close()  # as when the host is gone
    assert other.wait(20) == -signal.SIGKILL  # with all that it started


def test_what_was_forked_goes_on_where_the_other_was_killed(forks: Forks, tmp_path: Path) -> None:
    first = forked(forks)
    server = parent_of(first.pid)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: forks._server is None, 10)
    assert not Path(f"/proc/{server}").exists(), "no zombie is left"
    assert first.poll() is None and say(first, tmp_path) == ["start", 1]
    second = forked(forks)
    assert parent_of(second.pid) not in (server, os.getpid())
    kill_group(first)
    assert first.returncode == -signal.SIGKILL and second.poll() is None


def test_the_end_of_one_is_seen_where_the_other_holds_still(forks: Forks) -> None:
    process = forked(forks)
    server = parent_of(process.pid)
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    kill_group(process)
    assert process.returncode == -signal.SIGKILL and time.monotonic() - began < 10
    forks.close()
    wait_until(lambda: not is_there(server), 10)


def test_timeouts_of_others_are_not_its_own(kept: Forks) -> None:
    socket.setdefaulttimeout(0.001)
    try:
        process = forked(kept)
        began = time.monotonic()
        assert process.poll() is None and time.monotonic() - began < 1
        kill_group(process)
    finally:
        socket.setdefaulttimeout(None)


def test_a_fork_that_fails_costs_no_other_build(forks: Forks, tmp_path: Path) -> None:
    variables = with_library(
        tmp_path,
        "import errno, os\n"
        "fork, calls = os.fork, []\n"
        "def failing():\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"  # the first looks whether it is fit
        "        raise BlockingIOError(errno.EAGAIN, 'too many processes')\n"
        "    return fork()\n"
        "os.fork = failing\n",
    )
    first = forks.fork(variables)
    assert first is not None and forks.fork(variables) is None
    third = forks.fork(variables)
    assert third is not None and first.poll() is third.poll() is None
    for process in (first, third):
        kill_group(process)


def test_it_ends_with_the_host(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from slipstream.runtime.building.forks import Forks\n"
        "from slipstream.runtime.building.worker_start import environment_of_many\n"
        "forks = Forks()\n"
        "process = forks.fork(environment_of_many())\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    path = tmp_path / "host.py"
    path.write_text(f"import runpy\nrunpy.run_path({str(ROOT / '__main__.py')!r})['register']()\n{code}")
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        server = parent_of(pid)
        host.kill()
    wait_until_gone(pid)
    wait_until_gone(server)


def test_libraries_that_run_threads_forbid_it(forks: Forks, tmp_path: Path) -> None:
    variables = with_library(
        tmp_path, "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    forks.warm(variables)
    server = forks._server
    assert server is not None
    wait_until(lambda: forks.code_of(0) is None and forks._server is None, 30)
    assert server.poll() is not None
    began = time.monotonic()
    assert forks.fork(variables) is None and forks.fork(VARIABLES) is None
    assert time.monotonic() - began < 1, "it is not tried again"


def test_libraries_hear_from_the_host_whether_there_is_a_gpu(forks: Forks, tmp_path: Path) -> None:
    """To ask the driver would start threads of its own."""
    variables = with_library(
        tmp_path,
        "import os, torch\n"
        "def ask(): raise RuntimeError('the driver was asked')\n"
        "torch._C._cuda_getDeviceCount = ask\n"
        "open(os.environ['TOLD'], 'w').write(str(torch.cuda.is_available()))\n",
    )
    told = tmp_path / "told"
    assert forks.fork({**variables, "TOLD": str(told)}) is not None
    assert told.read_text() == str(torch.cuda.is_available())


def test_other_variables_need_another_one_to_fork(forks: Forks) -> None:
    first = forked(forks)
    second = forks.fork({**VARIABLES, "OTHER": "1"})
    assert second is not None and b"OTHER=1" in Path(f"/proc/{second.pid}/environ").read_bytes().split(b"\0")
    assert first.poll() is None, "it goes on"
    for number in range(3):  # an extension that never stops changing them
        last = forks.fork({**VARIABLES, "OTHER": f"again {number}"})
        if last is not None:
            kill_group(last)
    assert last is None and forks._server is None
    for process in (first, second):
        kill_group(process)


def test_it_stays_for_the_next_build(kept: Forks) -> None:
    first = forked(kept)
    server = parent_of(first.pid)
    kill_group(first)
    time.sleep(1)
    began = time.monotonic()
    second = forked(kept)
    assert parent_of(second.pid) == server and time.monotonic() - began < 1
    kill_group(second)


def test_a_pool_starts_processes_one_by_one_where_none_can_be_forked(tmp_path: Path) -> None:
    pool = WorkerPool()
    pool._forks._failures = 3
    turn = pool.take(tmp_path, {})
    assert [*turn.stdout] and parent_of(turn.pid) == os.getpid()
    kill_group(turn.process)
    pool.close()


def test_a_pool_that_is_warm_has_imported_before_the_first_job(tmp_path: Path) -> None:
    pool = WorkerPool()
    pool.warm()
    server = pool._forks._server
    assert server is not None
    pool.warm()
    assert pool._forks._server is server
    turn = pool.take(tmp_path, {})
    assert [*turn.stdout] and parent_of(turn.pid) == server.pid
    kill_group(turn.process)
    pool.close()
    assert server.poll() is not None


def test_it_ends_when_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0.05)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        assert not fork_server._fork_as_told(its)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_copy_of_the_host_leaves_its_processes_alone(tmp_path: Path) -> None:
    """Which another node forks, and which ends as any Python does."""
    pool = WorkerPool()
    turn = pool.take(tmp_path, {})
    assert [*turn.stdout]
    if (copy := os.fork()) == 0:
        pool.close()
        os._exit(0)
    os.waitpid(copy, 0)
    assert turn.process.poll() is None and pool._forks._server is not None
    kill_group(turn.process)
    pool.close()
