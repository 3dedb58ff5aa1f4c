"""Whether a loaded engine may serve: compared with the model, and remembered."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from weakref import WeakKeyDictionary

from ...core.errors import IncompatibleEngine, NotFinite, SlipstreamError
from ...core.formatting import say_share
from ...core.protocols import ModelSource
from ...engine_cache import EngineStore, Entry, Verification
from ..loaded.device_clock import disturb
from ..loaded.engine_pool import LoadedEngine
from ..planning.fp16_overflow import Overflows
from ..planning.plan import Plan
from .verify import check, verify

log = logging.getLogger(__name__)

_Contents = tuple[str, tuple[str, ...]]
"""An engine, and what its files hold: one that was refused, deleted and built anew gets another chance."""

_Case = tuple[str, tuple[str, ...], str]
"""The same, and the model's weights without patches."""


class Trust:
    """Comparisons of engines with their models in this process."""

    def __init__(self, store: EngineStore, overflows: Overflows) -> None:
        self._store = store
        self._overflows = overflows
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

    def known(self, source: ModelSource, entry: Entry) -> Verification | None:
        """How far an engine that serves was from the model when it was compared."""
        case = _case(source, entry)
        return self._known.get(case) or entry.manifest.verifications.get(case[2])

    def refuse(self, source: ModelSource, entry: Entry, error: IncompatibleEngine) -> None:
        """An engine was found wrong in use: it serves these weights no more in this process."""
        case = _case(source, entry)
        self._wrong[case[:2]] = self._refused[case, source.is_patched] = error
        self._known.pop(case, None)

    def prove(self, source: ModelSource, plan: Plan, loaded: LoadedEngine) -> None:
        """Compare an engine with the model unless it was, in this process and since it copied its weights.

        One that is wrong is refused from then on; one that copies weights only after a second attempt, since what it
        copied may be to blame.

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
            self._known[case] = self._compare(source, plan, loaded, case)
        except IncompatibleEngine as error:
            self._note_failure(source, plan, case, error, final=not engine.copies_weights)
            raise
        self._failed_once.discard((case, source.is_patched))
        self._wrong.pop(case[:2], None)
        self._compared[loaded] = engine.generation

    def _compare(self, source: ModelSource, plan: Plan, loaded: LoadedEngine, case: _Case) -> Verification:
        disturb()
        driver = plan.key.environment.driver
        known = self._known.get(case) or loaded.entry.manifest.verifications.get(case[2])
        if known is not None and known.driver == driver:
            if check(loaded.engine, source, plan.spec, known, refitted=loaded.engine.copies_weights):
                return known
        result = self._verified(source, plan, loaded, driver)
        self._record(loaded, case, result)
        return result

    def _verified(self, source: ModelSource, plan: Plan, loaded: LoadedEngine, driver: str | None) -> Verification:
        result = verify(loaded.engine, source, plan.spec, driver)
        remarks = (result.note, self._overflows.remark(source, plan.spec))
        result = replace(result, device_bytes=loaded.engine.device_bytes, note="; ".join(filter(None, remarks)))
        log.info("Slipstream: checked %s, relative error %s", plan, say_share(result.relative_error))
        return result

    def _record(self, loaded: LoadedEngine, case: _Case, result: Verification) -> None:
        try:
            loaded.entry = self._store.record_verification(loaded.entry, case[2], result)
        except SlipstreamError as error:  # a read-only store: checked again in the next process
            log.warning("Slipstream: %s", error)
            self._unwritten.add(case)

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
