"""The host's side of `fork_server`: build processes that begin in milliseconds, where the system can fork them."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from ...core.programs import NOTHING, Program, TooLong, kill_group
from .fork_server import FORK, HAS_CUDA
from .worker_start import ROOT, start_worker

log = logging.getLogger(__name__)

ARE_POSSIBLE = sys.platform == "linux"

_READY_SECONDS = 60.0
"""The longest that it may take to import its libraries."""

_MESSAGE_BYTES = 4096
_KILLED = -9
_POLL_SECONDS = 0.02


class Forked:
    """A process that another one forked; as much of a `Popen` as builds need."""

    def __init__(self, forks: Forks, pid: int, given: IO[bytes], output: IO[bytes]) -> None:
        self._forks = forks
        self.pid = pid
        self.stdin: IO[bytes] | None = given
        self.stdout: IO[bytes] | None = output
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._forks.code_of(self.pid)
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
            os.kill(self.pid, 9)


class Forks:
    """Build processes by forks of one that has imported all that they need.

    Where that cannot be had, `fork` says so, and a process is started as any other.
    """

    def __init__(self) -> None:
        self._server: Program | None = None
        self._socket: socket.socket | None = None
        self._environment: Mapping[str, str] = {}
        self._codes: dict[int, int] = {}
        self._running: set[int] = set()
        self._is_unfit = not ARE_POSSIBLE
        self._is_closing = False
        self._lock = threading.Lock()

    def warm(self, environment: Mapping[str, str]) -> None:
        """Builds may come soon: begin to import what they need. Returns at once.

        Args:
            environment: variables of all processes.
        """
        if self._lock.acquire(blocking=False):  # else one is being asked for already
            try:
                self._begin(environment)
            except OSError as error:
                log.debug("Slipstream: no process to fork can be started: %s", error)
            finally:
                self._lock.release()

    def fork(self, environment: Mapping[str, str]) -> Forked | None:
        """A process that serves builds, see `worker.serve`; None where it has to be started as any other."""
        with self._lock:
            try:
                self._begin(environment)
                if self._socket is None or self._environment != environment:
                    return None
                return self._forked(self._socket)
            except (OSError, ValueError, KeyError) as error:
                log.info("Slipstream: build processes start one by one: %s", error)
                self._is_unfit = True
                self._end()
                return None

    def code_of(self, pid: int) -> int | None:
        """The exit code of a process, or None while it runs."""
        with self._lock:
            self._hear_all()
            return None if pid in self._running else self._codes.pop(pid, _KILLED)

    def close(self) -> None:
        """Nothing is to be built any more, until something is."""
        self._is_closing = True
        with self._lock:
            self._end()
            self._is_closing = False

    def _begin(self, environment: Mapping[str, str]) -> None:
        self._hear_all()  # it may have ended meanwhile
        if self._environment != environment and not self._running:
            self._end()
        if self._is_unfit or self._socket is not None:
            return
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            variables = {**environment, HAS_CUDA: str(int(torch.cuda.is_available()))}
            variables.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads, which forbids forks
            self._server = start_worker(FORK, Path(ROOT.anchor), variables, given=its.fileno(), output=NOTHING)
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        self._socket, self._environment = ours, dict(environment)

    def _forked(self, server: socket.socket) -> Forked:
        its_input, given = os.pipe()
        output, its_output = os.pipe()
        try:
            socket.send_fds(server, [b"f"], [its_input, its_output])
            pid = self._begun(server)
        except BaseException:
            os.close(given)
            os.close(output)
            raise
        finally:
            os.close(its_input)
            os.close(its_output)
        return Forked(self, pid, os.fdopen(given, "wb"), os.fdopen(output, "rb"))

    def _begun(self, server: socket.socket) -> int:
        before, deadline = set(self._running), time.monotonic() + _READY_SECONDS
        while not (new := self._running - before):
            self._hear(server)
            if self._socket is None or self._is_closing or time.monotonic() > deadline:
                raise OSError("the process that is to be forked does not answer")
            time.sleep(_POLL_SECONDS)
        return new.pop()

    def _hear_all(self) -> None:
        while self._socket is not None and self._hear(self._socket):
            pass

    def _hear(self, server: socket.socket) -> bool:
        """Take in one message; False where there is none."""
        try:
            text = server.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not text:
            self._end()
            return False
        said = json.loads(text)
        if "unfit" in said:
            raise OSError(said["unfit"])
        if "code" not in said:
            self._running.add(said["pid"])
        else:
            self._running.discard(said["pid"])
            self._codes[said["pid"]] = said["code"]
        return True

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            kill_group(self._server)
        self._socket = self._server = None
        self._running.clear()
