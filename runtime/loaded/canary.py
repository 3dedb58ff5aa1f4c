"""Marks of what could end the process, so that no engine ends it twice for the same cause.

Before an engine is used for the first time in a process, and before each stream capture, a mark is written; it is
removed afterwards, whatever came of it. Only the end of the process leaves it behind. After such a death with CUDA
graphs the engine runs without them, after one without them it is not used, until a new build, an update, a start of the
machine, or the user's *Try again*. Marks of living processes count for nothing, nor do those of other machines. Who
reads marks removes none: what means nothing here may mean something to another process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ...core.environment import versions_now
from ...core.errors import StoreError
from ...core.protocols import Engine, Tensors
from ...core.streams import wait_for
from ...engine_cache.locks import Claim, try_lock

log = logging.getLogger(__name__)

LOAD, USE, CAPTURE = "load", "use", "capture"
"""Phases: an engine is loaded; then called for the first time; its calls, or steps around them, are captured."""

_DOING = {
    LOAD: "it was loaded", USE: "it was used for the first time", CAPTURE: "its CUDA graph was captured",
}  # fmt: skip
_DIGITS = 24
"""Of an engine's digest, in the names of files."""
_KEPT_SECONDS = 30 * 24 * 3600
"""Marks that count for nothing here are kept so long, since they may count elsewhere."""


@dataclass(frozen=True)
class Death:
    """What a process that ended left behind about an engine.

    Attributes:
        phase: `LOAD`, `USE` or `CAPTURE`.
        with_graphs: whether the engine ran with CUDA graphs there.
        pid: of that process.
        at: POSIX time of the mark.
    """

    phase: str
    with_graphs: bool
    pid: int
    at: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.at))
        return f"the program ended while {_DOING[self.phase]} (process {self.pid}, {when})"


_CONTENT = {"host", "boot", "versions", "started", *(field.name for field in fields(Death))}
"""What each mark says."""


class Canary:
    """The marks in one folder, which several processes share.

    Args:
        versions: of all whose update is a reason to try again; see `versions_now`.
    """

    def __init__(self, folder: Path, versions: Callable[[], Mapping[str, str]] | None = None) -> None:
        self._folder = folder
        self._versions = versions or versions_now
        self._own: dict[Path, Claim] = {}
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

    def death_of(self, digest: str) -> Death | None:
        """The death for which this engine is treated with care.

        One without CUDA graphs: it is not to be used. One with them: it is to be used without.
        """
        return min(self._deaths(digest), key=lambda death: (death.with_graphs, -death.at), default=None)

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
            found = _read(path)
            if (found is None or found["host"] == _host()) and not self._is_alive(path, found or {}):
                _discard(path)

    def _put(self, digest: str, phase: str, with_graphs: bool) -> Path | None:
        pid = os.getpid()
        content = {
            "phase": phase, "with_graphs": with_graphs, "pid": pid, "started": _started(pid), "at": time.time(),
            "host": _host(), "boot": _boot(), "versions": dict(self._versions()),
        }  # fmt: skip
        path = self._folder / f"{digest[:_DIGITS]}.{phase}.{uuid.uuid4().hex}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            if (lock := try_lock(_lock_of(path))) is None:
                return None
            with self._changing:
                self._own[path] = Claim(_lock_of(path), lock)
                if not self._is_ending_watched:
                    atexit.register(self._end)  # an orderly end is no death
                    self._is_ending_watched = True
            path.write_text(json.dumps(content), encoding="utf-8")
        except (OSError, StoreError) as error:
            log.debug("Slipstream: %s is not watched: %s", digest[:12], error)
            self._remove(path)
            return None
        return path

    def _remove(self, mark: Path | None) -> None:
        if mark is None:
            return
        _unlink(mark)
        with self._changing:
            claim = self._own.pop(mark, None)
        if claim is not None:
            claim.release()

    def _end(self) -> None:
        for mark in list(self._own):
            self._remove(mark)

    def _sweep(self) -> None:
        """Remove what has counted for nothing for long."""
        for path in self._folder.iterdir():
            mark = path.with_suffix(".json")
            found = _read(mark)
            if _is_old(path) and (found is None or not self._counts(found)):
                _discard(mark)

    def _marks(self, digest: str) -> list[Path]:
        try:
            return sorted(self._folder.glob(f"{digest[:_DIGITS]}.*.json"))
        except OSError:
            return []

    def _deaths(self, digest: str) -> Iterator[Death]:
        """Those that count here."""
        for path in self._marks(digest):
            found = _read(path)
            if found is None or not self._counts(found) or self._is_alive(path, found):
                continue
            if path.exists():  # its process has not removed it meanwhile
                yield Death(**{field.name: found[field.name] for field in fields(Death)})

    def _counts(self, found: Mapping[str, Any]) -> bool:
        """Whether a mark was written on this machine, which was not started since, with nothing updated."""
        now = _host(), _boot(), dict(self._versions())
        return (found["host"], found["boot"], found["versions"]) == now

    def _is_alive(self, path: Path, found: Mapping[str, Any]) -> bool:
        """Whether the process that wrote a mark on this machine lives, as far as anybody can tell."""
        started = found.get("started")
        if path in self._own or (started is not None and _started(found["pid"]) == started):
            return True
        try:
            lock = try_lock(_lock_of(path))
        except (OSError, StoreError):
            return True
        if lock is None:
            return True
        Claim(_lock_of(path), lock).release()  # a lock that nobody holds says no more than none
        return False


class EngineCanary:
    """The canary of one engine, or of several whose calls are captured together.

    Attributes:
        death: what an engine did to an earlier process, as it was known when this process loaded it.
    """

    def __init__(self, canary: Canary | None, *digests: str) -> None:
        self._canary = canary
        self._digests = digests
        self.death = self._death()

    def _death(self) -> Death | None:
        deaths = map(self._canary.death_of, self._digests) if self._canary is not None else ()
        return next(filter(None, deaths), None)

    @property
    def allows_graphs(self) -> bool:
        return self.death is None

    @property
    def is_outdated(self) -> bool:
        """Whether the engine may do more by now than when it was loaded."""
        return self.death is not None and self._death() is None

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Around a stream capture and the first launch of what it gave."""
        with contextlib.ExitStack() as marks:
            if self._canary is not None:
                for digest in self._digests:
                    marks.enter_context(self._canary.watching(digest, CAPTURE, True))
            yield


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


def _lock_of(mark: Path) -> Path:
    """Held while the process lives that wrote the mark."""
    return mark.with_suffix(".lock")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
        return found if _CONTENT <= found.keys() and found["phase"] in _DOING else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _discard(mark: Path) -> None:
    _unlink(mark)
    _unlink(_lock_of(mark))


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _KEPT_SECONDS
    except OSError:
        return False


def _host() -> str:
    return socket.gethostname()


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
