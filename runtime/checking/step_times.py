"""How long steps take with engines and without, measured on the pictures that are made: no engine stays that is slower.

A step that engines computed is compared with steps of the same work that the user's model computed by itself. Such
steps there are before an engine is built; later a few are made on purpose, see `is_due`. An engine that seems slower
beyond noise is suspected, since the machine may only have been busier with its steps than with the model's. One that
is slower in new steps of both kinds as well is retired: its manifest says so, with the versions for which that holds.

The engine of a whole model is compared with those of its blocks as well, and gives way to them where they are faster.
They were timed before it came, so they serve and are timed again; where they are not faster after it as well, it comes
back. Of blocks nothing is written down, so all this holds as long as the process.

Where the model computes none any more, as with a VAE whose every call an engine answers, there are figures, but no
engine is retired.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import torch

from ...core.environment import versions_now
from ...core.errors import SlipstreamError
from ...core.formatting import say_precisely
from ...engine_cache import EngineStore, Entry, Manifest, Speed
from ..loaded.device_clock import Clock, clock_of

log = logging.getLogger(__name__)

_SAMPLES_KEPT = 64
_STEPS_KEPT, _UNREAD_KEPT = 256, 1024
_LEAST_ENGINE, _LEAST_EAGER = 5, 3
"""Samples without which nothing is said."""
_LATEST = 8
"""Samples of blocks, at most, with which those of a whole model are compared: blocks may have become slower."""
_SLOWER, _MS_SLOWER = 1.03, 0.2
"""By how much an engine must be slower: times as long, and ms besides."""
_CHANGED = 0.05
"""By what share a time must have changed to be written down again."""
_TRIES, _MOST_TRIES, _RUNS_BETWEEN = 3, 12, 200
"""Runs in which steps are computed on purpose: until enough is known, while engines seem slower, and one of so many."""

EngineId = tuple[str, str]
"""An engine's digest, and when it was built: one that is built anew is another."""


def id_of(entry: Entry) -> EngineId:
    return entry.digest, entry.manifest.created


_BLOCKS = {"step": "blocks", "call": "blocks, by calls"}
"""What is timed → the first part of such an id."""


def id_of_blocks(
    architecture: str, device: torch.device, timed_by: str = "step", patches: Iterable[str] = ()
) -> EngineId:
    """Of all engines of a model's blocks together, which are no entry of the store: figures last as long as the
    process.

    Args:
        architecture: the digest of the model's.
        device: on which they compute: of two GPUs each has its own times.
        timed_by: "step" of sampling, or "call" of another network.
        patches: what other nodes change in the model: it decides what of it engines compute, and how fast that is.
    """
    return _BLOCKS[timed_by], ", ".join((architecture, str(device), *patches))


def timed_by(engine: EngineId) -> str | None:
    """What the figures of a model's blocks are the time of; None for another engine."""
    return next((what for what, kind in _BLOCKS.items() if kind == engine[0]), None)


@dataclass(frozen=True)
class TimedStep:
    """What computed a step of sampling, or a call of a VAE or ControlNet.

    Attributes:
        work: equal for steps that do the same, whoever computes them; None for one that is not to be compared.
        engines: those of the model, in order; none where the model computed by itself.
        others: engines of ControlNets that took part.
    """

    work: Hashable
    engines: tuple[EngineId, ...] = ()
    others: tuple[EngineId, ...] = ()


@dataclass
class _Turns:
    """Runs with engines that did some work, and those of them in which steps were computed without, to compare."""

    runs: int = 0
    tries: int = 0
    last: int = 0


@dataclass(frozen=True)
class _Behind:
    """What is known of a step whose engine gives way to those of blocks.

    Attributes:
        blocks: the same step by these.
        engine_ms, blocks_ms: the medians.
        is_sure: whether blocks were faster both before the engine served and after it.
    """

    blocks: TimedStep
    engine_ms: float
    blocks_ms: float
    is_sure: bool


_Unread = tuple[Clock, TimedStep, Any, Any]


