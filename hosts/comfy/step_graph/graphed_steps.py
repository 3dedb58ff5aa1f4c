"""A whole step as one CUDA graph: ControlNets, model, prompt and negative prompt combined. Attacks overhead.

A step is ComfyUI's own code, run as ever the first time and recorded the second time. That goes for steps that are the
same work each time: one prompt and one negative prompt for the whole picture, no areas, masks or hooks, nothing of
other nodes in between, every part on an engine. What changes from picture to picture (prompts, hints) are inputs, so
that the next picture can begin with what was recorded, see `first_step`.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Hashable
from statistics import median
from typing import Any

import torch

from ....core.protocols import Tensors
from ....runtime.checking.measure import milliseconds
from ....runtime.checking.step_timers import is_on_purpose
from ....runtime.loaded.cuda_graphs import CudaGraphs, inlined
from ....runtime.loaded.device_memory import MemoryWatch
from ....runtime.module import AcceleratedModule, noted
from ....runtime.settings.model_settings import Parallel
from ..process.build_waiting import waiting_hooks
from ..run.call_wrappers import put_innermost, wrappers_of
from ..run.model_calls import ModelCalls
from ..run.step_contents import Conditions, chain_of, why_not_whole, why_other_code
from . import first_step
from .step import PARALLEL, SERIAL, Pattern, Step

log = logging.getLogger(__name__)

_TRIALS = 7


def lead_steps(guider: Any, key: str, calls: ModelCalls, module: AcceleratedModule) -> None:
    """Lead the steps of a run through `GraphedSteps`, inside of all that other nodes put around them."""
    from comfy.patcher_extension import WrappersMP

    levers = module.settings.levers
    if not (levers.one_graph and levers.hint_once and can_replay(calls.source.device)):
        return
    wrappers = wrappers_of(guider.model_options, WrappersMP.PREDICT_NOISE)
    put_innermost(wrappers, key, GraphedSteps(calls, module, key))


def can_replay(device: torch.device) -> bool:
    return device.type == "cuda"


class GraphedSteps:
    """A wrapper of PREDICT_NOISE for the length of one run."""

    def __init__(self, calls: ModelCalls, module: AcceleratedModule, key: str) -> None:
        self._calls = calls
        self._module = module
        self._key = key
        self._patterns: dict[Hashable, Pattern | None] = {}
        self._conditions: Conditions | None = None
        self._told: str | None = None

    def __call__(
        self, executor: Any, x: torch.Tensor, timestep: torch.Tensor, model_options: Any = None, seed: Any = None
    ) -> torch.Tensor:
        guider, options = executor.class_obj, model_options or {}

        def execute() -> torch.Tensor:
            result: torch.Tensor = executor(x, timestep, options, seed)
            return result

        if is_on_purpose():
            return execute()
        if why_not_whole(guider, options, x, self._key) is not None or self._other_code(guider):
            return execute()
        chain = chain_of(guider)
        active = tuple(control.is_active(timestep) for control in chain)
        step = Step(guider, options, chain, active, self._calls, x.shape)
        if step.kind not in self._patterns:
            found = self._as_before(step, x, timestep)
            return self._first(step, execute) if found is None else found
        pattern = self._patterns[step.kind]
        may_replay = pattern is not None and not self._is_to_be_compared and self._calls.veto_of_run is None
        if pattern is not None and may_replay and step.fits(pattern, x):
            if (found := self._replayed(step, pattern, x, timestep)) is not None:
                return found
            self._patterns[step.kind] = None
        with self._calls.whole_steps():
            return execute()

    @property
    def _is_to_be_compared(self) -> bool:
        """Whether the next call is to be computed both ways; halves are compared with the whole by themselves."""
        return self._calls.halves is None and self._calls.whole.is_to_be_compared

    def _other_code(self, guider: Any) -> str | None:
        if self._told is None:
            self._told = why_other_code(guider.inner_model) or ""
            if self._told:
                log.info("Slipstream: steps are not replayed as a whole: %s", self._told)
        return self._told or None

    def _as_before(self, step: Step, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor | None:
        """The first of its kind in a run by the graph that an earlier picture left; None where there is none.

        Nothing precedes it on the GPU: whether others changed the model is asked while that computes, and what it gives
        is dropped where they did.
        """
        if not step.levers.first_step or self._calls.veto_at_once is not None:
            return None
        try:
            if (known := first_step.recall(step)) is None or self._is_to_be_compared:
                return None
            conditions = self._conditions_of(step, x, known.order)
            with inlined(), self._calls.whole_steps():
                pattern = first_step.pattern_by(known, step, x, sigma, conditions)
            if pattern is None or not step.fits(pattern, x) or not self._is_recorded(step, pattern, x, sigma):
                return None
        except waiting_hooks().interruptions:
            raise
        except Exception as error:  # whatever ComfyUI's or other nodes' code raises: the usual way will show it
            log.debug("Slipstream: a first step goes the usual way: %s", error)
            first_step.forget(step)
            return None
        self._patterns[step.kind] = pattern
        if (found := self._replayed(step, pattern, x, sigma, is_asked=False)) is None:
            if self._calls.veto_of_run is None:
                first_step.forget(step)
            del self._patterns[step.kind]
        return found

    def _is_recorded(self, step: Step, pattern: Pattern, x: torch.Tensor, sigma: torch.Tensor) -> bool:
        inputs, _ = self._inputs(step, pattern, x, sigma)
        graphs: CudaGraphs = pattern.owner.steps
        return graphs.holds(step.generation(pattern), inputs, _what(step, pattern, pattern.way))

    def _first(self, step: Step, execute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The first of its kind in a run goes the usual way, which shows what it consists of."""
        eager, refused = step.eager_calls(self._module), self._are_halves_refused
        calls_before = len(self._calls.kinds)
        with inlined(), self._calls.whole_steps(), noted() as served:
            result = execute()
        for each in served:
            each.count()
        is_clear = step.eager_calls(self._module) == eager
        if refused == self._are_halves_refused:  # else the next one is another: it goes without halves
            self._patterns[step.kind] = pattern = step.pattern(served) if is_clear else None
            if pattern is not None:
                pattern.kinds = tuple(self._calls.kinds[calls_before:])
        return result

    @property
    def _are_halves_refused(self) -> bool:
        return self._calls.halves is not None and self._calls.halves.is_refused

    def _replayed(
        self, step: Step, pattern: Pattern, x: torch.Tensor, sigma: torch.Tensor, is_asked: bool = True
    ) -> torch.Tensor | None:
        """The step by its graph; None where that cannot be had.

        Args:
            is_asked: it is known that engines may answer; else that is asked here, and None where they may not.
        """
        if not pattern.owner.steps.are_possible:
            return None
        watch = MemoryWatch(x.device)
        calls_before = len(self._calls.kinds)
        try:
            result = self._by_graph(step, pattern, x, sigma)
            if not is_asked and self._calls.veto_of_run is not None:
                return None
        except waiting_hooks().interruptions:
            raise
        except Exception as error:  # whatever ComfyUI's or other nodes' code raises: the usual way will show it
            if watch.ran_out(error):
                log.warning(
                    "Slipstream: memory does not suffice for whole steps as CUDA graphs; parts of them are used"
                )
                pattern.owner.steps.drop()
            else:
                log.info("Slipstream: steps are not replayed as a whole: %s", error)
                pattern.owner.steps.forget(_what(step, pattern, pattern.way), for_good=True)
            return None
        self._calls.kinds[calls_before:] = pattern.kinds
        for each in pattern.served:
            each.count()
        if step.levers.first_step and not pattern.is_known:
            pattern.is_known = True
            first_step.remember(step, pattern)
        return result

    def _by_graph(self, step: Step, pattern: Pattern, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        inputs, constant = self._inputs(step, pattern, x, sigma)
        if not pattern.is_chosen:
            self._choose(step, pattern, inputs, constant)
        return self._run(step, pattern, pattern.way, inputs, constant)["denoised"]

    def _inputs(
        self, step: Step, pattern: Pattern, x: torch.Tensor, sigma: torch.Tensor
    ) -> tuple[Tensors, frozenset[str]]:
        """Of a graph, and the names of those that are the same in every step of a run."""
        conditions = self._conditions_of(step, x, pattern.order)
        constant = conditions.tensors | step.hints()
        return {"x": x, "sigma": sigma, **constant}, frozenset(constant)

    def _conditions_of(self, step: Step, x: torch.Tensor, order: tuple[int, ...]) -> Conditions:
        if self._conditions is None or not self._conditions.are_of(step.guider, x, order):
            self._conditions = Conditions.of(step.guider, x, order, self._calls.source.device)
        return self._conditions

    def _run(self, step: Step, pattern: Pattern, way: str, inputs: Tensors, constant: frozenset[str]) -> Tensors:
        graphs: CudaGraphs = pattern.owner.steps
        bytes_before = graphs.bytes
        compute = functools.partial(step.compute, pattern, way)
        what = _what(step, pattern, way)
        result = graphs.run(compute, step.generation(pattern), inputs, what, constant, or_raise=True)
        if graphs.bytes != bytes_before:
            self._module.provider.pool.on_change(pattern.owner.device)
        return result

    def _choose(self, step: Step, pattern: Pattern, inputs: Tensors, constant: frozenset[str]) -> None:
        """Whether the ControlNet runs beside the first half: as the user says, or as it was or is measured."""
        pattern.is_chosen = True
        wanted = step.levers.parallel
        if not pattern.is_halved or not any(step.active) or not can_branch(inputs["x"].device):
            return
        if wanted == Parallel.ON:
            pattern.way = PARALLEL
            return
        choices = self._module.provider.choices
        plans = (each.offer.plan for each in pattern.served)
        subject = " ".join(plan.key.digest[:16] for plan in plans if plan is not None)
        if (known := choices.fastest(subject, (SERIAL, PARALLEL))) is not None:
            pattern.way = known
            return
        taken = {way: self._time(step, pattern, way, inputs, constant) for way in (SERIAL, PARALLEL)}
        choices.add(subject, taken)
        pattern.way, slower = sorted(taken, key=taken.__getitem__)
        pattern.owner.steps.forget(_what(step, pattern, slower))
        words = ", ".join(f"{way}: {took:.2f} ms" for way, took in taken.items())
        log.info("Slipstream: a step with ControlNet and the model's first half %s", words)

    def _time(self, step: Step, pattern: Pattern, way: str, inputs: Tensors, constant: frozenset[str]) -> float:
        def once() -> Tensors:
            return self._run(step, pattern, way, inputs, constant)

        once()
        return median(milliseconds(once, inputs["x"].device) for _ in range(_TRIALS))


def _what(step: Step, pattern: Pattern, way: str) -> Hashable:
    """What tells the graphs of an engine apart."""
    return step.kind, way, pattern.order, tuple(weakref.ref(engine) for engine in pattern.engines)


def can_branch(device: torch.device) -> bool:
    return device.type == "cuda"
