"""The eager module with engines beside it: each call goes to an engine that fits, or to eager with a reason."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from ..core.dtypes import dtype_of
from ..core.errors import NotFinite, UnsupportedModel
from ..core.protocols import ModelSource, Tensors
from ..core.spec import EngineSpec, Precision
from .checking.sentinel import StartAgain
from .checking.step_timers import CallTimer, is_on_purpose
from .checking.step_times import EngineId, TimedStep, id_of
from .checking.verify import is_finite
from .loaded.cuda_graphs import is_inlined
from .loaded.device_clock import disturb
from .loaded.device_memory import MemoryWatch
from .planning.engine_shapes import batch_of, largest_batch
from .planning.plan import CallShape, Plan
from .provider import EngineProvider, HostHooks, Offer
from .reporting.status import EngineUse, Status
from .settings.model_settings import BuildPolicy, Settings

log = logging.getLogger(__name__)


def say_plain(reason: str) -> None:
    """Log why the host's own model computes."""
    log.warning("Slipstream runs your model without an engine: %s", reason)


class AcceleratedModule:
    """One accelerated model of a workflow; lives as long as the node's output.

    It holds no tensors: the live model comes with every run.

    Args:
        by_hand: see `HostHooks`.

    Attributes:
        chosen: the node's own settings.
        asked: the settings of the last run.
        host_precision: that the model had in it; None before that.
        build_seconds: how long a build of the engine that was missing last is expected to take; None where no earlier
            build tells.
    """

    def __init__(self, provider: EngineProvider, settings: Settings, by_hand: bool = False) -> None:
        self.provider = provider
        self.chosen = settings
        self.by_hand = by_hand
        self.status = Status()
        self.asked = self.settings
        self.host_precision: Precision | None = None
        self.build_seconds: float | None = None

    def __deepcopy__(self, memo: object) -> AcceleratedModule:
        """A copy of a model that was accelerated goes by the same settings, and counts its calls here."""
        return self

    @property
    def settings(self) -> Settings:
        """What the user chose for it, and where that is `auto`, for everything; asked anew in each run."""
        return self.provider.with_preferences(self.chosen)

    def count_eager(self, reason: str) -> None:
        """Count a call that the host's own model answers, and log the reason where it is a new one."""
        if self.status.count_eager(reason):
            say_plain(reason)

    @contextmanager
    def run(
        self,
        source: ModelSource,
        hooks: HostHooks | None = None,
        *,
        finite_only: bool = False,
        settings: Settings | None = None,
        cold_calls: int | None = None,
        conditions: Hashable = None,
        can_start_again: bool = False,
        is_part: bool = False,
    ) -> Iterator[Run]:
        """One sampling run: weights stay as they are inside it, and engines are swapped only between runs.

        Args:
            cold_calls: its calls are timed, but for so many at the beginning; None: they are not.
            finite_only: look at each result of an engine, which waits for it: where finite inputs give NaN or
                Inf, the plain model computes instead, and fp16 is not used again for this model.
            settings: of a run that this one is a part of; None: as they are now.
            conditions: what else of the run may change what its model computes; see `Sentinel`.
            can_start_again: the caller catches `StartAgain`, and then samples again from the beginning.
            is_part: its calls are parts of another run's, and are not counted as calls of their own.
        """
        run = Run(
            self, source, hooks or HostHooks(), finite_only, settings, cold_calls, conditions, can_start_again, is_part
        )
        self.provider.run_began()
        try:
            yield run
        finally:
            try:
                run.close()
            finally:
                self.provider.run_ended()


@dataclass(frozen=True)
class Answer:
    """Who answered a call.

    Attributes:
        engine: None for the plain model.
        is_vetoed: no engine might have answered, nor those of blocks.
    """

    engine: EngineId | None = None
    is_vetoed: bool = False


@dataclass(frozen=True)
class ByBlocks:
    """How a call without an engine of the whole model was computed by engines of its blocks.

    Attributes:
        share: how much of it, in words.
        engine: see `id_of_blocks`; None where the call took part in anything that is no ordinary call, such as a
            comparison.
        is_steady: all calls such as this one are the same work, also where no engine of the whole model may answer.
    """

    share: str
    engine: EngineId | None
    is_steady: bool = False


