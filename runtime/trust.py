"""Whether a loaded engine may serve: compared with the model, and remembered."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from ..core.errors import IncompatibleEngine, NotFinite, SlipstreamError
from ..core.protocols import ModelSource
from ..engine_cache import EngineStore, Entry, Verification
from .overflow import Overflows
from .plan import Plan
from .pool import LoadedEngine
from .speed import measure_speed
from .verify import check, verify

log = logging.getLogger(__name__)

_SLOWER, _MS_SLOWER = 1.1, 1.0
"""By how much an engine must be slower to be named: times as long, and ms besides."""
_SAY_SLOWER = (
    "Slipstream: the engine for %s takes %.1f ms a call, the plain model %.1f ms. Where the machine was not busy with "
    "something else, bypass the node for this model, and please report it"
)

_Contents = tuple[str, tuple[str, ...]]
"""An engine, and what its files hold: one that was refused, deleted and built anew gets another chance."""

_Case = tuple[str, tuple[str, ...], str]
"""The same, and the model's weights without patches."""


class Trust:
    """Comparisons of engines with their models in this process.

    Args:
        on_timed: called when the store knows an engine's times.
    """

    def __init__(self, store: EngineStore, overflows: Overflows, on_timed: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._overflows = overflows
        self._on_timed = on_timed
        self._tried_timing: set[_Case] = set()
        self._unwritten: set[_Case] = set()
        self._wrong: dict[_Contents, IncompatibleEngine] = {}
        """Engines that were found wrong when they were compared last."""
        self._known: dict[_Case, Verification] = {}
        self._refused: dict[tuple[_Case, bool], IncompatibleEngine] = {}
        """With a LoRA and without: what is wrong with one may be right without it."""
        self._failed_once: set[tuple[_Case, bool]] = set()
        self._compared: WeakKeyDictionary[LoadedEngine, int] = WeakKeyDictionary()
        """The generation of weights with which an engine was right last."""

    def check_not_refused(self, source: ModelSource, entry: Entry) -> None:
        """
        Raises:
            IncompatibleEngine: the engine was found wrong for these weights.
        """
        if refused := self._refused.get((_case(source, entry), source.is_patched)):
            raise copy.copy(refused)  # an error that is kept must not keep the caller's frames, and their model

    def what_is_wrong(self, entry: Entry) -> IncompatibleEngine | None:
        """What an engine was refused for when it was compared last; None where it was right, or was not compared."""
        return self._wrong.get(_contents(entry))

    def knows(self, source: ModelSource, entry: Entry) -> bool:
        """Whether an engine was compared with the model in this process; one that copies weights may be again."""
        return _case(source, entry) in self._known

    def prove(
        self,
        source: ModelSource,
        plan: Plan,
        loaded: LoadedEngine,
        check_interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        """Compare an engine with the model unless it was, in this process and since it copied its weights.

        One that is wrong is refused from then on; one that copies weights only after a second attempt, since what it
        copied may be to blame.

        Args:
            check_interrupted: raises when the person who waits has enough.

        Raises:
            IncompatibleEngine: it computes something else.
        """
        case = _case(source, loaded.entry)
        engine = loaded.engine
        refitted = engine.copies_weights and self._compared.get(loaded) != engine.generation
        if case in self._known and not refitted:
            if case[2] not in loaded.entry.manifest.verifications and case not in self._unwritten:
                self._record(loaded, case, self._known[case])  # deleted, and built again to the same bytes
            return
        try:
            self._known[case] = self._compare(source, plan, loaded, case, check_interrupted)
        except IncompatibleEngine as error:
            self._note_failure(source, plan, case, error, final=not engine.copies_weights)
            raise
        self._failed_once.discard((case, source.is_patched))
        self._wrong.pop(case[:2], None)
        self._compared[loaded] = engine.generation

    def _compare(
        self,
        source: ModelSource,
        plan: Plan,
        loaded: LoadedEngine,
        case: _Case,
        check_interrupted: Callable[[], None],
    ) -> Verification:
        driver = plan.key.environment.driver
        known = self._known.get(case) or loaded.entry.manifest.verifications.get(case[2])
        if known is not None and known.driver == driver:
            check(loaded.engine, source, plan.spec, known, refitted=loaded.engine.copies_weights)
            result = known
        else:
            result = self._verified(source, plan, loaded, driver)
        timed = self._timed(source, plan, loaded, case, result, check_interrupted)
        if timed is not known:
            self._record(loaded, case, timed)
        return timed

    def _verified(self, source: ModelSource, plan: Plan, loaded: LoadedEngine, driver: str | None) -> Verification:
        result = verify(loaded.engine, source, plan.spec, driver)
        remarks = (result.note, self._overflows.remark(source, plan.spec))
        result = replace(result, device_bytes=loaded.engine.device_bytes, note="; ".join(filter(None, remarks)))
        log.info("Slipstream: checked %s, relative error %.1e", plan, result.relative_error)
        return result

    def _timed(
        self,
        source: ModelSource,
        plan: Plan,
        loaded: LoadedEngine,
        case: _Case,
        result: Verification,
        check_interrupted: Callable[[], None],
    ) -> Verification:
        """With times where it has none, and they can be had; that is tried once in a process."""
        if result.speedup is not None or case in self._tried_timing:
            return result
        speed = measure_speed(loaded.engine, source, plan.spec, check_interrupted)
        self._tried_timing.add(case)
        if speed is None:
            return result
        if speed.engine_ms > _SLOWER * speed.eager_ms + _MS_SLOWER:
            log.warning(_SAY_SLOWER, str(plan), speed.engine_ms, speed.eager_ms)  # a plan that is kept keeps a model
        return replace(result, engine_ms=speed.engine_ms, eager_ms=speed.eager_ms)

    def _record(self, loaded: LoadedEngine, case: _Case, result: Verification) -> None:
        try:
            loaded.entry = self._store.record_verification(loaded.entry, case[2], result)
        except SlipstreamError as error:  # a read-only store: checked again in the next process
            log.warning("Slipstream: %s", error)
            self._unwritten.add(case)
            return
        if result.speedup is not None:
            self._tell()

    def _tell(self) -> None:
        try:
            self._on_timed()
        except Exception:  # whoever listens must not cost the engine
            log.exception("Slipstream: telling of an engine's times broke")

    def _note_failure(
        self, source: ModelSource, plan: Plan, case: _Case, error: IncompatibleEngine, final: bool
    ) -> None:
        if isinstance(error, NotFinite):
            self._overflows.note(source, plan.spec)
        self._wrong[case[:2]] = copy.copy(error)
        failed = case, source.is_patched
        if final or failed in self._failed_once:
            self._refused[failed] = copy.copy(error)
        self._failed_once.add(failed)


def _case(source: ModelSource, entry: Entry) -> _Case:
    return *_contents(entry), source.weights_digest()


def _contents(entry: Entry) -> _Contents:
    return entry.digest, tuple(sorted(record.sha256 for record in entry.manifest.files.values()))
