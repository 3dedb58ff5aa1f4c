"""Looks at other processes through /proc, as no package for it is at hand everywhere."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """What /proc says of one process.

    Attributes:
        state: a letter: R runs, S sleeps, T is stopped, Z is dead but not yet collected.
        session: its session's id; the build process leads one of its own.
    """

    pid: int
    state: str
    parent: int
    session: int

    @property
    def command(self) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return ""


def processes() -> list[Process]:
    """All that live; those that are only not yet collected left out."""
    found = [_read(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in found if process is not None and process.state != "Z"]


def in_session(session: int) -> list[Process]:
    return [process for process in processes() if process.session == session]


def workers_in(directory: Path) -> list[Process]:
    """Build processes of jobs in `directory`, wherever they were started from."""
    return [process for process in processes() if f" worker {directory}" in process.command]


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]  # the name before it may hold anything
    return Process(pid, state, int(parent), int(session))