class Waiting(str):
    """Why no engine of its blocks had a part in a call, where some will soon."""


@dataclass(frozen=True)
class Served:
    """One call that an engine answered in a run."""

    run: Run
    offer: Offer

    def count(self) -> None:
        """Count it once more."""
        self.run.count(self.offer)


_local = threading.local()


def _noting() -> list[Served] | None:
    return getattr(_local, "served", None)


@contextmanager
def noted() -> Iterator[list[Served]]:
    """Meanwhile calls that engines answer in this thread, in whatever run, are put into a list and not counted."""
    before, served = _noting(), list[Served]()
    _local.served = served
    try:
        yield served
    finally:
        _local.served = before


class Run:
    """The calls of one sampling run. See `AcceleratedModule.run`.

    Attributes:
        answers: who answered its calls, in their order; a large batch may take several answers of an engine.
        settings: as they were when it began: what the user prefers meanwhile is for the next run.
        by_blocks: how the call was computed that was just computed without an engine of the whole model; in words why
            no engine had a part in it, or None where none was wanted.
        why_not_whole: why no engine of the whole model is looked for; None where one is.
        last: what computed the last call, where calls are timed.
        wrong: what was wrong with an engine of this run; then none is asked any more.
        has_to_start_again: it was raised.
        is_part: its calls are parts of another run's.
    """

    def __init__(
        self,
        module: AcceleratedModule,
        source: ModelSource,
        hooks: HostHooks,
        finite_only: bool = False,
        settings: Settings | None = None,
        cold_calls: int | None = None,
        conditions: Hashable = None,
        can_start_again: bool = False,
        is_part: bool = False,
    ) -> None:
        self.wrong: str | None = None
        self.has_to_start_again = False
        self.is_part = is_part
        self._can_start_again = can_start_again
        self._conditions = conditions
        self._served = 0
        self.answers: list[Answer] = []
        self._timer: CallTimer | None = None
        if cold_calls is not None and (times := module.provider.step_times) is not None:
            self._timer = CallTimer(times, source.device, cold_calls)
        self.by_blocks: Callable[[], ByBlocks | str] | None = None
        self.why_not_whole: str | None = None
        self.last: TimedStep | None = None
        self._may_give_way = True
        """Whether engines that are slower than those of blocks leave calls to them."""
        self.settings = module.asked = settings or module.settings
        module.host_precision = _precision_of(source)
        self._finite_only = finite_only
        self._module = module
        self._source = source
        self._wanted = ""
        self._requested: dict[CallShape, str] = {}
        self._hooks = replace(hooks, by_hand=module.by_hand)
        self._offers: dict[CallShape, Offer] = {}
        self._computed: set[CallShape] = set()

    def __call__(
        self,
        inputs: Tensors,
        eager: Callable[[], Tensors],
        veto: str | None = None,
        beside: Callable[[], Tensors] | None = None,
    ) -> Tensors:
        """Compute one call.

        Args:
            inputs: the model's inputs by name, as the host passes them.
            eager: the host's own module on the same inputs.
            veto: why this call cannot go to an engine, for reasons that only the host knows.
            beside: like `eager`, and leaves whatever it is given as it is; None where it cannot be had.
        """
        if self._timer is None or is_inlined():
            return self._answer(inputs, eager, veto, beside)
        before = len(self.answers)

        def done() -> TimedStep:
            self.last = self._step_of(inputs, before)
            return self.last

        return self._timer(lambda: self._answer(inputs, eager, veto, beside), done)

    def _answer(
        self,
        inputs: Tensors,
        eager: Callable[[], Tensors],
        veto: str | None,
        beside: Callable[[], Tensors] | None,
    ) -> Tensors:
        if is_on_purpose():
            computed = eager()
            self._module.status.count_on_purpose()
            self.answers.append(Answer())
            return computed
        veto = veto or self.wrong
        is_first, is_due = not self._served, beside is not None and veto is None and self._is_due(inputs)
        result = self.ask(inputs) if veto is None else veto
        if not isinstance(result, str):
            return self._held_against(result, inputs, beside, is_first) if beside is not None and is_due else result
        if self.by_blocks is None:
            self._module.count_eager(result)
            computed = eager()
            self.answers.append(Answer(is_vetoed=veto is not None))
            return computed
        is_new = self._module.status.count_eager(result)
        computed = eager()
        self.answers.append(self._answer_by_blocks(self.by_blocks(), result, veto, is_new))
        return computed

    def _answer_by_blocks(self, by_blocks: ByBlocks | str, reason: str, veto: str | None, is_new: bool) -> Answer:
        """Who answered a call that was counted as eager, whose blocks may have been on engines.

        Args:
            reason: for which no engine of the whole model answered.
            is_new: whether it is given for the first time.
        """
        status = self._module.status
        if isinstance(by_blocks, ByBlocks):
            status.count_blocks(reason, by_blocks.share, by_blocks.engine)
            engine = by_blocks.engine if veto is None or by_blocks.is_steady else None
            return Answer(engine, is_vetoed=engine is None)
        if veto is None:
            self._take_back(for_good=not isinstance(by_blocks, Waiting))
        if by_blocks != reason:
            fuller = f"{reason}; none of its blocks runs on one: {by_blocks}"
            is_new, reason = status.explain_eager(reason, fuller), fuller
        if is_new:
            say_plain(reason)
        return Answer(is_vetoed=veto is not None)

    def _take_back(self, for_good: bool) -> None:
        """No engine of blocks had a part: those of the whole model that gave way answer the run's next calls.

        Args:
            for_good: in other runs, too.
        """
        self._may_give_way, times = False, self._module.provider.step_times
        for call, offer in [*self._offers.items()]:
            if offer.gives_way is not None:
                del self._offers[call]
                if for_good and times is not None:
                    times.take_back(offer.gives_way)

    @property
    def is_to_be_compared(self) -> bool:
        """Whether the next call is to be computed both ways.

        Where sampling cannot begin anew, only a call before which no engine served: so no picture has a wrong part.
        """
        is_possible = self._can_start_again or not self._served
        return is_possible and self._module.provider.sentinel.is_due(self._case)

    def _is_due(self, inputs: Tensors) -> bool:
        """Whether an engine answers this call, and is to be compared: else no weights are read to know the case."""
        return self.offer_for(CallShape.of(inputs)).engine is not None and self.is_to_be_compared

    @functools.cached_property
    def _case(self) -> Hashable:
        source = self._source
        return source.architecture.fingerprint, source.weights_digest(), source.is_patched, self._conditions

    def _held_against(self, found: Tensors, inputs: Tensors, beside: Callable[[], Tensors], is_first: bool) -> Tensors:
        """An engine's answer, or the model's own where it is another one.

        Args:
            is_first: no engine answered in this run before.

        Raises:
            StartAgain: it is another one, and engines answered in this run before.
        """
        provider, offer = self._module.provider, self.offer_for(CallShape.of(inputs))
        disturb()
        try:
            with torch.no_grad():
                wanted = beside()
                self.wrong = provider.why_wrong(self._source, offer, inputs, found, wanted)
        except self._hooks.interruptions:
            raise
        except Exception as error:  # for lack of memory, say: the engine was compared when it was loaded
            log.debug("Slipstream: a call was not computed both ways: %s", error)
        if self.wrong is None:
            provider.sentinel.compared(self._case)
            return found
        if is_first:
            self._module.count_eager(self.wrong)
            return wanted
        self.has_to_start_again = True
        raise StartAgain(self.wrong)

    def _step_of(self, inputs: Tensors, since: int) -> TimedStep:
        """What computed a call, of which the answers since then are."""
        found = set(self.answers[since:])
        if len(found) != 1 or (answer := found.pop()).is_vetoed:
            return TimedStep(None)
        source = self._source
        work = source.architecture.fingerprint, source.precision, source.device, CallShape.of(inputs)
        return TimedStep(work, () if answer.engine is None else (answer.engine,))

    def is_served_by_none(self, inputs: Tensors) -> bool:
        """Whether this run looked for an engine for calls like this one, and has none."""
        offer = self._offers.get(CallShape.of(inputs))
        return offer is not None and offer.engine is None

    def is_coming(self, inputs: Tensors) -> bool:
        """Whether the engine that a call like this one lacked is being built, or waits for its turn."""
        digest = self._requested.get(CallShape.of(inputs))
        return digest is not None and self._module.provider.queue.find(digest) is not None

    def why_not(self, inputs: Tensors, may_build: bool = True) -> str | None:
        """Why no engine would answer a call with these inputs; None where one would. It is loaded as for a call.

        Args:
            may_build: request a build of a missing engine, as the settings say; if not, a later call looks for an
                engine again.
        """
        call = CallShape.of(inputs)
        if may_build or call in self._offers:
            offer = self.offer_for(call)
        elif (offer := self._new_offer(call, replace(self.settings, policy=BuildPolicy.MANUAL))).engine is not None:
            self._offers[call] = offer
        return None if offer.engine is not None else offer.reason

    def ask(self, inputs: Tensors) -> Tensors | str:
        """An engine's answer, or why there is none."""
        call = CallShape.of(inputs)
        offer = self.offer_for(call)
        result = self._try(offer, call, inputs) if offer.engine is not None else offer.reason
        if call not in self._offers:  # fp16 overflowed and was taken away: bf16 may be there
            offer = self.offer_for(call)
            return self._try(offer, call, inputs) if offer.engine is not None else result
        return result

    def _try(self, offer: Offer, call: CallShape, inputs: Tensors) -> Tensors | str:
        """The engine's answer, or why there is none; then the engine is not asked again in this run."""
        watch = MemoryWatch(self._source.device)
        try:
            return self._compute(offer, call, inputs)
        except self._hooks.interruptions:
            raise
        except NotFinite:
            disturb()
            return self._overflowed(offer)
        except Exception as error:  # whatever compiled code raises: the picture goes on
            disturb()
            reason = f"the engine failed ({type(error).__name__}: {error})"
            ran_out = watch.ran_out(error)
        # Out here the error is gone, and with it the frames that kept tensors alive.
        calls = self.calls_of(offer)
        for each in calls:
            del self._offers[each]
        provider = self._module.provider
        if ran_out:
            log.warning("Slipstream: %s", reason)  # with what may tell more than that memory was short
            reason = provider.out_of_memory(offer, self._hooks)
        elif offer.engine is not None:
            provider.pool.give_back(offer.engine)
        self._offers |= dict.fromkeys(calls, Offer(reason=reason))
        return reason

    def _overflowed(self, offer: Offer) -> str:
        """Why there is no answer. This run's engines of the same precision are not asked again: fp16 gives way to bf16
        where the user leaves that open, and everything else to the plain model."""
        assert offer.plan is not None
        precision = offer.plan.spec.precision_name
        reason = self._module.provider.overflowed(self._source, offer.plan)
        for call, other in list(self._offers.items()):
            if other is offer or (other.plan is not None and other.plan.spec.precision_name == precision):
                self._forget(call, other)
                if precision != Precision.FP16.value:
                    self._offers[call] = Offer(reason=reason)
        return reason

    def _forget(self, call: CallShape, offer: Offer) -> None:
        del self._offers[call]
        if offer.engine is not None and all(other is not offer for other in self._offers.values()):
            self._module.provider.pool.give_back(offer.engine)

    def calls_of(self, offer: Offer) -> list[CallShape]:
        """What it answers in this run."""
        return [call for call, each in self._offers.items() if each is offer]

    def offers(self, offer: Offer) -> bool:
        """Whether this run still answers calls by it."""
        return any(each is offer for each in self._offers.values())

    def count(self, offer: Offer) -> None:
        """Count a call that an engine served; of a part only who answered is noted."""
        assert offer.plan is not None and offer.engine is not None
        self.answers.append(Answer(id_of(offer.engine.entry)))
        if not self.is_part:
            self._served += 1
            self._module.provider.sentinel.count(self._case)
            self._module.status.count_engine(offer.plan.key.digest)

    def close(self) -> None:
        """Give the engines back."""
        offers = {id(offer): offer for offer in self._offers.values()}  # calls may share one
        with ExitStack() as giving_back:  # all of them, also where one fails
            for offer in offers.values():
                if offer.engine is not None:
                    giving_back.callback(self._module.provider.pool.give_back, offer.engine)
            self._offers.clear()

    def offer_for(self, call: CallShape) -> Offer:
        """The engine that answers calls like this one, or why there is none."""
        if call not in self._offers:
            self._offers[call] = self._shared_offer(call) or self._new_offer(call, self.settings)
        return self._offers[call]

    def _shared_offer(self, call: CallShape) -> Offer | None:
        """The engine of another call of this run, where it takes this one too."""
        for offer in self._offers.values():
            if offer.engine is not None and offer.plan is not None and offer.plan.serves(call, self.settings):
                return offer
        return None

    def _new_offer(self, call: CallShape, settings: Settings) -> Offer:
        if self.why_not_whole is not None:
            return Offer(reason=self.why_not_whole)
        module, self._wanted = self._module, ""
        has_blocks = self.by_blocks is not None and self._may_give_way
        # Not kept: a run, and with it its model, ends at once.
        hooks = replace(self._hooks, wants=self._want, has_blocks=has_blocks)
        offer = module.provider.offer(self._source, call, settings, hooks)
        if self._wanted:
            self._requested[call] = self._wanted
        if offer.engine is None:
            module.build_seconds = offer.build_seconds
        if offer.engine is not None and offer.plan is not None:
            module.status.use_engine(_use_of(offer, self._source))
        elif self._wanted and module.provider.store.lookup(self._wanted) is None:
            module.status.miss(offer.reason, self._wanted)
        return offer

    def _want(self, digest: str) -> None:
        self._wanted = digest
        self._module.status.want(digest)

    def _compute(self, offer: Offer, call: CallShape, inputs: Tensors) -> Tensors:
        """A batch above the engine's largest is computed in parts, each of which counts as an engine call."""
        assert offer.engine is not None and offer.plan is not None
        spec = offer.plan.spec
        host_dtype = dtype_of(self._source.precision)
        wanted = call.dtypes(self._source.precision, spec.precision)
        results = []
        for part in _parts({name: tensor.to(wanted[name]) for name, tensor in inputs.items()}, spec):
            results.append(offer.engine.engine(**part))
            if self._finite_only:
                _check_finite(results[-1], inputs, offer.plan)
            served = Served(self, offer)
            if (noted := _noting()) is None:
                served.count()
            else:
                noted.append(served)
        if call not in self._computed:  # the first call may have taken memory for the next ones
            self._computed.add(call)
            self._module.provider.pool.on_change(offer.engine.device)
        return {name: tensor.to(host_dtype) for name, tensor in _joined(results).items()}


