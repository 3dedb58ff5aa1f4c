"""What an accelerated model did and why, for people."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..building.build_queue import Ticket
    from ..checking.step_times import EngineId


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


_WANTED_KEPT = 16

ON_PURPOSE = "timed on purpose, to compare"
"""Reason for the plain model where an engine might have answered."""


@dataclass(frozen=True)
class Standing:
    """What a model does at the moment.

    Attributes:
        engine: that made the last call; None where the plain model did, or nothing ran.
        reason: for the plain model in the last call; empty where an engine made it, or nothing ran.
        wanted: digest of the engine that the plain model stood in for; None where none would have served.
        note: said before anything ran.
        failed: a person asked for engines, and got none for `reason`.
        blocks: how much of the last call engines of blocks computed, in words; empty where none did.
        block_engines: by which the times of these engines are known; None while some of them are compared.
    """

    engine: EngineUse | None = None
    reason: str = ""
    wanted: str | None = None
    note: str = ""
    failed: bool = False
    blocks: str = ""
    block_engines: EngineId | None = None


@dataclass(frozen=True)
class LastRun:
    """The calls of the run that is under way, or of the last one.

    Attributes:
        engine: that came into use last in it; None where none did.
        reasons: for the plain model, with how often each was given.
        wanted: reason → digest of the engine that the plain model, or engines of its blocks, stood in for.
    """

    engine: EngineUse | None = None
    engine_calls: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)


class Status:
    """Counts and reasons of one accelerated model. Safe to read from any thread.

    Attributes:
        on_change: called when another engine is wanted or in use.
        on_run: called when a run begins.
        block_builds: of engines of blocks that its last run lacked, those that have ended included.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_run: Callable[[], None] = lambda: None
        self.block_builds: Callable[[], list[Ticket]] = list
        self._wanted: dict[str, None] = {}
        self._missing: dict[str, str] = {}
        self._standing = Standing()
        self._lock = threading.Lock()
        self._engines: dict[str, EngineUse] = {}
        self._reasons: Counter[str] = Counter()
        self._block_calls = 0
        self._blocks = self._blocks_on_engines = 0
        """Calls of blocks, within calls of the model that went by blocks, and those of them that engines computed."""
        self._last = "nothing has run yet"
        self._run_engine: str | None = None
        self._run_calls = 0
        self._run_reasons: Counter[str] = Counter()
        self._run_blocks: set[str] = set()
        """Reasons for which engines of blocks computed calls of the run."""

    @property
    def engine_calls(self) -> int:
        with self._lock:
            return sum(use.calls for use in self._engines.values())

    @property
    def eager_calls(self) -> int:
        with self._lock:
            return self._reasons.total()

    @property
    def block_calls(self) -> int:
        """Calls of the model that engines of its blocks computed, all or some of them; they are no eager calls."""
        with self._lock:
            return self._block_calls

    @property
    def last_engine(self) -> EngineUse | None:
        """The engine that came into use last."""
        with self._lock:
            return next(reversed(self._engines.values()), None)

    @property
    def standing(self) -> Standing:
        with self._lock:
            return self._standing

    @property
    def last_run(self) -> LastRun:
        with self._lock:
            engine = None if self._run_engine is None else self._engines[self._run_engine]
            given = (*self._run_reasons, *self._run_blocks)
            wanted = {reason: self._missing[reason] for reason in given if reason in self._missing}
            return LastRun(engine, self._run_calls, dict(self._run_reasons), wanted)

    @property
    def wanted(self) -> list[str]:
        """Digests of engines whose builds were asked for, the last one first."""
        with self._lock:
            return list(reversed(self._wanted))

    def begin_run(self) -> None:
        """A sampler, decoder or encoder begins: its calls are counted apart from those of earlier runs."""
        with self._lock:
            self._run_engine, self._run_calls = None, 0
            self._run_reasons.clear()
            self._run_blocks.clear()
            self.block_builds = list
        self.on_run()

    def want(self, digest: str) -> None:
        """Note that a build was asked for."""
        with self._lock:
            self._wanted.pop(digest, None)
            self._wanted[digest] = None
            while len(self._wanted) > _WANTED_KEPT:
                del self._wanted[next(iter(self._wanted))]
        self.on_change()

    def miss(self, reason: str, digest: str) -> None:
        """Note which engine would have served where `reason` is given for the plain model."""
        with self._lock:
            self._missing[reason] = digest

    def use_engine(self, use: EngineUse) -> None:
        """Note that an engine came into use; what it did before still counts."""
        with self._lock:
            if known := self._engines.pop(use.digest, None):
                use.since, use.calls = known.since, known.calls
            self._engines[use.digest] = use
            self._standing = Standing(engine=use)
        self.on_change()

    def note(self, what: str) -> None:
        """Show a message about this model before it runs, or where it cannot run on engines."""
        with self._lock:
            self._last = what
            self._standing = Standing(note=what)

    def fail(self, reason: str) -> None:
        """Note why a requested engine could not be built."""
        with self._lock:
            self._standing = Standing(reason=reason, failed=True)
        self.on_change()

    def count_engine(self, digest: str) -> None:
        with self._lock:
            use = self._engines[digest]
            use.calls += 1
            self._run_engine = digest
            self._run_calls += 1
            self._last = f"engine {digest[:12]} ({use.label})"
            if self._standing.engine is not use:
                self._standing = Standing(engine=use)

    def count_eager(self, reason: str) -> bool:
        """Count a call of the plain model; True the first time that this reason is given."""
        with self._lock:
            self._reasons[reason] += 1
            self._run_reasons[reason] += 1
            self._last = f"eager: {reason}"
            self._standing = Standing(reason=reason, wanted=self._missing.get(reason))
            return self._reasons[reason] == 1

    def explain_eager(self, reason: str, fuller: str) -> bool:
        """Give a fuller reason for the call that was just counted as eager; True the first time that it is given."""
        with self._lock:
            self._uncount(reason)
            for counted in (self._reasons, self._run_reasons):
                counted[fuller] += 1
            if reason in self._missing:
                self._missing[fuller] = self._missing[reason]
            self._last = f"eager: {fuller}"
            self._standing = Standing(reason=fuller, wanted=self._missing.get(fuller))
            return self._reasons[fuller] == 1

    def _uncount(self, reason: str) -> None:
        for counted in (self._reasons, self._run_reasons):
            counted[reason] -= 1
            if not counted[reason]:
                del counted[reason]

    def count_blocks(self, reason: str, share: str, engines: EngineId | None) -> None:
        """Note that the call which was just counted as eager was computed by engines of blocks.

        Args:
            reason: for which no engine of the whole model did.
            share: how much of it, in words.
            engines: see `Standing.block_engines`.
        """
        with self._lock:
            self._uncount(reason)
            self._run_blocks.add(reason)
            self._block_calls += 1
            self._last = f"blocks: {share} ({reason})"
            self._standing = Standing(
                reason=reason, wanted=self._missing.get(reason), blocks=share, block_engines=engines
            )

    def count_calls_of_blocks(self, on_engines: int, blocks: int) -> None:
        """Note how many calls of blocks there were in a call of the model, and how many of them engines computed."""
        with self._lock:
            self._blocks += blocks
            self._blocks_on_engines += on_engines

    def count_on_purpose(self) -> None:
        """Count a call that the plain model made only so that its time is known: an engine was there for it."""
        with self._lock:
            self._reasons[ON_PURPOSE] += 1

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
            "block_calls": now["block_calls"] - earlier["block_calls"],
            "blocks": now["blocks"] - earlier["blocks"],
            "blocks_on_engines": now["blocks_on_engines"] - earlier["blocks_on_engines"],
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
                "block_calls": self._block_calls,
                "blocks": self._blocks,
                "blocks_on_engines": self._blocks_on_engines,
                "engines": [vars(use).copy() for use in self._engines.values()],
                "reasons": dict(self._reasons),
            }
