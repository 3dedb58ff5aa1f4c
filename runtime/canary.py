"""Marks of what could end the process, so that it ends it once at most.

Before an engine is used for the first time in a process, and before each stream capture, a mark is written; it is
removed afterwards, whatever came of it. Only the end of the process leaves it behind: then the next process runs that
engine without CUDA graphs, or, where it ran without them already, not at all, and says so. A later success, a new
build, an update, or the user's *Try again* removes the mark. Marks of living processes count for nothing, nor do those
from before the machine was started last: a second server or a power cut condemns no engine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ..core.environment import versions_now
from ..core.errors import StoreError
from ..core.protocols import Engine, Tensors
from ..core.streams import wait_for
from ..engine_cache.locks import try_lock

log = logging.getLogger(__name__)

USE, CAPTURE = "use", "capture"
"""Phases: an engine is loaded and called for the first time; its calls, or steps around them, are captured."""

_DIGITS = 24
"""Of an engine's digest, in the names of files."""


@dataclass(frozen=True)
class Death:
    """What a process that ended left behind about an engine.

    Attributes:
        phase: `USE` or `CAPTURE`.
        with_graphs: whether the engine ran with CUDA graphs there.
        pid: of that process.
        at: POSIX time of the mark.
    """

    phase: str
    with_graphs: bool
    pid: int
    at: float

    def __str__(self) -> str:
        doing = "its CUDA graph was captured" if self.phase == CAPTURE else "it was used for the first time"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.at))
        return f"the program ended while {doing} (process {self.pid}, {when})"


class Canary:
    """The marks in one folder, which several processes share.

    Args:
        versions: of all whose update is a reason to try again; see `versions_now`.
    """

    def __init__(self, folder: Path, versions: Callable[[], Mapping[str, str]] | None = None) -> None:
        self._folder = folder
        self._versions = versions or versions_now
        self._own: dict[Path, FileLock] = {}
        self._changing = threading.Lock()
        self._is_ending_watched = False

    @contextlib.contextmanager
    def watching(self, digest: str, phase: str, with_graphs: bool) -> Iterator[None]:
        """Keep a mark for the length of the block. What cannot be written is not watched."""
        mark = self._put(digest, phase, with_graphs)
        try:
            yield
        finally:
            self._remove(mark)
        self._forget(digest, phase, with_graphs)

    def death_of(self, digest: str) -> Death | None:
        """What ended a process that used this engine; one without CUDA graphs counts before one with them."""
        deaths = [death for path in self._marks(digest) if (death := self._death(path)) is not None]
        return min(deaths, key=lambda death: (death.with_graphs, -death.at), default=None)

    def caution(self, digest: str) -> str:
        """What care this engine is treated with, and why, for people; empty where it is used with all that it has."""
        death = self.death_of(digest)
        if death is None:
            return ""
        what = "It runs without CUDA graphs" if death.with_graphs else "It is not used"
        return f"{what}: {death}"

    def forget(self, digest: str) -> None:
        """Try this engine again with all that it has: somebody asks for it, or it was built anew."""
        for path in self._marks(digest):
            if self._is_over(path):
                _unlink(path)

    def _forget(self, digest: str, phase: str, with_graphs: bool) -> None:
        """What has just gone well is no reason for caution any more."""
        for path in self._marks(digest):
            death = self._death(path)
            if death is not None and (death.phase, death.with_graphs) == (phase, with_graphs):
                _unlink(path)

    def _put(self, digest: str, phase: str, with_graphs: bool) -> Path | None:
        pid = os.getpid()
        content = {
            "phase": phase, "with_graphs": with_graphs, "pid": pid, "started": _started(pid), "at": time.time(),
            "boot": _boot(), "versions": dict(self._versions()),
        }  # fmt: skip
        path = self._folder / f"{digest[:_DIGITS]}.{phase}.{pid}.{threading.get_ident()}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = _lock_of(path)
            path.write_text(json.dumps(content), encoding="utf-8")
        except (OSError, StoreError) as error:
            log.debug("Slipstream: %s is not watched: %s", digest[:12], error)
            return None
        with self._changing:
            if not self._is_ending_watched:
                atexit.register(self._end)  # an orderly end is no death
                self._is_ending_watched = True
            if lock is not None:
                self._own[path] = lock
        return path

    def _remove(self, mark: Path | None) -> None:
        if mark is None:
            return
        _unlink(mark)
        with self._changing:
            lock = self._own.pop(mark, None)
        if lock is not None:
            lock.release()
            _unlink(mark.with_suffix(".lock"))

    def _end(self) -> None:
        for mark in list(self._own):
            self._remove(mark)

    def _marks(self, digest: str) -> list[Path]:
        try:
            return sorted(self._folder.glob(f"{digest[:_DIGITS]}.*.json"))
        except OSError:
            return []

    def _death(self, path: Path) -> Death | None:
        """None where the mark's process lives, or where the mark says nothing any more; then it is removed."""
        if not self._is_over(path):
            return None
        found = _read(path)
        if found is None or self._is_outdated(found):
            _unlink(path)
            _unlink(path.with_suffix(".lock"))
            return None
        return Death(found["phase"], bool(found["with_graphs"]), int(found["pid"]), float(found["at"]))

    def _is_over(self, path: Path) -> bool:
        """Whether the process that wrote a mark has ended."""
        if path in self._own:
            return False
        try:
            lock = _lock_of(path)
        except (OSError, StoreError):
            return False
        if lock is None:
            return False
        lock.release()
        found = _read(path) or {}
        started = found.get("started")
        return started is None or _started(found.get("pid", 0)) != started

    def _is_outdated(self, found: Mapping[str, Any]) -> bool:
        """Whether the machine was started since, or anything was updated."""
        was_restarted = found.get("boot") is not None and _boot() is not None and found["boot"] != _boot()
        return was_restarted or found.get("versions") != dict(self._versions())


class EngineCanary:
    """The canary of one engine.

    Attributes:
        death: what the engine did to an earlier process, as it was known when this process loaded it.
    """

    def __init__(self, canary: Canary | None, digest: str) -> None:
        self._canary = canary
        self._digest = digest
        self.death = canary.death_of(digest) if canary is not None else None

    @property
    def allows_graphs(self) -> bool:
        return self.death is None

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Around a stream capture and the first launch of what it gave."""
        if self._canary is None:
            return contextlib.nullcontext()
        return self._canary.watching(self._digest, CAPTURE, True)


class FirstCall:
    """Stands in for an engine; its first call is watched, until the device has done it."""

    def __init__(
        self, engine: Engine, device: torch.device, watching: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._engine = engine
        self._device = device
        self._watching = watching
        self.is_over = False

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        if self.is_over:
            return self._engine(**tensors)
        with self._watching():
            results = self._engine(**tensors)
            wait_for(self._device)
        self.is_over = True
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _lock_of(path: Path) -> FileLock | None:
    """The lock beside a mark; None while its process lives."""
    return try_lock(path.with_suffix(".lock"))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
        return found if {"phase", "with_graphs", "pid", "at"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None where there is none, or nobody tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _boot() -> str | None:
    """Tells starts of the machine apart; None where the system does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
