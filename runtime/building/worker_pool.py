"""Build processes that stay for the next job: many small builds import torch, and take a GPU's context, once for each.

A process that is interrupted in the midst of a job is killed as any other, see `worker_process`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...core.programs import Program, TooLong, kill_group
from .forks import Forks
from .worker import DONE, SERVE
from .worker_start import ROOT, environment_of_many, start_worker

_PATIENCE_SECONDS = 2.0
"""How long processes that wait may take to end by themselves."""


class Turn:
    """One job of a process that takes several; as much of a `Popen` as following a job needs.

    Attributes:
        returncode: of the job; None until it is done.
    """

    def __init__(self, process: Program) -> None:
        self.process = process
        self.pid = process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """What became of the job, or of its process if that is gone."""
        if self.returncode is None and (code := self.process.poll()) is not None:
            self.returncode = code or 1  # an orderly end in the midst of a job is none
        return self.returncode

    @property
    def stdout(self) -> Turn:
        """What the process says about this job, line by line."""
        return self

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[bytes]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if (code := _done(line)) is not None:
                self.returncode = code
                return
            yield line


def _done(line: bytes) -> int | None:
    """The code with which a job ended, if a line says so."""
    try:
        code = json.loads(line)[DONE]
    except (ValueError, KeyError, TypeError):
        return None
    return int(code)


class WorkerPool:
    """The processes that wait for a job.

    Args:
        start: starts another one; default: a build process, by a fork where that can be had.
    """

    def __init__(self, start: Callable[[], Program] | None = None) -> None:
        self._forks = Forks()
        self._start = start or self._forked_or_started
        self._idle: list[Program] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Jobs may come soon: prepare for their processes. Returns at once."""
        self._forks.warm(environment_of_many())

    def _forked_or_started(self) -> Program:
        environment = environment_of_many()
        return self._forks.fork(environment) or start_worker(SERVE, Path(ROOT.anchor), environment)

    def take(self, folder: Path, environment: Mapping[str, str]) -> Turn:
        """Give a job to a process that waits, or to a new one.

        Args:
            folder: of the job.
            environment: variables that are the job's own.

        Raises:
            OSError: none can be started.
        """
        job = json.dumps({"folder": str(folder), "environment": dict(environment)}).encode() + b"\n"
        while (waiting := self._next()) is not None:
            if (turn := _given(waiting, job)) is not None:
                return turn
        turn = _given(self._start(), job)
        if turn is None:
            raise BrokenPipeError("the build process ended as it began")
        return turn

    def _next(self) -> Program | None:
        with self._lock:
            while self._idle:
                if (process := self._idle.pop()).poll() is None:
                    return process
                kill_group(process)  # with what it may have left behind
            return None

    def give_back(self, turn: Turn) -> bool:
        """Keep the process of a job that went well for the next one; False where it is not fit for that."""
        if turn.returncode != 0 or turn.process.poll() is not None:
            return False
        with self._lock:
            self._idle.append(turn.process)
        return True

    def close(self) -> None:
        """End all processes that wait: by themselves, or killed where they do not in time.

        The end of its standard input, which tells a process to end, may never come: what other nodes forked in the
        meantime holds the pipe open too.
        """
        if os.getpid() != self._owner:  # a copy of the host, whose processes these are
            return
        with self._lock:
            ending, self._idle = self._idle, []
        for process in ending:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for process in ending:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TooLong:
                kill_group(process)
            assert process.stdout is not None
            process.stdout.close()
        self._forks.close()


def _given(process: Program, job: bytes) -> Turn | None:
    """A job's turn; None where the process is gone."""
    assert process.stdin is not None
    try:
        process.stdin.write(job)
        process.stdin.flush()
    except OSError:
        process.wait()
        return None
    return Turn(process)
