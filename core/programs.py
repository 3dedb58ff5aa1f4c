"""Other programs that are started: this is the only module of the installed pack that starts any.

Which ones: the Python of this process with this pack itself (builds of engines, some as forks of one such process;
commands of a fleet), ComfyUI for the builds of a workflow, the C++ compiler, and `nvidia-smi`, `git` and `taskkill`,
which tell a version or end a build. Commands are lists of words: no shell reads them, and none of them comes from the
network.

It uses the standard library alone: machines of a Ray cluster read it by its path.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

Started = subprocess.Popen[bytes]
Stream = int | IO[bytes] | None

NOTHING, PIPE = subprocess.DEVNULL, subprocess.PIPE
FAILURES = (OSError, subprocess.SubprocessError)
"""What is raised where a program cannot be started, or takes too long."""
TooLong = subprocess.TimeoutExpired


class Program(Protocol):
    """As much of a `subprocess.Popen[bytes]` as its users need.

    Attributes:
        pid: of the process, and of its group where it has one.
        stdin, stdout: its standard streams, where they are pipes.
        returncode: with which it ended, as far as `poll` and `wait` have seen that.
    """

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TooLong: it has not ended within so many seconds.
        """

    def kill(self) -> None: ...


def run(command: Sequence[str], seconds: float | None = None, folder: Path | None = None) -> Any:
    """Run a program to its end, without input.

    Args:
        seconds: that it may take.
        folder: where it runs; default: where this process does.

    Returns:
        With `returncode`, and `stdout` and `stderr` as text.

    Raises:
        FAILURES
    """
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0) if os.name == "nt" else 0
    return subprocess.run(
        list(command), cwd=folder, stdin=NOTHING, capture_output=True, text=True, errors="replace", timeout=seconds,
        check=False, creationflags=flags,
    )  # fmt: skip


def start(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    given: Stream = NOTHING,
    output: Stream = NOTHING,
    errors: Stream = NOTHING,
    own_group: bool = False,
) -> Started:
    """Start a program, which goes on by itself.

    Args:
        given, output, errors: its standard streams.
        own_group: it and what it starts can be signalled together, see `kill_group`.

    Raises:
        OSError: it cannot be started.
    """
    group: dict[str, Any] = {}
    if own_group and os.name == "nt":
        group = {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    elif own_group:
        group = {"start_new_session": True}
    return subprocess.Popen(
        list(command), cwd=folder, env=dict(environment), stdin=given, stdout=output, stderr=errors, **group
    )


def fork() -> int:
    """Go on as two processes: 0 in the new one, its id in the other. Only for a process that runs one thread.

    Raises:
        OSError: there can be no more.
    """
    return os.fork()


def kill_group(program: Program) -> None:
    """End a program with all that it started, such as C++ compilers: they outlive a worker that was killed."""
    if os.name == "nt" and program.poll() is None:
        run(["taskkill", "/F", "/T", "/PID", str(program.pid)])
    elif not signal_group(program.pid, "SIGKILL"):
        program.kill()
    program.wait()
    if program.stdin is not None:
        program.stdin.close()


def signal_group(leader: int, name: str) -> bool:
    """Send a signal to the process group of a program; False where the system has no such thing."""
    number = getattr(signal, name, None)
    if number is None or not hasattr(os, "killpg"):
        return False
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # macOS forbids what is dead
        return False
    return True
