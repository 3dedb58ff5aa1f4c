"""Cases side by side on one GPU: all of them set up at once, which is the processor's work, and timed one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

_POLL_SECONDS = 0.2


class Unwanted(Exception):
    """Nobody wants the place any more that was waited for."""


class GpuTurn:
    """A case's place among those that share its GPU.

    Whoever sets up holds the file's lock together with others; whoever times holds it alone. So nobody is timed before
    all have been set up, and none beside another.

    Args:
        file: of the lock; None: the GPU is shared with no other case.
        is_unwanted: asked while it is waited for.

    Attributes:
        waited: seconds, for others.
    """

    def __init__(self, file: Path | None, is_unwanted: Callable[[], bool] | None = None) -> None:
        self._file = file
        self._is_unwanted = is_unwanted
        self._stream: IO[bytes] | None = None
        self.waited = 0.0

    @property
    def is_shared(self) -> bool:
        return self._file is not None

    def __enter__(self) -> GpuTurn:
        """
        Raises:
            Unwanted: see `is_unwanted`.
        """
        if self._file is not None:
            self._stream = open(self._file, "a+b")  # noqa: SIM115 (closed by __exit__); NFS shares what can be read
            try:
                self._lock(alone=False)
            except BaseException:
                self._stream.close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Until it ends, no other case computes."""
        self._lock(alone=True)
        try:
            yield
        finally:
            self._lock(alone=False)

    def _lock(self, alone: bool) -> None:
        if self._stream is None:
            return
        import fcntl

        # Changing from one to the other lets go first, so that two who both want to be alone do not wait for ever.
        kind, began = fcntl.LOCK_EX if alone else fcntl.LOCK_SH, time.monotonic()
        if self._is_unwanted is None:
            fcntl.flock(self._stream, kind)
        else:
            self._poll(kind, self._is_unwanted)
        self.waited += time.monotonic() - began

    def _poll(self, kind: int, is_unwanted: Callable[[], bool]) -> None:
        """A thread that is waiting in the system itself could not be told that its command was interrupted."""
        import fcntl

        assert self._stream is not None
        while True:
            if is_unwanted():
                raise Unwanted
            try:
                return fcntl.flock(self._stream, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)


def why_not() -> str | None:
    """Why cases cannot be set up side by side on this system; None where they can."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return "this system has no lock that several processes hold together; measure without --side-by-side"
    return None