class StepTimes:
    """What this process has measured. Safe to use from any thread, `settle` and `seems_slower` apart.

    Args:
        versions: of the host, by its name.
        retires: whether engines that are slower are retired, and those that were are not used.
        compares: whether steps may be computed by the user's model on purpose.

    Attributes:
        is_busy: whether anything else of ours uses the device, such as a build.
        on_change: called when an engine's figures have changed. It should be quick.
        saved_ms: by how much steps with engines took less than the model's own would have, in this process; less than
            0 where they took more. Steps whose work the model's own times are not known for do not count.
    """

    def __init__(
        self,
        store: EngineStore,
        versions: Mapping[str, str] | None = None,
        clock_of: Callable[[torch.device], Clock] = clock_of,
        *,
        retires: bool = True,
        compares: bool = True,
    ) -> None:
        self.clock_of = clock_of
        self.is_busy: Callable[[], bool] = lambda: False
        self.on_change: Callable[[], None] = lambda: None
        self.saved_ms = 0.0
        self._store = store
        now = versions_now()
        self._versions = {"Slipstream": now["Slipstream"], **(versions or {}), **now}
        self._retires, self._compares = retires, compares
        self._samples: OrderedDict[TimedStep, deque[float]] = OrderedDict()
        self._unread: deque[_Unread] = deque(maxlen=_UNREAD_KEPT)
        self._unjudged: defaultdict[TimedStep, list[float]] = defaultdict(list)
        """The ms of steps that were read since engines were judged."""
        self._turns: OrderedDict[Hashable, _Turns] = OrderedDict()
        self._suspects: set[TimedStep] = set()
        self._earlier: OrderedDict[Hashable, list[float]] = OrderedDict()
        """Of the model, by the work, from before an engine was suspected: for figures alone."""
        self._unwritten: dict[EngineId, Speed] = {}
        self._of_blocks: OrderedDict[EngineId, Speed] = OrderedDict()
        self._behind: OrderedDict[TimedStep, _Behind] = OrderedDict()
        """Steps whose engine gives way to those of blocks."""
        self._lock = threading.RLock()

    # Measuring

    def add(self, clock: Clock, step: TimedStep, begin: Any, end: Any) -> None:
        """Count a step between two marks, once they can be read."""
        with self._lock:
            self._unread.append((clock, step, begin, end))

    def has_met(self, step: TimedStep) -> bool:
        """Whether this was asked before: what computes for the first time is not warm."""
        with self._lock:
            known = step in self._samples
            self._samples_of(step)
            return known

    def settle(self) -> None:
        """Read what the device has got to by now, and see what follows.

        Only from a thread that computes: a question to the device from another one could void what is captured there.
        """
        try:
            with self._lock:
                self._read()
                read, self._unjudged = self._unjudged, defaultdict(list)
                self.saved_ms += sum(self._gain(step, took) for step, took in read.items())
                works = {step.work for step in read}
                for step in [each for each in self._samples if each.engines and each.work in works]:
                    self._judge(step)
        except Exception:  # whatever a driver or a file system raises: no picture may end for a figure
            log.debug("Slipstream: times of steps were lost", exc_info=True)
            self._unread.clear()

    def _read(self) -> None:
        """Those steps whose times can be read now."""
        while self._unread:
            clock, step, begin, end = self._unread[0]
            took = clock.milliseconds(begin, end)
            if took is None:
                break
            self._unread.popleft()
            self._samples_of(step).append(took)
            self._unjudged[step].append(took)

    def _gain(self, step: TimedStep, took: Sequence[float]) -> float:
        """By how many ms steps of one kind were shorter than the model's own, all together."""
        entries = self._entries_of(step)
        speed = self.speed_of(entries[0]) if entries else None
        return 0.0 if speed is None else sum(speed.eager_ms - each for each in took)

    def _samples_of(self, step: TimedStep) -> deque[float]:
        found = self._samples.setdefault(step, deque(maxlen=_SAMPLES_KEPT))
        _keep(self._samples, step)
        return found

    # Comparing

    def is_due(self, step: TimedStep, runs_apart: int = 1) -> bool:
        """Whether a run that does this work by engines should do some of it without, to compare.

        Ask once a run. It is at most in three runs, until enough is known, in one of 200 from then on, and where
        engines may be retired in up to twelve while they seem slower, which may be noise.

        Args:
            runs_apart: with 2 every other run is left alone, for runs that are too short to time engines and model in
                one. Each gives one sample, which may be lost, so that it may take twelve runs until enough is known.
        """
        with self._lock:
            turns = self._turns.setdefault(step.work, _Turns())
            _keep(self._turns, step.work)
            turns.runs += 1
            ours, plain = (self._samples.get(each, ()) for each in (step, TimedStep(step.work)))
            is_unknown = len(plain) < _LEAST_EAGER and turns.tries < (_TRIES if runs_apart == 1 else _MOST_TRIES)
            is_open = self._retires and turns.tries < _MOST_TRIES and seems_slower(ours, plain)
            if turns.tries and turns.runs - turns.last < runs_apart:
                return False
            if not self._compares or not (is_unknown or is_open or turns.runs - turns.last >= _RUNS_BETWEEN):
                return False
            turns.tries, turns.last = turns.tries + 1, turns.runs
            return True

    def seems_slower(self, step: TimedStep) -> bool:
        """Whether a run in which engines and the model were compared should go on comparing them: by the times known so
        far the engines take longer, and they may be retired.

        It is called while steps are timed, so it reads no file. Only from a thread that computes, as `settle`.
        """
        with self._lock:
            self._read()
            ours, plain = (self._samples.get(each, ()) for each in (step, TimedStep(step.work)))
            return self._compares and self._retires and seems_slower(ours, plain)

    def stop_comparing(self) -> None:
        """Compute no more steps without engines in this process: there is no room for them."""
        self._compares = False

    def _judge(self, step: TimedStep) -> None:
        if self._gives_way(step):
            return
        ours: Sequence[float] = self._samples.get(step, ())
        plain: Sequence[float] = self._samples.get(TimedStep(step.work), ())
        if are_new := len(plain) >= _LEAST_EAGER:
            self._earlier.pop(step.work, None)
        else:
            plain = self._earlier.get(step.work, ())
        if len(ours) < _LEAST_ENGINE or len(plain) < _LEAST_EAGER:
            return
        entries = self._entries_of(step)
        engine_ms, eager_ms = round(median(ours), 3), round(median(plain), 3)
        are_retired = any(map(self.why_not, entries)) or any(map(self.why_not_blocks, step.engines))
        if are_retired or min(engine_ms, eager_ms) <= 0:  # less than the clock can tell
            return
        slower = self._retires and are_new and is_slower(ours, plain)
        is_sure = slower and step in self._suspects
        speed = Speed(engine_ms, eager_ms, retired=self._versions if is_sure else {})
        self._note(entries, speed)
        self._note_blocks(step, speed)
        if slower and not is_sure:
            self._suspect(step)
        elif are_new:
            self._suspects.discard(step)

    def _suspect(self, step: TimedStep) -> None:
        """Have steps of both kinds timed anew, side by side where steps are computed on purpose."""
        self._suspects.add(step)
        self._earlier[step.work] = list(self._samples_of(TimedStep(step.work)))
        _keep(self._earlier, step.work)
        for each in (step, TimedStep(step.work)):
            self._samples_of(each).clear()
        self._turns.pop(step.work, None)

    def _gives_way(self, step: TimedStep) -> bool:
        """Whether a step's engine gives way to those of blocks from here on, going by steps of the same work."""
        if (blocks := self._by_blocks(step)) is None:
            return False
        ours, theirs, known = self._samples_of(step), self._samples_of(blocks), self._behind.get(step)
        latest = [*theirs][-_LATEST:]
        if min(len(ours), len(theirs)) < _LEAST_ENGINE or min(map(median, (ours, latest))) <= 0:
            return known is not None
        slower = is_slower(ours, latest)
        if known is None:
            if slower:
                self._put_behind(step, blocks, latest, is_sure=False)
                theirs.clear()  # they serve now, and are timed anew
        elif slower:
            if not known.is_sure:
                self._put_behind(step, blocks, latest, is_sure=True)
                for entry in self._entries_of(step):
                    log.warning("Slipstream: %s: %s", entry.manifest.label, self.why_blocks_instead(entry))
        elif not known.is_sure or is_slower(latest, ours):
            del self._behind[step]
            ours.clear()
            self._tell()
        return step in self._behind

    def _put_behind(self, step: TimedStep, blocks: TimedStep, latest: Sequence[float], is_sure: bool) -> None:
        engine_ms, blocks_ms = (round(median(each), 3) for each in (self._samples[step], latest))
        self._behind[step] = _Behind(blocks, engine_ms, blocks_ms, is_sure)
        _keep(self._behind, step)
        self._tell()

    def _by_blocks(self, step: TimedStep) -> TimedStep | None:
        """The same work by engines of blocks that are in use; None where there is none, or no engine of the whole model
        alone computed the step."""
        if not self._retires or len(step.engines) != 1 or timed_by(step.engines[0]) is not None:
            return None
        same = (each for each in reversed(self._samples) if (each.work, each.others) == (step.work, step.others))
        return next((each for each in same if each.engines and all(map(self._are_blocks_in_use, each.engines))), None)

    def _are_blocks_in_use(self, engine: EngineId) -> bool:
        return timed_by(engine) is not None and self.why_not_blocks(engine) is None

    def _note(self, entries: Iterable[Entry], speed: Speed) -> None:
        for entry in entries:
            if _is_news(speed, self.speed_of(entry)):
                self._record(entry, speed)
            if speed.retired:
                log.warning("Slipstream: %s: %s", entry.manifest.label, say_retired(speed, entry.manifest.timed_by))

    def _note_blocks(self, step: TimedStep, speed: Speed) -> None:
        for engine in step.engines:
            if timed_by(engine) is not None:
                self._of_blocks[engine] = speed
                _keep(self._of_blocks, engine)
                if reason := self.why_not_blocks(engine):
                    log.warning("Slipstream: %s", reason)
                self._tell()

    def _entries_of(self, step: TimedStep) -> list[Entry]:
        stored = (engine for engine in step.engines if timed_by(engine) is None)
        found = [(engine, self._store.lookup(engine[0])) for engine in stored]
        return [entry for engine, entry in found if entry is not None and id_of(entry) == engine]

    # What is known

    def speed_of(self, entry: Entry) -> Speed | None:
        """The figures of an engine; None where there are none yet."""
        return self._unwritten.get(id_of(entry), entry.manifest.speed)

    def why_not(self, entry: Entry) -> str | None:
        """Why an engine is not used, in words; None where it is."""
        speed = self.speed_of(entry)
        if speed is None or not self._retires or not _holds(speed.retired, self._versions):
            return None
        return say_retired(speed, entry.manifest.timed_by)

    def why_not_blocks(self, engine: EngineId) -> str | None:
        """Why a model's blocks are not run on engines any more, in words; None where they are."""
        speed = self._of_blocks.get(engine)
        if speed is None or not speed.retired or not self._retires:
            return None
        return (
            f"engines of blocks take {say_precisely(speed.engine_ms)} ms a {timed_by(engine)} where your model without "
            f"Slipstream takes {say_precisely(speed.eager_ms)} ms, {BLOCKS_NOT_USED}, or until you press Build engine"
        )

    def why_blocks_instead(self, entry: Entry) -> str | None:
        """Why engines of blocks, where there are any, are used in place of a whole model's, in words; None where that
        one is used, as where it is the faster one with another sampler or ControlNet."""
        with self._lock:
            found = (known for step, known in self._behind.items() if id_of(entry) in step.engines)
            behind = next((each for each in found if all(map(self._are_blocks_in_use, each.blocks.engines))), None)
            if behind is None or any(self._leads(step) for step in self._samples if id_of(entry) in step.engines):
                return None
        return (
            f"the engine takes {say_precisely(behind.engine_ms)} ms a {entry.manifest.timed_by} where engines of the "
            f"model's blocks take {say_precisely(behind.blocks_ms)} ms, so these are used instead; tried again once "
            "they take longer, at the next start, or when you press Build engine"
        )

    def _leads(self, step: TimedStep) -> bool:
        """Whether a whole model's engine is known to be faster than those of blocks with a step."""
        if step in self._behind or (blocks := self._by_blocks(step)) is None:
            return False
        ours, latest = self._samples[step], [*self._samples[blocks]][-_LATEST:]
        return min(len(ours), len(latest)) >= _LEAST_ENGINE and is_slower(latest, ours)

    def take_back(self, entry: Entry) -> None:
        """Engines of blocks had no part where a whole model's engine gave way: it serves again, and is measured."""
        with self._lock:
            for step in [step for step in self._behind if id_of(entry) in step.engines]:
                del self._behind[step]
                self._samples_of(step).clear()
        self._tell()

    def speed_of_blocks(self, engine: EngineId) -> Speed | None:
        """The figures of a model's blocks on engines; None where there are none yet."""
        return self._of_blocks.get(engine)

    def forgive_blocks(self, engine: EngineId) -> None:
        """Somebody asks by hand for a model's blocks on engines: where they were slower, they are measured again."""
        with self._lock:
            speed = self._of_blocks.get(engine)
            if speed is not None and speed.retired:
                del self._of_blocks[engine]
                self._forget_samples(engine)

    def forgive(self, entry: Entry) -> Entry:
        """Somebody asks for this engine by hand: a retired one is used and measured again."""
        with self._lock:
            speed, engine = self.speed_of(entry), id_of(entry)
            is_retired = speed is not None and speed.retired
            if is_retired or any(engine in step.engines for step in self._behind):
                self._forget_samples(engine)
            if speed is None or not is_retired:
                return entry
            return self._record(entry, replace(speed, retired={}))

    def _forget_samples(self, engine: EngineId) -> None:
        for step in [each for each in (*self._samples, *self._behind) if engine in each.engines]:
            self._samples.pop(step, None)
            self._behind.pop(step, None)
            self._suspects.discard(step)
        for step in [each for each, known in self._behind.items() if engine in known.blocks.engines]:
            del self._behind[step]

    def _record(self, entry: Entry, speed: Speed) -> Entry:
        try:
            entry = self._store.record_speed(entry, speed)
            self._unwritten.pop(id_of(entry), None)
        except SlipstreamError as error:  # a read-only store: known to this process alone
            log.debug("Slipstream: %s", error)
            self._unwritten[id_of(entry)] = speed
        self._tell()
        return entry

    def _tell(self) -> None:
        try:
            self.on_change()
        except Exception:  # whoever listens must not cost the figures
            log.exception("Slipstream: a listener to engine times failed")


