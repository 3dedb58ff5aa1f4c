"""Build processes that take one job after another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.core.programs import kill_group
from slipstream.runtime.building import forks, worker_pool
from slipstream.runtime.building.worker import LOG, SERVE
from slipstream.runtime.building.worker_pool import WorkerPool
from slipstream.runtime.building.worker_start import ROOT

WORKER = """
import json, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["environment"].get("DIE"):
        sys.exit(0)
    print(json.dumps({"phase": job["folder"]}), flush=True)
    print(json.dumps({"done": int(job["environment"].get("CODE", 0))}), flush=True)
    if job["environment"].get("HANG"):
        time.sleep(300)
"""


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_process_takes_the_next_job_when_one_is_done() -> None:
    pool = WorkerPool(start)
    first = pool.take(Path("a"), {})
    assert [*first.stdout] == [b'{"phase": "a"}\n'] and first.poll() == 0
    assert pool.give_back(first)
    second = pool.take(Path("b"), {})
    assert second.pid == first.pid and [*second.stdout] == [b'{"phase": "b"}\n']
    assert pool.give_back(second)
    pool.close()
    assert second.process.returncode == 0


def test_without_forks_a_process_is_started_for_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on Windows."""
    asked: list[tuple[str, Path]] = []
    sockets = SimpleNamespace(AF_UNIX=1, SOCK_SEQPACKET=5, socketpair=lambda *_: asked.append(("fork", tmp_path)))

    def started(word: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        asked.append((word, folder))
        return start()

    monkeypatch.setattr(forks, "ARE_POSSIBLE", False)
    monkeypatch.setattr(forks, "socket", sockets)
    monkeypatch.setattr(worker_pool, "start_worker", started)
    pool = WorkerPool()
    pool.warm()
    assert not asked
    turn = pool.take(tmp_path, {})
    assert asked == [(SERVE, Path(ROOT.anchor))] and [*turn.stdout] and turn.poll() == 0
    assert pool.give_back(turn) and pool.take(tmp_path, {}).pid == turn.pid
    kill_group(turn.process)


def test_a_process_that_ends_in_the_midst_of_a_job_is_not_kept() -> None:
    pool = WorkerPool(start)
    turn = pool.take(Path("a"), {"DIE": "1"})
    turn.process.wait()
    assert [*turn.stdout] == [] and turn.poll() == 1  # an orderly end is none
    assert not pool.give_back(turn)
    other = pool.take(Path("b"), {})
    assert other.pid != turn.pid
    other.process.kill()
    other.process.wait()
    for process in (turn.process, other.process):
        process.stdin.close(), process.stdout.close()


def test_a_process_that_died_while_it_waited_is_replaced() -> None:
    pool = WorkerPool(start)
    first = pool.take(Path("a"), {})
    assert [*first.stdout] and pool.give_back(first)
    first.process.kill()
    first.process.wait()
    second = pool.take(Path("b"), {})
    assert second.pid != first.pid and [*second.stdout]
    assert pool.give_back(second)
    pool.close()
    first.process.stdout.close()


def test_a_process_whose_job_failed_is_not_kept() -> None:
    pool = WorkerPool(start)
    turn = pool.take(Path("a"), {"CODE": "1"})
    assert [*turn.stdout] and turn.poll() == 1
    assert not pool.give_back(turn)
    with turn.process:
        turn.process.kill()


def test_a_process_that_does_not_hear_of_the_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_PATIENCE_SECONDS", 0.1)
    pool = WorkerPool(start)
    turn = pool.take(Path("a"), {"HANG": "1"})
    assert [*turn.stdout] and pool.give_back(turn)
    began = time.monotonic()
    pool.close()
    assert turn.process.returncode not in (None, 0) and time.monotonic() - began < 10


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
def test_the_build_process_lets_go_of_a_jobs_folder(tmp_path: Path) -> None:
    pool = WorkerPool()
    turn = pool.take(tmp_path, {})  # there is no job in it
    assert [*turn.stdout] and turn.poll() == 1
    assert "job.json" in (tmp_path / LOG).read_text()
    open_files = [os.path.realpath(file) for file in Path(f"/proc/{turn.pid}/fd").iterdir()]
    assert not [file for file in open_files if file.startswith(str(tmp_path))]
    kill_group(turn.process)
    pool.close()
