"""Ctrl-C during a build."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ..engine_cache import EngineStore
from ..runtime.provider import EngineProvider
from .errors import INTERRUPTED

GRACE_SECONDS = 1.5
CANCELLED = "Cancelled: nothing was kept of the build that was under way. Run the command again to build."


@contextlib.contextmanager
def prompt_interrupts(provider: EngineProvider) -> Iterator[None]:
    """Make Ctrl-C end the block soon, wherever it is, leaving nothing unfinished in the store.

    It raises KeyboardInterrupt as always, and that cancels the build. But tracing a model, on another thread, can take
    a minute and cannot be stopped: a block that goes on after the grace is ended by force, and the process with it.
    """
    timer = threading.Timer(GRACE_SECONDS, _leave, [provider.store])
    timer.daemon = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one is enough
        timer.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        provider.queue.cancel_all("cancelled by Ctrl-C")
        for ticket in provider.queue.pending():
            ticket.wait()
        raise KeyboardInterrupt(CANCELLED) from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def _leave(store: EngineStore) -> None:
    """End this process now; the system frees its locks, and a worker ends when its host is gone."""
    _remove_leftovers(store)
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    print(f"{show_cursor}slipstream: {CANCELLED}", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _remove_leftovers(store: EngineStore) -> None:
    """This process's folders in the making and claims; both are named `<subject>.<pid>.<n>`."""
    mine = f"*.{os.getpid()}.*"
    for folder in (store.root / "tmp").glob(mine):
        shutil.rmtree(folder, ignore_errors=True)
    for claim in (store.root / "in_use").glob(mine):
        with contextlib.suppress(OSError):
            claim.unlink()
