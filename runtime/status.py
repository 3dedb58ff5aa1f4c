"""What an accelerated model did and why, for people."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineUse:
    """One engine that served calls of a model."""

    digest: str
    label: str
    backend: str
    precision: str
    relative_error: float | None
    since: float = field(default_factory=time.time)
    calls: int = 0


class Status:
    """Counts and reasons of one accelerated model. Safe to read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[str, EngineUse] = {}
        self._reasons: Counter[str] = Counter()
        self._last = "nothing has run yet"

    @property
    def engine_calls(self) -> int:
        with self._lock:
            return sum(use.calls for use in self._engines.values())

    @property
    def eager_calls(self) -> int:
        with self._lock:
            return self._reasons.total()

    @property
    def last_engine(self) -> EngineUse | None:
        """The engine that came into use last."""
        with self._lock:
            return next(reversed(self._engines.values()), None)

    def use_engine(self, use: EngineUse) -> None:
        """Note that an engine came into use; what it did before still counts."""
        with self._lock:
            if known := self._engines.pop(use.digest, None):
                use.since, use.calls = known.since, known.calls
            self._engines[use.digest] = use

    def note(self, what: str) -> None:
        """Say something about this model before it runs, or instead of that."""
        with self._lock:
            self._last = what

    def count_engine(self, digest: str) -> None:
        with self._lock:
            use = self._engines[digest]
            use.calls += 1
            self._last = f"engine {digest[:12]} ({use.label})"

    def count_eager(self, reason: str) -> bool:
        """Count a call of the plain model; True the first time that this reason is given."""
        with self._lock:
            self._reasons[reason] += 1
            self._last = f"eager: {reason}"
            return self._reasons[reason] == 1

    def since(self, earlier: Mapping[str, Any]) -> dict[str, Any]:
        """What happened since `earlier`, a result of `to_json`, in the same form."""
        now = self.to_json()
        calls = {use["digest"]: use["calls"] for use in earlier["engines"]}
        for use in now["engines"]:
            use["calls"] -= calls.get(use["digest"], 0)
        reasons = Counter(now["reasons"]) - Counter(earlier["reasons"])
        return {
            "now": now["now"],
            "engine_calls": now["engine_calls"] - earlier["engine_calls"],
            "eager_calls": now["eager_calls"] - earlier["eager_calls"],
            "engines": [use for use in now["engines"] if use["calls"]],
            "reasons": dict(reasons),
        }

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        with self._lock:
            return {
                "now": self._last,
                "engine_calls": sum(use.calls for use in self._engines.values()),
                "eager_calls": self._reasons.total(),
                "engines": [vars(use).copy() for use in self._engines.values()],
                "reasons": dict(self._reasons),
            }
