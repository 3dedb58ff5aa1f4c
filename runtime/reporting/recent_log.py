"""The last lines of the log, for pages that show them."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from typing import Any

from .log_language import InLanguage

KEPT = 500
_LONGEST = 8000
_FORMAT = logging.Formatter("%(message)s")


class RecentLog(logging.Handler):
    """Keeps lines with growing numbers; the first has number 1."""

    def __init__(self, keep: int = KEPT) -> None:
        super().__init__()
        self._lines: deque[dict[str, Any]] = deque(maxlen=keep)
        self._last = 0
        self._keeping = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = _FORMAT.format(record)[:_LONGEST]
        except Exception:  # of whoever logged something that cannot be formatted
            self.handleError(record)
            return
        with self._keeping:
            self._last += 1
            self._lines.append(
                {"n": self._last, "time": round(record.created, 3), "level": record.levelname.lower(), "text": text}
            )

    def after(self, number: int) -> dict[str, Any]:
        """The lines behind one that is known, and the number to ask with next.

        Args:
            number: 0 for all that are kept. One that is not reached yet comes from before a restart: all as well.
        """
        with self._keeping:
            known = number if number <= self._last else 0
            return {"lines": [line for line in self._lines if line["n"] > known], "next": self._last}


@functools.cache
def recent_log() -> RecentLog:
    """What Slipstream logs in this process, from the first call on."""
    kept = RecentLog()
    pack = __name__.removesuffix(".runtime.reporting.recent_log")  # ComfyUI loads packs under names of its own
    for handler in (InLanguage(), kept):
        logging.getLogger(pack).addHandler(handler)
    return kept
