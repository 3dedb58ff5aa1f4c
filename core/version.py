"""Which Slipstream this is, and since when it runs in this process."""

from __future__ import annotations

import time

__version__ = "0.1.0"

STARTED = time.time()
"""When this process loaded the pack, before any model (POSIX seconds)."""
