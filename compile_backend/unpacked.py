"""Where torch unpacks packages: a folder of this process, which the next one removes if this one cannot.

torch removes what it unpacked when a package is closed. A process that is killed leaves it behind, tens of megabytes
each time, for nobody to find.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

PREFIX = "slipstream-packages-"
_VARIABLE = "TMPDIR"
"""The first that torch looks at."""

_changing = threading.Lock()


@contextlib.contextmanager
def unpacked_apart() -> Iterator[None]:
    """What torch unpacks meanwhile goes into this process's folder; where there can be none, where it usually goes."""
    folder = _own_folder()
    if folder is None:
        yield
        return
    with _changing:
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before


@functools.lru_cache(maxsize=1)
def _own_folder() -> str | None:
    """A new folder that is locked for as long as this process lives; None where the system cannot lock folders."""
    try:
        import fcntl
    except ImportError:
        return None
    with contextlib.suppress(OSError):
        sweep()
        while True:
            folder = tempfile.mkdtemp(prefix=PREFIX)
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.isdir(folder):  # nobody swept it before it was locked
                atexit.register(_remove, folder, os.getpid())
                return folder  # the handle stays open, and with it the lock
            os.close(handle)
    return None


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not one that was forked off, which may end earlier
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of processes that are gone."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it now
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
