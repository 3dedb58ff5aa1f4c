"""Ctrl-C during a build."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from ..runtime.provider import EngineProvider

CANCELLED = "Cancelled: nothing was kept of the build that was under way. Run the command again to build."
_LONGEST_SECONDS = 10.0


@contextlib.contextmanager
def prompt_interrupts(provider: EngineProvider) -> Iterator[None]:
    """Let Ctrl-C cancel the running build, and wait until its process and files are gone."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one is enough
        provider.end_builds("cancelled by Ctrl-C", _LONGEST_SECONDS)
        raise KeyboardInterrupt(CANCELLED) from None
    finally:
        signal.signal(signal.SIGINT, before)
