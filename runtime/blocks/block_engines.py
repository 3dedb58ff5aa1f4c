"""Looks engines of blocks up, has them built several at once, and loads them, while the model runs on as it is."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...compile_backend.blocks.backend import BlockBackend
from ...compile_backend.blocks.engine import BlockEngine, Inputs, Ones, ones_of
from ...compile_backend.blocks.program import BlockArchitecture
from ...compile_backend.blocks.triton_backend import TritonBlockBackend
from ...core.errors import BackendUnavailable, BuildDied, BuildOutOfMemory, SlipstreamError, StoreError
from ...core.progress import Progress, ProgressCallback
from ...core.spec import Optimize, Precision
from ...engine_cache import BuildHistory, EngineStore, Entry
from ..building.build_queue import ENDED, BuildFunction, BuildQueue, Ticket, TicketState
from ..building.supply import NEVER_BUILDS, Supply
from ..building.worker_pool import WorkerPool
from ..loaded.canary import LOAD, USE, Canary
from ..planning.build_estimate import estimate
from ..planning.plan import Plan
from ..settings.model_settings import BuildPolicy
from .block_plans import BlockPlan, block_plans, lent_plans

log = logging.getLogger(__name__)

_MOST_BUILDS = 64
"""Engines that a process has built for one kind of block and form of its calls; if calls differ more, no more are."""

_WORKER_BYTES = 2 << 30
"""Memory of a build process."""

BUILD_DEVICE_BYTES = 1 << 30
"""Device memory of the build of one block: its process's CUDA context, and the tensors on which kernels are tried."""

_WITHOUT_MEASURE = 4
"""Builds at once where the system does not say how much memory is free."""

_POLL_SECONDS = 0.1


_BY_HAND = "its engine is not built yet, and builds are asked for by hand"

_NO_FAULT = BackendUnavailable, BuildDied, BuildOutOfMemory, StoreError
"""Errors of builds that say nothing about what was built."""


@dataclass
class AwaitedBuild:
    """The build that an offer waits for, or waited for last; None where it needed none so far."""

    ticket: Ticket | None = None


@dataclass
class BlockOffer:
    """What may compute the calls of one kind of block in one form and one set of shapes.

    Attributes:
        inputs: shape and dtype of each.
        precision: that the block computes in.
        engine: None where there is none yet, or none may be used.
        reason: why there is none, for people.
        is_coming: whether it is being looked up, built or loaded.
        is_trusted: whether it gave what the block itself gave, in this process.
        is_final: whether there will be none in this process; if not, a later run may ask again.
        digest: of the engine; empty where there is none.
        is_lent: whether the engine is for more than one of what there is one of here, such as pictures of a batch.
        build: that it waits for, or waited for.
        told: what the host tells functions that its engine calls; noted when the engine is compared.
    """

    architecture: BlockArchitecture
    inputs: Inputs
    precision: Precision
    engine: BlockEngine | None = None
    reason: str = "its engine is being looked up"
    is_coming: bool = True
    is_trusted: bool = False
    is_final: bool = True
    digest: str = ""
    is_lent: bool = False
    build: AwaitedBuild = field(default_factory=AwaitedBuild)
    told: Any = None

    def serve(self, digest: str, engine: BlockEngine, is_lent: bool = False) -> None:
        """Use an engine."""
        self.digest, self.engine, self.is_lent, self.is_coming, self.reason = digest, engine, is_lent, False, ""

    def refuse(self, reason: str, is_final: bool = True) -> None:
        """Use no engine, in this process or until a later run asks again."""
        self.engine, self.reason, self.is_final, self.is_coming = None, reason, is_final, False


@dataclass
class _Wish:
    """What an offer waits for.

    Attributes:
        lent: plans of engines for larger calls that may do; none of them is built for this one.
    """

    offer: BlockOffer
    plans: list[BlockPlan]
    policy: BuildPolicy
    by_hand: bool
    lent: Sequence[BlockPlan] = ()


