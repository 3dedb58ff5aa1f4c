"""TensorRT's timing cache: a file for each TensorRT version and GPU, shared by all builds."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

_LOCK_SECONDS = 60.0


class TimingCache:
    """Kernel timings of earlier builds. Where the file cannot be read or written, builds only take longer.

    Args:
        folder: where the file is kept; None keeps none.
        maker: name and version of TensorRT; measurements of another are worth nothing.
        gpu: the card's name.
    """

    def __init__(self, folder: Path | None, maker: str, gpu: str | None) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"timing {maker} {gpu or 'portable'}").strip("-")
        self._path = None if folder is None else folder / f"{name}.cache"

    def lend(self, config: Any) -> None:
        """Let a build use the known timings."""
        if self._path is None:
            return
        cache = config.create_timing_cache(self._read())
        if cache is not None and config.set_timing_cache(cache, False):
            return
        cache = config.create_timing_cache(b"")  # it was not TensorRT's, of another version or of another card
        if cache is not None:
            config.set_timing_cache(cache, False)

    def learn(self, config: Any) -> None:
        """Add a build's timings to the file."""
        cache = config.get_timing_cache() if self._path is not None else None
        if cache is None or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._path}.lock", timeout=_LOCK_SECONDS):
                others = config.create_timing_cache(self._read())
                if others is not None:
                    cache.combine(others, False)
                self._write(bytes(cache.serialize()))
        except (OSError, Timeout) as error:
            log.warning(
                "Slipstream: the timing cache of this build could not be saved, so the next one takes as long: %s",
                error,
            )

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes() if self._path is not None else b""
        except OSError:
            return b""

    def _write(self, data: bytes) -> None:
        assert self._path is not None
        partial = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            partial.write_bytes(data)
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)
