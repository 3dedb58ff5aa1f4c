"""What torch unpacks of packages, marked as this process's: the next one removes what a killed one left behind.

torch unpacks a package into a folder for temporary files, and removes it when the package is closed. A process that is
killed leaves it there, tens of megabytes each time, for nobody to find.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

MARK = "slipstream.lock"
"""A file in such a folder, locked for as long as its process lives."""

_INSIDE = "/data/aotinductor/"
"""Of a package, which lies in one folder within that of torch: where its code is, two folders further down."""

_marks: dict[Path, int] = {}
"""Open files by the folders that they mark."""


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Mark what torch unpacks meanwhile, where the system can tell what that is."""
    before = _unpacked()
    yield
    with contextlib.suppress(OSError):
        _forget_removed()
        for folder in _unpacked() - before:
            _mark(folder)
        sweep()


def _unpacked() -> set[Path]:
    """Folders of the packages that are loaded into this process."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            files = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if _INSIDE in line}
    except OSError:
        return set()
    return {Path(file).parents[4] for file in files if file.endswith(".so") and len(Path(file).parents) > 4}


def _forget_removed() -> None:
    for folder in [folder for folder in _marks if not folder.is_dir()]:
        os.close(_marks.pop(folder))


def _mark(folder: Path) -> None:
    locks = _locks()
    if locks is None:
        return
    handle = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks.flock(handle, locks.LOCK_EX | locks.LOCK_NB)
    except OSError:  # another thread has, or nobody can
        os.close(handle)
        return
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
    """Remove what processes left that are gone."""
    locks = _locks()
    if locks is None:
        return
    for mark in Path(tempfile.gettempdir()).glob(f"*/{MARK}"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it now
            handle = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
            try:
                locks.flock(handle, locks.LOCK_EX | locks.LOCK_NB)
                if any(mark.parent.glob(f"*{_INSIDE}")):
                    shutil.rmtree(mark.parent)
            finally:
                os.close(handle)


def _locks() -> ModuleType | None:
    """What locks files in such a way that the system frees them with their process."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl
