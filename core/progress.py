"""Progress reports and cancellation of builds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .errors import BuildCancelled


@dataclass(frozen=True)
class Progress:
    """One report of a running build.

    Attributes:
        phase: "queued", "waiting" (for another process), "pull" (from a remote store), "start", "export",
            "compile", "store", "load" or "verify".
        fraction: of the whole build, 0 to 1; None where nothing can be said.
        message: one line for people.
        operations: in the traced graph, 0 before they are counted; the build time grows with them.
    """

    phase: str
    fraction: float | None = None
    message: str = ""
    operations: int = 0


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """A `ProgressCallback` that does nothing."""


class CancelToken:
    """Set once, from any thread; long work asks `raise_if_cancelled` now and then."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def cancel(self, reason: str = "cancelled by the user") -> None:
        self.reason = self.reason or reason
        self._event.set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep for up to `seconds`; True as soon as cancelled."""
        return self._event.wait(seconds)

    def raise_if_cancelled(self, what: str) -> None:
        if self.cancelled:
            raise BuildCancelled(f"{what} was stopped: {self.reason}. Nothing was kept; queue again to build it.")
