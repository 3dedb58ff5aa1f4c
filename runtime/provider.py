"""Turns a plan into a loaded, verified engine, or says why there is none."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ..core.errors import (
    BackendUnavailable,
    BuildCancelled,
    BuildDied,
    BuildFailed,
    IncompatibleEngine,
    NotFinite,
    SlipstreamError,
    StoreError,
    UnsupportedModel,
)
from ..core.formatting import say_share
from ..core.progress import CancelToken, Progress, ProgressCallback, ignore_progress
from ..core.protocols import Backend, ModelSource, Tensors
from ..core.spec import Optimize, Precision, Role
from ..engine_cache import BuildHistory, ChoiceMemo, EngineStore, Entry, Speed, WeightsMemo
from .blocks.block_engines import BlockEngines
from .building.build import build_engine, device_bytes
from .building.build_queue import BuildQueue, Ticket
from .building.supply import BUILD_IT, NEVER_BUILDS, Supply
from .building.worker_pool import WorkerPool
from .checking.sentinel import Sentinel, why_wrong
from .checking.step_times import StepTimes
from .checking.trust import Trust
from .loaded.canary import LOAD, USE, Canary, FirstCall
from .loaded.device_clock import disturb
from .loaded.device_memory import DeviceRoom, MemoryWatch, Shortages, give_back_unused
from .loaded.engine_pool import EnginePool, LoadedEngine, is_graphed
from .planning import embedded_weights
from .planning.backends import default_backends
from .planning.build_estimate import estimate, say_estimate, say_roughly
from .planning.fp16_overflow import ADVICE, Overflows
from .planning.plan import CallShape, Plan, plans
from .settings.model_settings import BuildPolicy, Settings
from .settings.preferences import Background, Preferences

_Answer = TypeVar("_Answer")

log = logging.getLogger(__name__)

_WAIT_POLL_SECONDS = 0.1
_MISSING_KEPT = 256
_CANCEL_SECONDS = 2.0
"""How long an interrupted run waits for its build to end."""


@dataclass(frozen=True)
class HostHooks:
    """What the runtime asks of a host during a run.

    Attributes:
        progress: shows a build's progress to the person who waits.
        check_interrupted: raises the host's own exception when the person pressed cancel.
        interruptions: the types of that exception, which no fallback may swallow.
        free_device_memory: unloads what this run does not need until so many bytes of a device are free.
        drop_copies: forgets copies of weights on a device that the host keeps for engines alone.
        wants: told the digest of each engine whose build is asked for.
        by_hand: a person asked for the engines: earlier failures are ignored, and where the build that the run waits
            for is cancelled, the run ends with the first of `interruptions`.
        has_blocks: where the engine of the whole model gives way, engines of its blocks compute.
    """

    progress: ProgressCallback = ignore_progress
    check_interrupted: Callable[[], None] = lambda: None
    interruptions: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
    free_device_memory: Callable[[torch.device, int], None] = lambda device, wanted: None
    drop_copies: Callable[[torch.device], object] = lambda device: None
    wants: Callable[[str], None] = lambda digest: None
    by_hand: bool = False
    has_blocks: bool = False


_NO_HOOKS = HostHooks()


@dataclass(frozen=True)
class Offer:
    """The answer to "is there an engine?": one that is ready to compute, or a reason.

    Attributes:
        build_seconds: how long a build of the missing engine is expected to take; None where none is missing, or no
            earlier build tells.
        gives_way: the one in whose place engines of blocks are to compute; None where that is not so.
    """

    engine: LoadedEngine | None = None
    plan: Plan | None = None
    reason: str = ""
    build_seconds: float | None = None
    gives_way: Entry | None = None


@dataclass(frozen=True)
class Prepared:
    """What a call wants, and what is there for it.

    Attributes:
        plans: engines that would do, the best first.
        found: the one of them that is in the store; None where one has to be built.
        expected: seconds that a build is expected to take; None where none is needed, or no earlier build tells.
    """

    plans: list[Plan]
    found: tuple[Plan, Entry] | None
    expected: float | None


@dataclass(frozen=True)
class Made:
    """An engine that was built, or found in the store, and compared with its model.

    Attributes:
        is_new: it was built for this; False where it was found.
        expected: see `Prepared`.
        error: relative error in that comparison; None where none is recorded.
    """

    plan: Plan
    entry: Entry
    is_new: bool
    expected: float | None
    error: float | None

    def __str__(self) -> str:
        """One line for people."""
        built = f"built in {self.entry.manifest.build.seconds:.0f} s"
        expected = f" ({say_roughly(self.expected)} expected)" if self.expected else ""
        error = "" if self.error is None else f", {say_share(self.error)} off your model in fp32"
        spec = self.plan.spec
        return f"{self.plan}: {spec.backend.name} {spec.precision_name}, {built}{expected}{error}, ready"


@dataclass(frozen=True)
class Forecast:
    """What the next call on an engine takes of its device, beside the call's own tensors.

    Attributes:
        engine_bytes: memory in bytes that the engine will hold and does not hold yet.
        compares: whether it will be compared with the plain model first, which needs that model's memory too.
    """

    engine_bytes: int
    compares: bool


class EngineProvider:
    """One per process and store.

    Args:
        is_idle: whether the host has nothing else to do; see `BuildQueue`.
        preferences: what the user prefers at this moment.
        step_times: measures what engines gain, and retires those that are slower; None: nothing is measured.
        supply: where engines come from that are not built here; by default as the environment says.
        free_bytes: of a device that the host could give an engine; by default what its driver and torch call free.
        room: for builds that nobody waits for.
    """

    def __init__(
        self,
        store: EngineStore,
        backends: list[Backend] | None = None,
        is_idle: Callable[[], bool] = lambda: True,
        preferences: Callable[[], Preferences] = Preferences,
        step_times: StepTimes | None = None,
        supply: Supply | None = None,
        free_bytes: Callable[[torch.device], int | None] | None = None,
        room: DeviceRoom | None = None,
    ) -> None:
        self.store = store
        self.supply = supply or Supply.configured()
        self._missing: OrderedDict[str, tuple[str, Sequence[str]]] = OrderedDict()
        """Engines that were asked for and were not there: what each is for, and the digests of all that would do."""
        self.preferences = preferences
        self.backends = default_backends() if backends is None else backends
        self.weights_memo = WeightsMemo(store.root)
        self.history = BuildHistory(store.root)
        self.choices = ChoiceMemo(store.root)
        self.canary = Canary(store.marks)
        self.pool = EnginePool(capture_library=store.keep, canary=self.canary)
        self._used: set[str] = set()
        """Engines that this process has called."""
        self._shortages = Shortages(free_bytes)
        self._short_models: set[str] = set()
        """Engines that ran out of memory, those of VAEs left out."""
        self._overflows = Overflows(store.root)
        self._trust = Trust(store, self._overflows)
        self.sentinel = Sentinel()
        self._told: set[str] = set()
        self._active_runs = 0
        self._counting = threading.Lock()
        self._host_is_idle = is_idle
        self._room = room or DeviceRoom()
        self.queue = BuildQueue(self._build, self._is_idle, has_room=self._has_room, gives_way=self._gives_way)
        workers = WorkerPool()
        build = functools.partial(self._build, workers=workers)
        self.blocks = BlockEngines(
            store, self.canary, build, workers, is_idle=self._is_left_alone, supply=self.supply,
            has_room=self._has_room, gives_way=self._gives_way, note_wanted=self._note_wanted,
        )  # fmt: skip
        self.step_times = step_times
        if step_times is not None:
            step_times.is_busy = self._is_building

    def _is_building(self) -> bool:
        return any(queue.is_building() for queue in self.queues)

    @property
    def queues(self) -> tuple[BuildQueue, BuildQueue]:
        """Of engines of blocks, which are ready in a fraction of the time, and of whole models."""
        return self.blocks.queue, self.queue

    def end_builds(self, reason: str, seconds: float) -> None:
        """Cancel all builds, and wait for each no longer than that until nothing of it is left."""
        for queue in self.queues:
            queue.end_all(reason, seconds)
        self.blocks.workers.close()

    def _build(
        self,
        plan: Plan,
        progress: ProgressCallback,
        cancel: CancelToken,
        may_run: Callable[[], bool],
        workers: WorkerPool | None = None,
    ) -> Entry:
        entry = self.supply.pull(plan.key.digest, self.store, progress, cancel)
        if entry is None and self.supply.is_only_pulled(plan.key.digest):
            raise BackendUnavailable(f"No engine for {plan} is in {' or '.join(self.supply.urls)}, and none is built")
        entry = entry or build_engine(plan, self.store, progress, cancel, may_run, workers)
        self.canary.forget(entry.digest)
        self._used.discard(entry.digest)
        return entry

    def _is_idle(self) -> bool:
        """Not while engines of blocks are built; but what may be pulled does not wait for them."""
        if not self._is_left_alone():
            return False
        if not self.blocks.is_building:
            return True
        return any(self.supply.may_have(ticket.plan.key.digest) for ticket in self.queue.pending())

    def _is_left_alone(self) -> bool:
        """Whether nobody waits for this machine, or the user does not mind."""
        if self.preferences().background is Background.ALWAYS:
            return True
        return self._active_runs == 0 and self._host_is_idle()

    def _has_room(self, plan: Plan) -> bool:
        """Whether its memory is there; what may be pulled needs none."""
        return self.supply.may_have(plan.key.digest) or self._room.is_there(plan.device, device_bytes(plan))

    def _gives_way(self, plan: Plan) -> bool:
        return not self._is_left_alone() and self._room.is_wanted_back(plan.device)

    def with_preferences(self, settings: Settings) -> Settings:
        """The settings of one model, with `auto` replaced by what the user prefers."""
        return self.preferences().applied_to(settings)

    def run_began(self) -> None:
        """A sampling run is under way: builds that nobody waits for hold still."""
        with self._counting:
            self._active_runs += 1
        self.settle_times()

    def run_ended(self) -> None:
        with self._counting:
            self._active_runs -= 1
        self.settle_times()

    def settle_times(self) -> None:
        """See `StepTimes.settle`."""
        if self.step_times is not None:
            self.step_times.settle()

    def speed_of(self, entry: Entry) -> Speed | None:
        """How fast an engine is, as far as it is known."""
        return entry.manifest.speed if self.step_times is None else self.step_times.speed_of(entry)

    def plans(self, source: ModelSource, call: CallShape, settings: Settings) -> list[Plan]:
        """See `plan.plans`; in bf16 for a model that overflows in fp16, and with weights inside where asked for."""
        chosen = self._overflows.with_bf16(source, settings)
        found = plans(source.architecture, call, source.precision, source.device, chosen, self.backends)
        return [
            embedded_weights.baked(plan, source) if settings.bake and plan.backend.can_bake else plan for plan in found
        ]

    def offer(self, source: ModelSource, call: CallShape, settings: Settings, hooks: HostHooks) -> Offer:
        """An engine for this call, or why not. Never raises for a reason of ours, a bug of ours included.

        Raises:
            whatever `hooks.check_interrupted` raises; the build that was waited for is cancelled then.
        """
        try:
            reason = _why_blocks_alone(settings) or settings.why_not_wanted(call.shapes)
            if reason := reason or self._overflows.why_not(source, settings):
                return Offer(reason=reason)
            return self._or_in_bf16(source, settings, lambda: self._offer(source, call, settings, hooks))
        except hooks.interruptions:
            raise
        except SlipstreamError as error:
            return Offer(reason=str(error))
        except Exception as error:
            log.exception("Slipstream: looking for an engine failed with an unexpected error")
            return Offer(reason=f"Slipstream broke ({type(error).__name__}: {error}); please report this with the log")

    def _offer(self, source: ModelSource, call: CallShape, settings: Settings, hooks: HostHooks) -> Offer:
        prepared = self.prepare(source, call, settings)
        try:
            found = prepared.found or self._obtain(prepared.plans, source, settings, hooks)
        except hooks.interruptions:
            raise
        except SlipstreamError as error:
            found = str(error)
        if isinstance(found, str):
            return Offer(reason=found, build_seconds=prepared.expected)
        plan, entry = found
        self._say_if_not_baked(plan, settings)
        if hooks.by_hand:
            entry = self._forgiven(entry)
        if reason := self.why_retired(entry) or self._why_short(plan):
            if self._shortages.why_not(plan.key.digest, plan.device):
                self.pool.close_all_idle(plan.device)
            return Offer(reason=reason)
        if hooks.has_blocks and (reason := self._why_blocks_instead(entry)):
            return Offer(reason=reason, gives_way=entry)
        ready = self._ready_or_short(source, plan, entry, hooks)
        return Offer(reason=ready) if isinstance(ready, str) else Offer(ready, plan)

    def _or_in_bf16(self, source: ModelSource, settings: Settings, attempt: Callable[[], _Answer]) -> _Answer:
        """What `attempt` finds; where it finds that fp16 overflows, and may do without, what it finds then."""
        before = self._overflows.with_bf16(source, settings)
        try:
            return attempt()
        except NotFinite:
            if self._overflows.with_bf16(source, settings) == before:
                raise
        # Out here the error is gone, and with it the frames that kept tensors alive.
        return attempt()

    def _build_now(
        self, wanted: list[Plan], source: ModelSource, settings: Settings, hooks: HostHooks
    ) -> tuple[Plan, Entry]:
        for plan in wanted:
            self.queue.forget(plan)
        settings = replace(settings, policy=BuildPolicy.FIRST_USE)
        built = self._obtain(wanted, source, settings, hooks, by_hand=True)
        if isinstance(built, str):
            raise BuildFailed(f"{built[0].upper()}{built[1:]}")
        return built

    def make(
        self,
        source: ModelSource,
        call: CallShape,
        settings: Settings,
        hooks: HostHooks,
        prepared: Prepared | None = None,
    ) -> Made:
        """Build or find an engine, load it and compare it with this model, so that it is ready for the first picture.

        Args:
            prepared: what `prepare` gave for this call, where it was asked.

        Raises:
            SlipstreamError: why there is none, or that it computes something else.
        """
        if _why_blocks_alone(settings):
            raise UnsupportedModel(
                'Engines of blocks are built when a workflow first runs: set build to "first use" in the Accelerate '
                "Model node and run one step, or choose another optimize to build an engine of the whole model"
            )
        known = [prepared or self.prepare(source, call, settings)]

        def attempt() -> Made:
            return self._make(source, known.pop() if known else self.prepare(source, call, settings), settings, hooks)

        return self._or_in_bf16(source, settings, attempt)

    def _make(self, source: ModelSource, prepared: Prepared, settings: Settings, hooks: HostHooks) -> Made:
        plan, entry = prepared.found or self._build_now(prepared.plans, source, settings, hooks)
        self._say_if_not_baked(plan, settings)
        hooks.progress(Progress("verify", 1.0, "comparing the engine with the model"))
        self._shortages.forget(plan.key.digest)
        entry = self._forgiven(entry)
        ready = self._ready_or_short(source, plan, entry, hooks)
        if isinstance(ready, str):
            raise UnsupportedModel(f"{ready[0].upper()}{ready[1:]}")
        self.pool.give_back(ready)
        checked = ready.entry.manifest.verifications.get(source.weights_digest())
        error = checked.relative_error if checked else None
        return Made(plan, ready.entry, prepared.found is None, prepared.expected, error)

    def prepare(self, source: ModelSource, call: CallShape, settings: Settings) -> Prepared:
        """Plan a call, look for its engine, and foresee its build where there is none.

        Raises:
            SlipstreamError: no engine would serve.
        """
        wanted = self.plans(source, call, settings)
        found = self._find(wanted, source)
        return Prepared(wanted, found, self.estimate(wanted[0]) if found is None else None)

    def _find(self, wanted: list[Plan], source: ModelSource) -> tuple[Plan, Entry] | None:
        for plan in embedded_weights.fitting(wanted, source):
            if (entry := self.store.trusted(plan.key.digest)) is not None:
                self._say_once(plan.key.digest, f"cache hit, {plan} from {plan.key.short}")
                return plan, entry
        return None

    def _say_if_not_baked(self, plan: Plan, settings: Settings) -> None:
        if settings.bake and not embedded_weights.is_baked(plan):
            name = plan.backend.name
            self._say_once(f"bake {name}", f"bake is ignored: engines of {name} take the model's weights as they are")

    def _say_once(self, subject: str, message: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            log.info("Slipstream: %s", message)

    def _obtain(
        self, wanted: list[Plan], source: ModelSource, settings: Settings, hooks: HostHooks, by_hand: bool = False
    ) -> tuple[Plan, Entry] | str:
        """Build, pull, ask for either, or say why neither; a backend that fails gives way to the next of the chain.

        Args:
            by_hand: a person asked for it, so that a build takes the place of an engine that is not trusted.
        """
        self._note_wanted(wanted)
        if (refusal := self._why_refused(wanted, settings)) and not (by_hand or hooks.by_hand):
            return refusal
        chain = self._obtainable(wanted)
        if not chain:
            return f"there is no engine for {wanted[0]}, and {NEVER_BUILDS}"
        missing = f"no engine for {chain[0]} yet"
        if damage := self.store.damaged.get(chain[0].key.digest):
            missing = f"the engine for {chain[0]} is damaged and was set aside ({damage.rstrip('.')})"
        log.info("Slipstream: %s (%s)", missing, self.explain_miss(chain[0]))
        reasons = []
        for plan in chain:
            if reason := embedded_weights.why_not_built(plan, source, settings.policy):
                return reason
            only_pulled = not self.supply.may_build(settings.policy)
            if only_pulled and not self.supply.may_have(plan.key.digest):
                return f"{missing}; {BUILD_IT}"
            if hooks.by_hand or only_pulled or self.supply.is_only_pulled(plan.key.digest):
                self.queue.forget(plan)  # what was missing may be there
            self.supply.note_asked(plan.key.digest, not only_pulled)
            hooks.wants(plan.key.digest)
            ticket = self.queue.submit(plan, urgent=only_pulled or settings.policy is BuildPolicy.FIRST_USE)
            if ticket.estimate is None and not only_pulled:
                ticket.estimate = self.estimate(plan)
            words = say_estimate(ticket.estimate, ticket.seconds)
            if ticket.error is None and settings.policy is not BuildPolicy.FIRST_USE:
                if only_pulled:
                    return f"the engine for {plan} is being looked for in {' and '.join(self.supply.urls)}"
                if ticket.waits_for_another:
                    return f"another process is building the engine for {plan}"
                return f"the engine for {plan} is being built in the background{words}"
            if not only_pulled:
                log.info("Slipstream: building the engine for %s%s", plan, words)
            if ticket.error is None and (needed := plan.backend.build_bytes(plan.spec)) and not only_pulled:
                hooks.free_device_memory(plan.device, needed)
            try:
                return plan, self.wait_for(ticket, hooks)
            except BuildCancelled as error:
                if hooks.by_hand:
                    raise hooks.interruptions[0](str(error)) from None
                raise
            except (BuildDied, StoreError, UnsupportedModel):  # no fault of the backend
                raise
            except SlipstreamError as error:
                reasons.append(f"{plan.backend.name}: {error}")
        return f"the engine for {chain[0]} could not be {'had' if only_pulled else 'built'}. " + "; ".join(reasons)

    def _obtainable(self, wanted: list[Plan]) -> list[Plan]:
        """The plans that can be built here or may be pulled.

        Raises:
            BackendUnavailable: none can be built, and there is nothing to pull from; the message lists every reason.
        """
        pulled = [plan for plan in wanted if self.supply.may_have(plan.key.digest)]
        if self.supply.never_builds:
            return pulled
        try:
            built = _buildable(wanted)
        except BackendUnavailable:
            if not pulled:
                raise
            return pulled
        return [plan for plan in wanted if plan in built or plan in pulled]

    def _note_wanted(self, wanted: Sequence[Plan]) -> None:
        """Remember what was asked for: any of these engines would do."""
        self._missing[wanted[0].key.digest] = str(wanted[0]), [plan.key.digest for plan in wanted]
        while len(self._missing) > _MISSING_KEPT:
            self._missing.popitem(last=False)

    def missing(self) -> dict[str, str]:
        """Engines that were asked for lately and are not there, by digest, with what each is for."""
        for digest, (_, would_do) in list(self._missing.items()):
            if any(map(self.store.trusted, would_do)):
                self._missing.pop(digest, None)
        return {digest: name for digest, (name, _) in list(self._missing.items())}

    def _why_refused(self, wanted: list[Plan], settings: Settings) -> str | None:
        """Why an engine that is there is neither loaded nor built anew, and the way out."""
        may_build = self.supply.may_build(settings.policy)
        for plan in wanted:
            entry = self.store.lookup(plan.key.digest)
            if entry is not None and (reason := entry.why_untrusted()):
                if entry.why_refused(may_build):
                    return reason
                self._say_once(f"untrusted {entry.digest}", f"{reason} Another is built in its place.")
        return None

    def wait_for(self, ticket: Ticket, hooks: HostHooks) -> Entry:
        """Wait for a build with the host's progress bar; an interrupt cancels the build.

        Raises:
            SlipstreamError: the build ended without an engine.
        """
        shown: Progress | None = None
        try:
            while not ticket.wait(_WAIT_POLL_SECONDS):
                hooks.check_interrupted()
                if ticket.progress != shown:
                    shown = ticket.progress
                    hooks.progress(shown)
        except BaseException:
            ticket.cancel("the run that waited for it was interrupted")
            ticket.wait(_CANCEL_SECONDS)
            raise
        hooks.progress(Progress("load", 1.0, "engine ready" if ticket.error is None else str(ticket.error)))
        return ticket.result()

    def estimate(self, plan: Plan) -> float | None:
        """Seconds that a build will take, by earlier ones on this machine; None where nothing is known."""
        return estimate(self.history, plan)

    def forecast(self, source: ModelSource, call: CallShape, settings: Settings) -> Forecast | None:
        """How much device memory a call would need; None where there is no engine, or its size is not known.

        Raises:
            SlipstreamError: no engine would serve.
        """
        if settings.why_not_wanted(call.shapes) or self._overflows.why_not(source, settings):
            return None
        found = self.prepare(source, call, settings).found
        if found is None or not found[1].manifest.verifications:
            return None
        plan, entry = found
        self._trust.check_not_refused(source, entry)
        needed = known_device_bytes(entry)
        if self.why_retired(entry) or self._why_short(plan):
            return None
        if not needed and plan.device.type != "cpu":
            return None
        is_loaded = self.pool.has_idle(entry, plan.device)
        return Forecast(0 if is_loaded else needed, not self._trust.knows(source, entry))

    def delete(self, digest: str) -> bool:
        """Remove an engine from the store, closed first where this process only keeps it ready.

        Returns:
            Whether there was one.

        Raises:
            EngineInUse: a run needs it; nothing was deleted.
            StoreError: the store cannot be written.
        """
        self.pool.close_idle(digest)
        self.blocks.forget(digest)
        return self.store.delete(digest)

    def overflowed(self, source: ModelSource, plan: Plan) -> str:
        """Note that an engine was not finite where its inputs were; what to tell people."""
        self._overflows.note(source, plan.spec)
        precision = plan.spec.precision_name
        what = f"the engine for {plan} computed NaN or Inf in {precision}, and your model took over"
        return f"{what}. {ADVICE}" if precision == Precision.FP16.value else what

    def why_wrong(
        self, source: ModelSource, offer: Offer, inputs: Tensors, found: Tensors, wanted: Tensors
    ) -> str | None:
        """See `sentinel.why_wrong`; an engine that is wrong serves this model no more."""
        assert offer.engine is not None and offer.plan is not None
        entry = offer.engine.entry
        known = self._trust.known(source, entry)
        if reason := why_wrong(source, offer.plan.spec, known, inputs, found, wanted):
            self._trust.refuse(source, entry, IncompatibleEngine(f"The engine for {offer.plan} is not used: {reason}"))
        return reason

    def what_is_wrong(self, entry: Entry) -> SlipstreamError | None:
        """What an engine was refused for when it was compared last in this process."""
        return self._trust.what_is_wrong(entry)

    def why_retired(self, entry: Entry) -> str | None:
        """Why an engine is not used since it is slower than the model, in words; None where it is used."""
        return None if self.step_times is None else self.step_times.why_not(entry)

    def _why_blocks_instead(self, entry: Entry) -> str | None:
        return None if self.step_times is None else self.step_times.why_blocks_instead(entry)

    def _forgiven(self, entry: Entry) -> Entry:
        return entry if self.step_times is None else self.step_times.forgive(entry)

    def explain_miss(self, plan: Plan) -> str:
        """In words: what the closest engine in the store differs in."""
        return plan.key.explain_miss(self.store.list())

    def ready(self, source: ModelSource, plan: Plan, entry: Entry, hooks: HostHooks = _NO_HOOKS) -> LoadedEngine:
        """Load an engine and give it the model's weights as they are now.

        It is verified once per set of weights, and compared with the model once in every process: between two starts
        an extension may have come that changes what the model computes. One that copies weights is compared whenever
        it did.

        Raises:
            CorruptEngine, IncompatibleEngine, UnsupportedModel: it cannot serve this model.
            torch.OutOfMemoryError: memory does not suffice; what the engine held has been given back.
        """
        self._trust.check_not_refused(source, entry)  # before memory is spent on it
        self._check_not_fatal(entry)
        if (needed := known_device_bytes(entry)) and not self.pool.has_idle(entry, source.device):
            hooks.free_device_memory(source.device, needed)
        watch = MemoryWatch(source.device)
        bound = source.bind(plan.spec.precision)  # before memory is spent on an engine that could not have its weights
        try:
            loaded = self._taken(plan, entry, source)
        except BaseException:
            bound.release()
            raise
        try:
            loaded.bind(bound)
            with self._first_call_watched(plan, loaded):
                self._trust.prove(source, plan, loaded)
        except BaseException as error:
            ran_out = watch.ran_out(error)
            if ran_out or _may_be_spoiled(loaded, error):
                self.pool.discard(loaded)
            else:
                self.pool.give_back(loaded)
            if not ran_out or isinstance(error, torch.OutOfMemoryError):
                raise
            raise torch.OutOfMemoryError(str(error)) from None
        self.store.touch(entry)
        self.pool.on_change(source.device)
        return loaded

    def _check_not_fatal(self, entry: Entry) -> None:
        """
        Raises:
            IncompatibleEngine: earlier processes ended when they used this engine, without CUDA graphs.
        """
        death = self.canary.death_of(entry.digest)
        if death is not None and not death.with_graphs:
            raise IncompatibleEngine(
                f"The engine {entry.manifest.label} is not used: {death}. Choose Try again on it in the sidebar, or "
                "delete it there to have it built anew"
            )

    def _taken(self, plan: Plan, entry: Entry, source: ModelSource) -> LoadedEngine:
        """An engine of the pool; loading native code for the first time is watched."""
        if entry.digest in self._used:
            return self.pool.take(plan, entry, source.device)
        with_graphs = is_graphed(plan, plan.device) and self.canary.death_of(entry.digest) is None
        with self.canary.watching(entry.digest, LOAD, with_graphs):
            return self.pool.take(plan, entry, source.device)

    @contextmanager
    def _first_call_watched(self, plan: Plan, loaded: LoadedEngine) -> Iterator[None]:
        """Meanwhile the first call of an engine that this process has not called yet is watched."""
        engine, digest = loaded.engine, loaded.entry.digest
        if digest in self._used:
            yield
            return
        with_graphs = is_graphed(plan, plan.device) and loaded.canary.allows_graphs
        loaded.engine = first = FirstCall(engine, loaded.device, lambda: self.canary.watching(digest, USE, with_graphs))
        try:
            yield
        finally:
            loaded.engine = engine
            if first.is_over:
                self._used.add(digest)

    def try_again(self, digest: str) -> None:
        """Use an engine again, with CUDA graphs, although a process ended when it was used before.

        This holds from the next run on: an engine in use is closed when its run ends.
        """
        self.canary.forget(digest)
        self._used.discard(digest)
        self.blocks.forget(digest)
        self.pool.close_idle(digest)

    def _ready_or_short(self, source: ModelSource, plan: Plan, entry: Entry, hooks: HostHooks) -> LoadedEngine | str:
        """Like `ready`; or that memory ran out, in words."""
        if not self.pool.has_idle(entry, source.device):
            disturb()
        try:
            return self.ready(source, plan, entry, hooks)
        except torch.OutOfMemoryError as error:
            log.debug("Slipstream: %s", error)
        # Out here the error is gone, and with it the frames that kept tensors alive.
        return self._short(plan, known_device_bytes(entry), hooks)

    def out_of_memory(self, offer: Offer, hooks: HostHooks) -> str:
        """Close an engine that ran out of memory in a run, so that the plain model has room; what to tell people."""
        assert offer.engine is not None and offer.plan is not None
        needed = max(offer.engine.engine.device_bytes, known_device_bytes(offer.engine.entry))
        self.pool.discard(offer.engine)
        return self._short(offer.plan, needed, hooks)

    def _why_short(self, plan: Plan) -> str | None:
        """Why the engine is left alone for want of memory."""
        if reason := self._shortages.why_not(plan.key.digest, plan.device):
            return reason
        if plan.spec.role in _OF_VAES and self._shortages.is_any(plan.device, self._short_models):
            # Each picture's sampling would close it again.
            return (
                "GPU memory did not suffice for an engine of the diffusion model, which needs what this one would hold"
            )
        return None

    def _short(self, plan: Plan, needed: int, hooks: HostHooks) -> str:
        hooks.drop_copies(plan.device)
        if plan.spec.role not in _OF_VAES:
            self._short_models.add(plan.key.digest)
        self.pool.free(plan.device, math.inf)  # the plain model needs the room more than engines that wait
        give_back_unused(plan.device)
        return self._shortages.note(plan.key.digest, plan.device, needed)


_OF_VAES = Role.VAE_ENCODE, Role.VAE_DECODE


def _why_blocks_alone(settings: Settings) -> str | None:
    """Why no engine of the whole model is wanted."""
    if settings.optimize is not Optimize.BLOCKS:
        return None
    if settings.quantised is not None:
        return "engines of blocks do not compute in 8 bits; choose another optimize, or precision auto"
    return "the node asks for engines of blocks alone"


def _may_be_spoiled(loaded: LoadedEngine, error: BaseException) -> bool:
    """Whether its copies of weights may be wrong, so that the next run had better load it anew."""
    return loaded.engine.copies_weights and not isinstance(error, UnsupportedModel)


def known_device_bytes(entry: Entry) -> int:
    """Bytes of device memory that the engine held when it was verified; 0 where that was not recorded."""
    verified = (known.device_bytes for known in entry.manifest.verifications.values())
    return max(verified, default=int(entry.manifest.details.get("device_bytes", 0)))


def _buildable(wanted: list[Plan]) -> list[Plan]:
    """The plans whose backends can build here.

    Raises:
        BackendUnavailable: none can; the message lists every reason.
    """
    plans, reasons = [], []
    for plan in wanted:
        reason = plan.backend.why_cannot_build(plan.device) or plan.backend.why_unsupported(plan.spec)
        if reason is None:
            plans.append(plan)
        else:
            reasons.append(f"{plan.backend.name}: {reason}")
    if not plans:
        raise BackendUnavailable("No engine can be built on this machine. " + "; ".join(reasons))
    return plans
