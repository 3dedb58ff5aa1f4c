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

_Case = tuple[str, tuple[str, ...], str]
"""An engine, what its files hold, and the model's weights without patches."""


class Trust:
    """Comparisons of engines with their models in this process."""

    def __init__(self, store: EngineStore, overflows: Overflows) -> None:
        self._store = store
        self._overflows = overflows
        self._known: dict[_Case, Verification] = {}
        self._refused: dict[tuple[_Case, bool], IncompatibleEngine] = {}
        """With a LoRA and without: what is wrong with one may be right without it."""
        self._failed_once: set[tuple[_Case, bool]] = set()
        self._compared: WeakKeyDictionary[LoadedEngine, int] = WeakKeyDictionary()
        """The generation of weights with which an engine was right last."""

    def check_not_refused(self, source: ModelSource, plan: Plan, entry: Entry) -> None:
        """
        Raises:
            IncompatibleEngine: the engine was found wrong for these weights.
        """
        if refused := self._refused.get((_case(source, plan, entry), source.is_patched)):
            raise copy.copy(refused)  # an error that is kept must not keep the caller's frames, and their model

    def knows(self, source: ModelSource, plan: Plan, entry: Entry) -> bool:
        """Whether an engine was compared with the model in this process; one that copies weights may be again."""
        return _case(source, plan, entry) in self._known

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
        case = _case(source, plan, loaded.entry)
        engine = loaded.engine
        refitted = engine.copies_weights and self._compared.get(loaded) != engine.generation
        if case in self._known and not refitted:
            if case[2] not in loaded.entry.manifest.verifications:  # deleted, and built again to the same bytes
                self._record(loaded, case[2], self._known[case])
            return
        try:
            self._known[case] = self._compare(source, plan, loaded, case, check_interrupted)
        except IncompatibleEngine as error:
            self._note_failure(source, plan, case, error, final=not engine.copies_weights)
            raise
        self._failed_once.discard((case, source.is_patched))
        self._compared[loaded] = engine.generation

    def _compare(
        self,
        source: ModelSource,
        plan: Plan,
        loaded: LoadedEngine,
        case: _Case,
        check_interrupted: Callable[[], None],
    ) -> Verification:
        weights, driver = source.weights_digest(), plan.key.environment.driver
        known = self._known.get(case) or loaded.entry.manifest.verifications.get(weights)
        if known is not None and known.driver == driver:
            check(loaded.engine, source, plan.spec, known, refitted=loaded.engine.copies_weights)
            return known
        result = verify(loaded.engine, source, plan.spec, driver)
        remarks = (result.note, self._overflows.remark(source, plan.spec))
        result = replace(result, device_bytes=loaded.engine.device_bytes, note="; ".join(filter(None, remarks)))
        log.info("Slipstream: checked %s, relative error %.1e", plan, result.relative_error)
        if speed := measure_speed(loaded.engine, source, plan.spec, check_interrupted):
            result = replace(result, engine_ms=speed.engine_ms, eager_ms=speed.eager_ms)
        self._record(loaded, weights, result)
        return result

    def _record(self, loaded: LoadedEngine, weights: str, result: Verification) -> None:
        try:
            loaded.entry = self._store.record_verification(loaded.entry, weights, result)
        except SlipstreamError as error:  # a read-only store: checked again in the next process
            log.warning("Slipstream: %s", error)

    def _note_failure(
        self, source: ModelSource, plan: Plan, case: _Case, error: IncompatibleEngine, final: bool
    ) -> None:
        if isinstance(error, NotFinite):
            self._overflows.note(source, plan.spec)
        failed = case, source.is_patched
        if final or failed in self._failed_once:
            self._refused[failed] = copy.copy(error)
        self._failed_once.add(failed)


def _case(source: ModelSource, plan: Plan, entry: Entry) -> _Case:
    # By content: an engine that was refused, deleted and built anew gets another chance.
    contents = tuple(sorted(record.sha256 for record in entry.manifest.files.values()))
    return plan.key.digest, contents, source.weights_digest()
