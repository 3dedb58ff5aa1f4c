"""Marks the folders into which torch unpacks packages, so that the next process removes those of a killed one.

torch unpacks a package into a folder for temporary files, and removes it when the package is closed. A process that is
killed leaves it there, tens of megabytes each time, for nobody to find.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

log = logging.getLogger(__name__)

MARK = "slipstream.lock"
"""A file in such a folder, locked for as long as its process lives."""

_INSIDE = "/data/aotinductor/"
"""Of a package: where its code is."""

_CLOCKS_DIFFER = 2.0
"""Seconds between the clock and the times of files."""

_marks: dict[Path, int] = {}
"""Open files by the folders that they mark."""

_marking = threading.Lock()
"""What appears while this is held was unpacked by whoever holds it."""


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Mark the folders that torch unpacks inside the block, where /proc shows which these are."""
    with _marking:
        before, started = _unpacked(), time.time()
        yield
        try:
            _forget_removed()
            for folder in _unpacked() - before:
                if folder.is_dir() and folder.stat().st_mtime > started - _CLOCKS_DIFFER:
                    _mark(folder)
            sweep()
        except Exception as error:  # an engine that was loaded is not to fail for this
            log.debug("Slipstream: what torch unpacked is not marked: %s", error)


def _unpacked() -> set[Path]:
    """Folders for temporary files in which packages lie that are loaded into this process."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            files = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if _INSIDE in line}
    except OSError:
        return set()
    root = _root()
    inside = (Path(file).relative_to(root).parts for file in files if Path(file).is_relative_to(root))
    return {root / parts[0] for parts in inside if _INSIDE in f"/{'/'.join(parts[1:])}"}


def _root() -> Path:
    return Path(tempfile.gettempdir()).resolve()


def _forget_removed() -> None:
    for folder in [folder for folder in _marks if not folder.is_dir()]:
        os.close(_marks.pop(folder))


def _mark(folder: Path) -> None:
    locks = _locks()
    if locks is None:
        return
    new = folder / f"{MARK}.new"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        locks.flock(handle, locks.LOCK_EX | locks.LOCK_NB)
        new.rename(folder / MARK)  # from here on others see it, and it is locked
    except OSError:
        os.close(handle)
        raise
    if not _marks:
        atexit.register(_remove_all, os.getpid())
    _marks[folder] = handle


def _remove_all(owner: int) -> None:
    """Of packages that nobody closed."""
    if os.getpid() == owner:  # not one that was forked off, which may end earlier
        for folder in _marks:
            shutil.rmtree(folder, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def sweep() -> None:
    """Remove the marked folders of processes that have ended."""
    locks = _locks()
    if locks is None:
        return
    for mark in _root().glob(f"*/{MARK}"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it now
            handle = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
            try:
                locks.flock(handle, locks.LOCK_EX | locks.LOCK_NB)
                if any(mark.parent.glob(f"*{_INSIDE}")):
                    shutil.rmtree(mark.parent)
            finally:
                os.close(handle)


def _locks() -> ModuleType | None:
    """The module `fcntl`, whose locks end with their process; None where the system has none."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl
