"""The host's side of `fork_server`: build processes that begin in milliseconds, where the system can fork them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from ...core.programs import NOTHING, Program, TooLong, kill_group
from .fork_server import FORK, HAS_CUDA
from .worker_start import ROOT, start_worker

log = logging.getLogger(__name__)

ARE_POSSIBLE = sys.platform == "linux"

_READY_SECONDS = 30.0
"""The longest that it may take to import its libraries, or to answer."""
_TOLD_SECONDS = 2.0
"""How long after the end of a process its exit code may come."""
_FAILURES = 3
"""After so many, processes are started as any other."""

_MESSAGE_BYTES = 4096
_KILLED = -9
_POLL_SECONDS = 0.02


class Forked:
    """A process that another one forked; as much of a `Popen` as builds need."""

    def __init__(self, forks: Forks, pid: int, given: IO[bytes], output: IO[bytes]) -> None:
        self._forks = forks
        self._seen_over: float | None = None
        self.pid = pid
        self.stdin: IO[bytes] | None = given
        self.stdout: IO[bytes] | None = output
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs. Where nobody can tell the code, it counts as killed."""
        if self.returncode is None:
            self.returncode = self._forks.code_of(self.pid)
        if self.returncode is None and _is_over(self.pid):
            self._seen_over = self._seen_over or time.monotonic()
            if time.monotonic() - self._seen_over > _TOLD_SECONDS:
                self.returncode = _KILLED
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TooLong: it has not ended within so many seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TooLong("a build process", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        """End it now; nothing happens where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Forks:
    """Build processes by forks of one that has imported all that they need.

    Where that cannot be had, `fork` says so, and a process is started as any other. What was forked goes on by itself
    if the one that forked it is gone.
    """

    def __init__(self) -> None:
        self._server: Program | None = None
        self._socket: socket.socket | None = None
        self._environment: Mapping[str, str] = {}
        self._codes: dict[int, int] = {}
        self._begun: list[int] = []
        """Processes that the server has forked, and nobody has taken yet."""
        self._refusal: str | None = None
        """Why the server could not fork."""
        self._failures = 0 if ARE_POSSIBLE else _FAILURES
        self._closings = 0
        self._starting = threading.Lock()
        """One process is asked for at a time."""
        self._lock = threading.Lock()
        """Of all else here; never held for long."""

    def warm(self, environment: Mapping[str, str]) -> None:
        """Builds may come soon: begin to import what they need. Returns at once.

        Args:
            environment: variables of all processes.
        """
        with self._lock:
            self._begin(environment)

    def fork(self, environment: Mapping[str, str]) -> Forked | None:
        """A process that serves builds, see `worker.serve`; None where it has to be started as any other."""
        with self._starting:
            with self._lock:
                self._begin(environment)
                if self._socket is None:
                    return None
                asked = self._asked(self._socket)
            if asked is None:
                return None
            given, output = asked
            if (pid := self._answer()) is None:
                given.close()
                output.close()
                return None
            return Forked(self, pid, given, output)

    def code_of(self, pid: int) -> int | None:
        """The exit code of a process, as far as it is known."""
        with self._lock:
            self._hear()
            return self._codes.pop(pid, None)

    def close(self) -> None:
        """Nothing is to be built any more, until something is."""
        with self._lock:
            self._closings += 1
            self._end()

    def _begin(self, environment: Mapping[str, str]) -> None:
        """Have a server, where that is possible."""
        self._hear()
        if self._socket is not None and self._environment != environment:
            self._fail("environment variables have changed")
        if self._socket is not None or self._failures >= _FAILURES:
            return
        try:
            variables = {**environment, HAS_CUDA: str(int(bool(torch.cuda.is_available())))}
            variables.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads, which forbids forks
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._socket, self._environment = ours, dict(environment)
            with its:
                server = start_worker(FORK, Path(ROOT.anchor), variables, given=its.fileno(), output=NOTHING)
            self._server = server
        except Exception as error:  # the system's, and what other extensions put in the place of torch's functions
            self._fail(str(error))
            return
        watching = threading.Thread(target=self._watch, args=(server,), daemon=True, name="slipstream-forks")
        watching.start()

    def _watch(self, server: Program) -> None:
        """Wait for a server's end, which leaves no zombie then."""
        server.wait()
        with self._lock:
            if self._server is server:
                self._end()

    def _asked(self, server: socket.socket) -> tuple[IO[bytes], IO[bytes]] | None:
        """The ends of the pipes of a process that was just asked for; None where none could be."""
        its_input = given = output = its_output = -1
        try:
            its_input, given = os.pipe()
            output, its_output = os.pipe()
            socket.send_fds(server, [b"f"], [its_input, its_output])
            self._refusal = None
            return os.fdopen(given, "wb"), os.fdopen(output, "rb")
        except OSError as error:
            for end in (given, output):
                if end >= 0:
                    os.close(end)
            self._fail(str(error))
            return None
        finally:
            for end in (its_input, its_output):
                if end >= 0:
                    os.close(end)

    def _answer(self) -> int | None:
        """Which process was forked; None where none was."""
        deadline, closings = time.monotonic() + _READY_SECONDS, self._closings
        while True:
            with self._lock:
                self._hear()
                if self._begun:
                    return self._begun.pop()
                if self._refusal is not None:
                    log.debug("Slipstream: a build process is started as any other: %s", self._refusal)
                    return None
                if self._socket is None or self._closings != closings:
                    return None
                if time.monotonic() > deadline:
                    self._failures = _FAILURES
                    self._fail("the process to fork does not answer")
                    return None
            time.sleep(_POLL_SECONDS)

    def _hear(self) -> None:
        """Take in all that the server has said; what it was is forgotten where it is gone."""
        while self._socket is not None:
            try:
                text = self._socket.recv(_MESSAGE_BYTES)
                said = json.loads(text) if text else None
            except BlockingIOError:
                return
            except (OSError, ValueError):
                said = None
            if said is None:
                self._end()
            elif "unfit" in said:
                self._failures = _FAILURES
                self._fail(said["unfit"])
            elif "refusal" in said:
                self._refusal = said["refusal"]
            elif "code" in said:
                self._codes[said["pid"]] = said["code"]
            else:
                self._begun.append(said["pid"])

    def _fail(self, why: str) -> None:
        self._failures += 1
        log.debug("Slipstream: the process that build processes are forked from is given up: %s", why)
        self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._server is not None and self._server.poll() is None:
            kill_group(self._server)
        self._socket = self._server = None
        self._begun.clear()


def _is_over(pid: int) -> bool:
    """Whether a process has ended, whoever is to be told of that."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"