def is_slower(engine: Sequence[float], eager: Sequence[float]) -> bool:
    """Whether steps with an engine take longer than the model's own, by more than noise explains.

    Args:
        engine, eager: milliseconds, at least two of each.
    """
    shortest, *_ = quantiles(engine, n=4, method="inclusive")
    *_, longest = quantiles(eager, n=4, method="inclusive")
    return seems_slower(engine, eager) and shortest > longest


def seems_slower(engine: Sequence[float], eager: Sequence[float]) -> bool:
    """Whether the median step with an engine takes longer than the model's own, which may be noise.

    Args:
        engine, eager: milliseconds; False where either is empty.
    """
    return bool(engine and eager) and median(engine) > _SLOWER * median(eager) + _MS_SLOWER


def why_retired(manifest: Manifest) -> str | None:
    """Why an engine is not used, as far as a process without the host can tell; None where it is used."""
    speed = manifest.speed
    return say_retired(speed, manifest.timed_by) if speed and _holds(speed.retired, versions_now()) else None


BLOCKS_NOT_USED = "so they are not used until the next start"
"""In the reason where a model's blocks are slower on engines."""

SO_NOT_USED = "so it is not used; tried again after an update of"
"""Part of what `say_retired` says, and of no other reason."""


def say_retired(speed: Speed, timed_by: str) -> str:
    """Why an engine of this speed is not used."""
    *most, last = speed.retired
    updates = " or ".join(filter(None, (", ".join(most), last)))
    return (
        f"the engine takes {say_precisely(speed.engine_ms)} ms a {timed_by} where your model without "
        f"Slipstream takes {say_precisely(speed.eager_ms)} ms, {SO_NOT_USED} {updates}, or when you press Build engine"
    )


def _holds(retired: Mapping[str, str], versions: Mapping[str, str]) -> bool:
    """Whether an engine is retired with these versions; those that are not known here count as unchanged."""
    return bool(retired) and all(versions.get(name, version) == version for name, version in retired.items())


def _is_news(speed: Speed, known: Speed | None) -> bool:
    if known is None or known.retired != speed.retired:
        return True
    pairs = (speed.engine_ms, known.engine_ms), (speed.eager_ms, known.eager_ms)
    return any(abs(now - before) > _CHANGED * before for now, before in pairs)


def _keep(kept: OrderedDict[Any, Any], newest: Hashable) -> None:
    kept.move_to_end(newest)
    while len(kept) > _STEPS_KEPT:
        kept.popitem(last=False)
