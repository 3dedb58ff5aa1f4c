"""Locks between processes. The operating system frees them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..core.errors import StoreError

_NO_LOCKS = {getattr(errno, name, None) for name in ("ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS")}
"""What network file systems without locks answer."""

WaitCallback = Callable[[float], object]
"""Called again and again with the seconds waited so far; raises to give up."""


def try_lock(path: Path) -> FileLock | None:
    """Take the lock at `path` now; None when another process or thread has it."""
    lock = FileLock(str(path), thread_local=False)  # may be released by another thread
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        raise StoreError(
            f"{path.parent} is on a disk without file locks: engines there are used, but none can be stored. Set "
            "SLIPSTREAM_HOME to a folder on a local disk, and SLIPSTREAM_BASE to this one."
        ) from error
    return lock


@contextlib.contextmanager
def locked(
    path: Path, what: str, timeout: float | None, wait: WaitCallback | None = None, poll: float = 0.02
) -> Iterator[bool]:
    """Hold the lock at `path` during the block; yields whether it had to be waited for.

    Args:
        what: for the message, e.g. "Another ComfyUI is building the engine abc".
        timeout: seconds; None waits as long as it takes.
        poll: seconds between two tries.

    Raises:
        StoreError: not free within `timeout`.
    """
    started = time.monotonic()
    waited = False
    while (lock := try_lock(path)) is None:
        waited = True
        seconds = time.monotonic() - started
        if timeout is not None and seconds >= timeout:
            raise StoreError(
                f"{what}, and had not finished after {seconds:.0f} s. Wait for it and try again, or close "
                f"the other process (its lock is {path})."
            )
        if wait is not None:
            wait(seconds)
        time.sleep(poll)
    try:
        yield waited
    finally:
        lock.release()


class Claim:
    """A lock file that says "somebody alive needs this". Release it once; again does nothing."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock: FileLock | None = lock

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is None:
            return
        # Unlinked while still locked, so that nobody locks it in between. Windows can only do so afterwards.
        with contextlib.suppress(OSError):
            self.path.unlink()
        lock.release()
        if os.name == "nt":
            with contextlib.suppress(OSError):
                self.path.unlink()


class Claims:
    """The claims in one folder, named `<subject>.<pid>.<n>`. Call its methods under the store's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, subject: str) -> Claim:
        number = 0
        while True:
            path = self._folder / f"{subject}.{os.getpid()}.{number}"
            lock = try_lock(path)
            if lock is not None:
                return Claim(path, lock)
            number += 1

    def is_taken(self, subject: str) -> bool:
        """Whether a living process claims `subject`. What dead ones left is removed."""
        return any([self._is_alive(path) for path in self._folder.glob(f"{subject}.*")])

    def sweep(self) -> None:
        """Remove what dead processes left."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            self._is_alive(path)

    def _is_alive(self, path: Path) -> bool:
        lock = try_lock(path)
        if lock is None:
            return True
        Claim(path, lock).release()
        return False