@dataclass
class BlockEngines:
    """One per process and store.

    Args:
        build: makes one engine.
        workers: in which it does; closed whenever nothing is left to be built.
        is_idle, has_room, gives_way: see `BuildQueue`.
        supply: where engines come from that are not built here.
        note_wanted: told of engines that are asked for and not built here; any of them would do.
        spare: makes engines where `backend` lacks what it builds with, such as a C++ compiler.

    Attributes:
        queue: of builds, several of which run at once.
    """

    store: EngineStore
    canary: Canary
    build: BuildFunction
    workers: WorkerPool
    backend: BlockBackend = field(default_factory=BlockBackend)
    is_idle: Callable[[], bool] = lambda: True
    supply: Supply = field(default_factory=Supply)
    spare: BlockBackend = field(default_factory=TritonBlockBackend)
    has_room: Callable[[Plan], bool] = lambda plan: True
    gives_way: Callable[[Plan], bool] = lambda plan: False
    note_wanted: Callable[[Sequence[Plan]], None] = lambda plans: None

    def __post_init__(self) -> None:
        self.queue = BuildQueue(self.build, self.is_idle, self._builds_at_once, self.has_room, self.gives_way)
        self.queue.listen(self._on_ticket)
        self._history = BuildHistory(self.store.root)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="slipstream-blocks")
        self._engines: dict[tuple[str, torch.device], BlockEngine] = {}
        self._refused: dict[str, str] = {}
        self._created: dict[str, str] = {}
        """When the engines were made that are loaded, or could not be loaded."""
        self._withdrawn: weakref.WeakSet[BlockEngine] = weakref.WeakSet()
        """Engines that were found wrong, or failed."""
        self._waiting: dict[Ticket, list[_Wish]] = {}
        self._retried: dict[str, Ticket] = {}
        """Builds that ran out of memory while there may have been others, by digest: each is tried once more."""
        self._one_at_a_time = False
        """Until all is built, since some of them did."""
        self._room = 0
        """How many builds there was memory for when the first of those that run began."""
        self._asked: dict[str, set[str]] = {}
        """Digests of the engines whose builds were asked for, by the kind of block."""
        self._unfit: set[tuple[str, Ones]] = set()
        """Engines that were lent to calls which they do not fit, by what there is one of in these."""
        self._lock = threading.Lock()

    def why_unavailable(self, device: torch.device) -> str | None:
        """What this machine lacks to run engines of blocks; None when nothing does."""
        return self.backend.why_unavailable(device)

    def offer(
        self,
        architecture: BlockArchitecture,
        dtypes: tuple[torch.dtype, ...],
        precision: Precision,
        device: torch.device,
        optimize: Optimize,
        policy: BuildPolicy,
        by_hand: bool = False,
    ) -> BlockOffer:
        """What may compute calls of this shape: filled in as soon as its engine is found, or built, and loaded.

        Args:
            architecture: with the call's shapes as its example.
            by_hand: a person asked for it: earlier failures are ignored.
        """
        inputs = tuple(
            (torch.Size(shape), dtype) for shape, dtype in zip(architecture.example.values(), dtypes, strict=True)
        )
        offer = BlockOffer(architecture, inputs, precision)
        try:
            self._loader.submit(self._begin, offer, dtypes, precision, device, optimize, policy, by_hand)
        except RuntimeError:  # as in `_on_ticket`
            offer.refuse("this process is ending")
        return offer

    def _begin(
        self,
        offer: BlockOffer,
        dtypes: tuple[torch.dtype, ...],
        precision: Precision,
        device: torch.device,
        optimize: Optimize,
        policy: BuildPolicy,
        by_hand: bool,
    ) -> None:
        try:
            by_backend = [
                block_plans(offer.architecture, dtypes, precision, device, optimize, backend)
                for backend in (self.backend, self.spare)
            ]
            plans = [*itertools.chain(*by_backend)]
            lent: list[BlockPlan] = []
            if by_hand:  # who builds for other processes leaves them engines of their own
                self._forgive(plans)
            elif not any(self.store.trusted(plan.key.digest) and self._is_wanted(plan) for plan in plans):
                lent = [plan for of_any, *_ in by_backend for plan in lent_plans(of_any)]
            self._bring(_Wish(offer, plans, policy, by_hand, lent))
        except Exception as error:  # whatever it is: the block runs as it is
            log.debug("Slipstream: a block runs without an engine", exc_info=True)
            offer.refuse(str(error) or type(error).__name__)

    def _forgive(self, plans: list[BlockPlan]) -> None:
        """Forget what went wrong with engines, unless that ended a process."""
        for plan in plans:
            self._refused.pop(plan.key.digest, None)
            self.queue.forget(plan)

    def _bring(self, wish: _Wish) -> None:
        """Load an engine for an offer, or have one pulled or built; that for all sizes before that for one."""
        if self._borrow(wish):
            return None
        reason, is_final, are_others_equal = "", True, False
        lacking: list[BlockPlan] = []
        may_build = self.supply.may_build(wish.policy)
        for plan in filter(self._is_wanted, wish.plans):
            if plan.of_such and not are_others_equal:
                continue
            digest = plan.key.digest
            found = self.store.lookup(digest)
            if found is not None and not wish.by_hand and (refusal := found.why_refused(may_build)):
                return wish.offer.refuse(refusal, is_final=False)
            if (entry := self.store.trusted(digest)) is not None:
                engine = self._loaded(plan, entry)
                if isinstance(engine, str):  # one for this size alone might be no better
                    return wish.offer.refuse(engine, is_final=False)
                if engine.accepts(wish.offer.inputs):
                    return wish.offer.serve(digest, engine)
                are_others_equal = engine.takes_others_for_equal(wish.offer.inputs)
                continue
            if (why_not := self._why_not_asked_for(plan, may_build)) is not None:
                reason, is_final = why_not, is_final and may_build
                lacking += [] if may_build else [plan]
                continue
            ticket = self._asked_for(plan, wish, may_build)
            if ticket.error is None:
                return self._wait_for(ticket, wish)
            reason, is_final = str(ticket.error), is_final and not isinstance(ticket.error, _NO_FAULT)
        if lacking:
            self.note_wanted(lacking)
        wish.offer.refuse(reason or "no engine takes calls of this shape", is_final)

    def _borrow(self, wish: _Wish) -> bool:
        """Have an engine for larger calls serve these, or wait for its build. Whether there is one."""
        inputs = wish.offer.inputs
        left = [plan for plan in wish.lent if (plan.key.digest, ones_of(inputs)) not in self._unfit]
        for plan in left:
            if (entry := self.store.trusted(plan.key.digest)) is not None and self._is_wanted(plan):
                engine = self._loaded(plan, entry)
                if not isinstance(engine, str) and engine.accepts(inputs, ones_too=True):
                    wish.offer.serve(plan.key.digest, engine, is_lent=True)
                    return True
        tickets = (self.queue.find(plan.key.digest) for plan in left)
        ticket = next((each for each in tickets if each is not None and each.state not in ENDED), None)
        if ticket is not None:
            self._wait_for(ticket, wish)
        return ticket is not None

    def _is_wanted(self, plan: BlockPlan) -> bool:
        """Not if it is of `spare` without need, which is asked last, since finding that out takes time."""
        if plan.backend is not self.spare:
            return True
        needed = self.backend.why_cannot_build(plan.device) is not None
        return needed and self.spare.why_unavailable(plan.device) is None

    def _why_not_asked_for(self, plan: BlockPlan, may_build: bool) -> str | None:
        """Why an engine that is missing is neither pulled nor built; None where it may be."""
        if not self.supply.may_have(plan.key.digest):
            if not may_build:
                return f"its engine is missing, and {NEVER_BUILDS}" if self.supply.never_builds else _BY_HAND
            if reason := plan.backend.why_cannot_build(plan.device):
                return reason
        if may_build and not self._is_worth_a_build(plan):
            return f"{_MOST_BUILDS} engines were built for other calls of it, whose sizes differ too much"
        return None

    def _asked_for(self, plan: BlockPlan, wish: _Wish, may_build: bool) -> Ticket:
        digest = plan.key.digest
        if not may_build or self.supply.is_only_pulled(digest):
            self.queue.forget(plan)  # what was missing may be there
        self.supply.note_asked(digest, may_build)
        is_new = may_build and self.queue.find(digest) is None and self.queue.failure(digest) is None
        if is_new and log.isEnabledFor(logging.INFO):
            log.info("Slipstream: no engine for %s yet (%s)", plan, plan.key.explain_miss(self.store.list()))
        expected = estimate(self._history, plan) if is_new else None
        ticket = self.queue.submit(plan, urgent=not may_build or wish.policy is BuildPolicy.FIRST_USE)
        ticket.estimate = ticket.estimate or expected
        return ticket

    def _is_worth_a_build(self, plan: BlockPlan) -> bool:
        """Whether few enough engines were asked for by other calls of the same kind; called by the loader alone."""
        asked = self._asked.setdefault(plan.spec.fingerprint.architecture, set())
        if plan.key.digest not in asked and len(asked) >= _MOST_BUILDS:
            return False
        asked.add(plan.key.digest)
        return True

    def _wait_for(self, ticket: Ticket, wish: _Wish) -> None:
        wish.offer.reason = "its engine is being built"
        wish.offer.build.ticket = ticket
        with self._lock:
            self._waiting.setdefault(ticket, []).append(wish)
        if ticket.state in ENDED:  # it ended before anybody listened
            self._on_ticket(ticket)

    def _on_ticket(self, ticket: Ticket) -> None:
        if ticket.state not in ENDED:
            return
        with self._lock:
            wishes = self._waiting.pop(ticket, [])
        with contextlib.suppress(RuntimeError):  # the process is ending: nothing can be begun any more
            for wish in wishes:
                self._loader.submit(self._built, ticket, wish)
            self._loader.submit(self._close_workers)

    def _close_workers(self) -> None:
        if not self.queue.pending():
            self.workers.close()
            self._one_at_a_time = False

    def _built(self, ticket: Ticket, wish: _Wish) -> None:
        try:
            if ticket.state is TicketState.DONE:
                return self._bring(wish)
            if isinstance(ticket.error, (BuildOutOfMemory, BuildDied)):  # the system may have ended it for its memory
                self._one_at_a_time = True
            ran_out, digest = isinstance(ticket.error, BuildOutOfMemory), ticket.plan.key.digest
            if ticket.state is not TicketState.CANCELLED and digest in {plan.key.digest for plan in wish.lent}:
                return self._bring(replace(wish, lent=()))
            if ran_out and self._retried.setdefault(digest, ticket) is ticket:
                self.queue.forget(ticket.plan)
                return self._bring(wish)
            reason = str(ticket.error or "its build ended without an engine")
            rest = [
                plan for plan in wish.plans if plan.key.digest != digest and self._is_wanted(plan) and not plan.of_such
            ]
            is_no_fault = ticket.state is TicketState.CANCELLED or isinstance(ticket.error, _NO_FAULT)
            if not rest or (is_no_fault and not isinstance(ticket.error, BackendUnavailable)):
                return wish.offer.refuse(reason, is_final=not is_no_fault)
            self._bring(replace(wish, plans=rest))  # what cannot be had for all sizes may be had for one
        except Exception as error:  # as above
            log.debug("Slipstream: a block runs without an engine", exc_info=True)
            wish.offer.refuse(str(error) or type(error).__name__)

    def _loaded(self, plan: BlockPlan, entry: Entry) -> BlockEngine | str:
        """The engine of an entry; or why it cannot be used."""
        digest, place = entry.digest, (entry.digest, plan.device)
        if self._created.get(digest) != entry.manifest.created:
            self.forget(digest)
        self._created[digest] = entry.manifest.created
        if (reason := self._refused.get(digest)) is not None:
            return reason
        if place not in self._engines:
            if (death := self.canary.death_of(digest)) is not None and not death.with_graphs:
                return self._refuse(digest, f"its engine is not used: {death}")
            try:
                entry.verify_files()
                with self.canary.watching(digest, LOAD, False):
                    self._engines[place] = plan.backend.load_block(entry.artifact, plan.device)
            except SlipstreamError as error:
                return self._refuse(digest, str(error))
            self.store.touch(entry)
        return self._engines[place]

    def _refuse(self, digest: str, reason: str) -> str:
        self._refused[digest] = reason
        return reason

    def forget(self, digest: str) -> None:
        """An engine is to be tried again, was deleted, or another one took its place: the next run looks for it."""
        self._refused.pop(digest, None)
        with self._lock:
            self._unfit = {(other, ones) for other, ones in self._unfit if other != digest}
        for place in [place for place in self._engines if place[0] == digest]:
            self._engines.pop(place, None)

    def first_use(self, offer: BlockOffer) -> AbstractContextManager[None]:
        """Around the first call of an engine in this process: should that end the process, no other one tries."""
        return self.canary.watching(offer.digest, USE, False)

    def refuse(self, offer: BlockOffer, reason: str) -> None:
        """An engine was found wrong, or failed: no call goes to it until somebody wants it tried, see `forget`.

        One that is lent goes on serving the calls that it was built for.
        """
        if offer.is_lent:
            log.debug("Slipstream: an engine of blocks is not used for one of what it is for several of: %s", reason)
            with self._lock:
                self._unfit.add((offer.digest, ones_of(offer.inputs)))
            return offer.refuse(reason, is_final=False)
        log.warning("Slipstream: an engine of blocks is not used: %s", reason)
        self._refuse(offer.digest, reason)
        if offer.engine is not None:
            self._withdrawn.add(offer.engine)
        offer.refuse(reason, is_final=False)

    def is_refused(self, offer: BlockOffer) -> bool:
        """Whether the engine of an offer was refused for other calls."""
        is_unfit = offer.is_lent and bool(self._unfit) and (offer.digest, ones_of(offer.inputs)) in self._unfit
        return offer.engine in self._withdrawn or is_unfit

    @property
    def is_building(self) -> bool:
        return bool(self.queue.pending())

    def wait_for(
        self, offers: Iterable[BlockOffer], progress: ProgressCallback, check_interrupted: Callable[[], None]
    ) -> None:
        """Wait until no offer is coming any more; builds for them no longer wait for the host to be idle.

        Raises:
            whatever `check_interrupted` raises; what is being built goes on being built.
        """
        wanted = [offer for offer in offers if offer.is_coming]
        if wanted:
            log.info("Slipstream: waiting for %d engines of blocks, %d builds at once", len(wanted), builds_at_once())
        began = time.monotonic()
        while left := [offer for offer in wanted if offer.is_coming]:
            check_interrupted()
            self._hurry(left)
            done = len(wanted) - len(left)
            message = f"building engines of blocks, {done} of {len(wanted)} done"
            progress(Progress("compile", done / len(wanted), message))
            time.sleep(_POLL_SECONDS)
        if wanted:
            ready = sum(offer.engine is not None for offer in wanted)
            log.info(
                "Slipstream: %d of %d engines of blocks are ready after %.0f s",
                ready, len(wanted), time.monotonic() - began,
            )  # fmt: skip

    def _hurry(self, offers: Iterable[BlockOffer]) -> None:
        awaited = {id(offer) for offer in offers}
        with self._lock:
            for ticket, wishes in self._waiting.items():
                if any(id(wish.offer) in awaited for wish in wishes):
                    self.queue.hurry(ticket)

    def _builds_at_once(self) -> int:
        if self._one_at_a_time:
            return 1
        pending = self.queue.pending()
        by_memory = min(_by_memory({ticket.plan.device for ticket in pending}))
        # Of those that run some have not allocated theirs yet.
        if running := sum(ticket.state is TicketState.RUNNING for ticket in pending):
            by_memory = min(by_memory + running, max(by_memory, self._room))
        self._room = by_memory
        return builds_at_once(is_hurried=any(ticket.urgent for ticket in pending), by_memory=by_memory)


def builds_at_once(is_hurried: bool = True, by_memory: int | None = None) -> int:
    """How many builds this machine has cores and memory for.

    Args:
        is_hurried: somebody waits for them: one more than there are cores, as each waits now and then. Else they take
            half of the cores and a quarter of the memory: what they hold is held while pictures are made, too.
        by_memory: how many there is memory for, those that run among them; None: counted now, on
            torch's current GPU.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if by_memory is None:
        by_memory = min(_by_memory())
    return max(1, min(cores + 1, by_memory) if is_hurried else min(cores // 2, by_memory // 4))


def _by_memory(devices: Iterable[torch.device] = (torch.device("cuda"),)) -> Iterable[int]:
    """How many builds main memory has room for, and each of these devices; by default torch's current GPU."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        yield (kilobytes << 10) // _WORKER_BYTES
    except (OSError, StopIteration, ValueError):  # no Linux
        yield _WITHOUT_MEASURE
    for device in devices:
        if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_initialized():
            free, _ = torch.cuda.mem_get_info(device)
            yield free // BUILD_DEVICE_BYTES
