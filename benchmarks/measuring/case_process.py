"""Processes of their own: what they wrote is kept, however they end."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..subjects.rows import Row, read

PROGRAM = (sys.executable, str(Path(__file__).resolve().parents[1] / "run.py"))


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its last row of each variant, and what went wrong in plain words."""

    rows: tuple[Row, ...]
    trouble: tuple[str, ...]


def task_of(name: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A new file for the rows of a case's process, and the hidden words that tell the process of both."""
    run = uuid.uuid4().hex
    part = folder.resolve() / f"{name}-{run[:8]}.part"
    return part, ("--case-in-this-process", name, "--part", str(part), "--run", run)


def run_apart(command: Sequence[str], part: Path, limit: int | None) -> tuple[list[Row], str | None]:
    """Run a process to its end: the rows that it wrote, and why it did not end well.

    Args:
        part: the file of its rows, removed when they have been read: where the command itself is ended from outside,
            that file is what is left.
        limit: in seconds.
    """
    trouble = _follow(command, limit)
    rows = read(part, unfinished=True) if part.exists() else []
    part.unlink(missing_ok=True)
    return rows, trouble


def end_all() -> None:
    """Those that other threads run; what they wrote is kept."""
    for process in list(_running):
        process.kill()


_running: set[subprocess.Popen[bytes]] = set()


def _follow(command: Sequence[str], limit: int | None) -> str | None:
    """Run a process to its end; why it did not end well."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        _running.add(process)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()  # a build that it started notices and ends
            return f"was not done after {limit} s, and ended"
        except BaseException:
            process.kill()
            raise
        finally:
            _running.discard(process)
    return f"its process ended with status {status}" if status else None
