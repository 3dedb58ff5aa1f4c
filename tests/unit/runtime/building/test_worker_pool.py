"""Build processes that take one job after another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slipstream.runtime.building.worker_pool import WorkerPool

WORKER = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["environment"].get("DIE"):
        sys.exit(0)
    print(json.dumps({"phase": job["folder"]}), flush=True)
    print(json.dumps({"done": 0}), flush=True)
"""


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_process_takes_the_next_job_when_one_is_done() -> None:
    pool = WorkerPool()
    first = pool.take(Path("a"), {}, start)
    assert [*first.stdout] == [b'{"phase": "a"}\n'] and first.poll() == 0
    assert pool.give_back(first)
    second = pool.take(Path("b"), {}, start)
    assert second.pid == first.pid and [*second.stdout] == [b'{"phase": "b"}\n']
    assert pool.give_back(second)
    pool.close()
    assert second.process.returncode == 0


def test_a_process_that_ends_in_the_midst_of_a_job_is_not_kept() -> None:
    pool = WorkerPool()
    turn = pool.take(Path("a"), {"DIE": "1"}, start)
    turn.process.wait()
    assert [*turn.stdout] == [] and turn.poll() == 1  # an orderly end is none
    assert not pool.give_back(turn)
    other = pool.take(Path("b"), {}, start)
    assert other.pid != turn.pid
    other.kill()
    other.wait()
    for process in (turn.process, other.process):
        process.stdin.close(), process.stdout.close()


def test_a_process_that_died_while_it_waited_is_replaced() -> None:
    pool = WorkerPool()
    first = pool.take(Path("a"), {}, start)
    assert [*first.stdout] and pool.give_back(first)
    first.kill()
    first.wait()
    second = pool.take(Path("b"), {}, start)
    assert second.pid != first.pid and [*second.stdout]
    assert pool.give_back(second)
    pool.close()
    first.process.stdout.close()