def _parts(inputs: Tensors, spec: EngineSpec) -> list[Tensors]:
    """A call as its engine takes it: whole, or in the fewest parts of samples, as even as can be."""
    if spec.is_static:
        return [inputs]
    batch = batch_of({name: tuple(tensor.shape) for name, tensor in inputs.items()})
    count = 1 if batch is None else math.ceil(batch / largest_batch(spec.profiles))
    if count <= 1:
        return [inputs]
    split = {name: tensor.tensor_split(count) for name, tensor in inputs.items()}
    return [{name: parts[index] for name, parts in split.items()} for index in range(count)]


def _check_finite(result: Tensors, inputs: Tensors, plan: Plan) -> None:
    """
    Args:
        inputs: as the host gave them, before they were cast for the engine.

    Raises:
        NotFinite: finite inputs gave NaN or Inf.
    """
    if not is_finite(result) and is_finite(inputs):
        raise NotFinite(f"The engine for {plan} computed NaN or Inf")


def _joined(results: list[Tensors]) -> Tensors:
    if len(results) == 1:
        return results[0]
    return {name: torch.cat([part[name] for part in results]) for name in results[0]}


def _use_of(offer: Offer, source: ModelSource) -> EngineUse:
    assert offer.engine is not None and offer.plan is not None
    entry = offer.engine.entry
    checked = entry.manifest.verifications.get(source.weights_digest())
    spec = offer.plan.spec
    error = checked.relative_error if checked else None
    made = spec.backend.name, spec.precision_name
    return EngineUse(offer.plan.key.digest, str(offer.plan), *made, error)


def _precision_of(source: ModelSource) -> Precision | None:
    """None where no engine computes in what the model does: each call of the run says so."""
    try:
        return source.precision
    except UnsupportedModel:
        return None
