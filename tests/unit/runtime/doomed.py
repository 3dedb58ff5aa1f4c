"""Processes that are killed while they try an engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.runtime.loaded.canary import Canary


class Doomed:
    """Another process in the midst of something that is watched."""

    def __init__(self, folder: Path, digest: str, phase: str, graphs: bool, versions: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                with Canary(folder, lambda: versions).watching(digest, phase, graphs):
                    os.write(writing, b"!")
                    time.sleep(60)
            finally:
                os._exit(1)
        assert os.read(reading, 1) == b"!"
        os.close(reading)
        os.close(writing)

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
