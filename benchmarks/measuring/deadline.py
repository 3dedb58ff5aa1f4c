"""The time that a command has."""

from __future__ import annotations

import math
import time


class OutOfTime(Exception):
    """The command's time is over."""


class Deadline:
    """The end of the command's time.

    Args:
        seconds: from now on; None: there is no end.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the end, 0 when it is over."""
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """
        Raises:
            OutOfTime: the time is over.
        """
        if not self.seconds_left:
            raise OutOfTime
