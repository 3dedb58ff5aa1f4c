"""Cases side by side on one GPU: all of them set up at once, which is the processor's work, and timed one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO


class Place:
    """A case's place among those that share its GPU.

    Whoever sets up holds the file's lock together with others; whoever times holds it alone. So nobody is timed before
    all have been set up, and none beside another.

    Args:
        file: of the lock; None: the GPU is shared with no other case.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._stream: IO[bytes] | None = None

    @property
    def is_shared(self) -> bool:
        return self._file is not None

    def __enter__(self) -> Place:
        if self._file is not None:
            self._stream = open(self._file, "ab")  # noqa: SIM115 (closed by __exit__)
            self._lock(alone=False)
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
        fcntl.flock(self._stream, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


def why_not() -> str | None:
    """Why cases cannot be set up side by side on this system; None where they can."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return "this system has no lock that several processes hold together; measure without --side-by-side"
    return None
