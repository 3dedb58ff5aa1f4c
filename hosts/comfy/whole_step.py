"""A whole step as one CUDA graph: ControlNets, model, prompt and negative prompt combined. Attacks overhead.

A step is ComfyUI's own code, run as ever the first time and recorded the second time. That goes for steps that are the
same work each time: one prompt and one negative prompt for the whole picture, no areas, masks or hooks, nothing of
other nodes in between, every part on an engine. What changes from picture to picture (prompts, hints) are inputs.
"""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import SlipstreamError
from ...core.protocols import Tensors
from ...core.streams import Branch
from ...runtime.cuda_graphs import CudaGraphs, inlined
from ...runtime.memory import MemoryWatch
from ...runtime.module import AcceleratedModule
from ...runtime.pool import LoadedEngine
from .model_calls import ModelCalls, Served
from .source import ComfyUNetSource
from .step_parts import Conditions, chain_of, kind_of_control, kind_of_sampling, why_not_whole

log = logging.getLogger(__name__)

SERIAL, PARALLEL = "one after the other", "at the same time"
_TRIALS = 7
_WAIT = "called a synchronizing"
"""In torch's warning of an operation that waits for the GPU."""


def lead_steps(guider: Any, key: str, calls: ModelCalls, module: AcceleratedModule) -> None:
    """Lead the steps of a run through `WholeStep`, inside of all that other nodes put around them."""
    from comfy.patcher_extension import WrappersMP

    levers = module.settings.levers
    if not (levers.one_graph and levers.hint_once and can_replay(calls.source.device)):
        return
    options = guider.model_options.setdefault("transformer_options", {})
    wrappers = options.setdefault("wrappers", {}).setdefault(WrappersMP.PREDICT_NOISE, {})
    wrappers.pop(key, None)
    wrappers[key] = [WholeStep(calls, module, key)]


def can_replay(device: torch.device) -> bool:
    return device.type == "cuda"


class WaitsOnHost(RuntimeError):
    """A step asks the GPU for a number in its midst: no graph can hold that."""


@dataclass
class Pattern:
    """What a step turned out to be.

    Attributes:
        order: which prompts make up a batch, as ComfyUI put it together: 0 the prompt, 1 the negative one.
        served: calls of engines, of which the first that counts for the model owns the graphs.
        residuals: shapes and dtypes of what ControlNets give, once known.
    """

    order: tuple[int, ...]
    served: list[Served]
    owner: LoadedEngine
    is_halved: bool
    way: str = SERIAL
    is_chosen: bool = False
    checked: bool = False
    residuals: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def engines(self) -> list[LoadedEngine]:
        return [each.offer.engine for each in self.served if each.offer.engine is not None]


class WholeStep:
    """A wrapper of PREDICT_NOISE for the length of one run."""

    def __init__(self, calls: ModelCalls, module: AcceleratedModule, key: str) -> None:
        self._calls = calls
        self._module = module
        self._key = key
        self._patterns: dict[Hashable, Pattern | None] = {}
        self._conditions: Conditions | None = None

    def __call__(
        self, executor: Any, x: torch.Tensor, timestep: torch.Tensor, model_options: Any = None, seed: Any = None
    ) -> torch.Tensor:
        guider, options = executor.class_obj, model_options or {}
        if why_not_whole(guider, options, x, self._key) is not None:
            result: torch.Tensor = executor(x, timestep, options, seed)
            return result
        chain = chain_of(guider)
        active = tuple(control.is_active(timestep) for control in chain)
        step = Step(guider, options, chain, active, self._calls)
        if step.kind not in self._patterns:
            self._patterns[step.kind], result = self._first(step, lambda: executor(x, timestep, options, seed))
            return result
        pattern = self._patterns[step.kind]
        found = self._replayed(step, pattern, x, timestep) if pattern is not None else None
        if found is None:
            self._patterns[step.kind] = None
            result = executor(x, timestep, options, seed)
            return result
        return found

    def _first(self, step: Step, execute: Callable[[], torch.Tensor]) -> tuple[Pattern | None, torch.Tensor]:
        """The first of its kind in a run goes the usual way, which shows what it consists of."""
        eager = step.eager_calls(self._module)
        with inlined(), self._calls.whole_steps(), step.noted() as served:
            result = execute()
        for each in served:
            each.count()
        if step.eager_calls(self._module) != eager:
            return None, result
        return step.pattern(served), result

    def _replayed(self, step: Step, pattern: Pattern, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor | None:
        """The step by its graph; None where that cannot be had."""
        if self._conditions is None or not self._conditions.are_of(step.guider, x, pattern.order):
            self._conditions = Conditions.of(step.guider, x, pattern.order, self._calls.source.device)
        constant = self._conditions.tensors | step.hints() | step.texts(pattern, self._conditions)
        inputs = {"x": x, "sigma": sigma, **constant}
        watch = MemoryWatch(x.device)
        try:
            if not pattern.is_chosen:
                self._choose(step, pattern, inputs, frozenset(constant))
            result = self._run(step, pattern, pattern.way, inputs, frozenset(constant))["denoised"]
        except (SlipstreamError, RuntimeError) as error:
            if watch.ran_out(error):
                log.warning(
                    "Slipstream: memory does not suffice for whole steps as CUDA graphs; parts of them are used"
                )
            else:
                log.info("Slipstream: steps are not replayed as a whole: %s", error)
            pattern.owner.steps.drop()
            return None
        for each in pattern.served:
            each.count()
        return result

    def _run(self, step: Step, pattern: Pattern, way: str, inputs: Tensors, constant: frozenset[str]) -> Tensors:
        graphs: CudaGraphs = pattern.owner.steps
        bytes_before = graphs.bytes
        compute = functools.partial(step.compute, pattern, way)
        what = (step.kind, way, pattern.order, tuple(weakref.ref(engine) for engine in pattern.engines))
        result = graphs.run(compute, step.generation(pattern), inputs, what, constant)
        if graphs.bytes != bytes_before:
            self._module.provider.pool.on_change(pattern.owner.device)
        return result

    def _choose(self, step: Step, pattern: Pattern, inputs: Tensors, constant: frozenset[str]) -> None:
        """Whether the ControlNet runs beside the first half: as the user says, or as it was or is measured."""
        pattern.is_chosen = True
        wanted = self._module.settings.levers.parallel
        if not pattern.is_halved or not any(step.active) or wanted == "off" or not can_branch(inputs["x"].device):
            return
        if wanted == "on":
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
        pattern.way = min(taken, key=taken.__getitem__)
        words = ", ".join(f"{way}: {took:.2f} ms" for way, took in taken.items())
        log.info("Slipstream: a step with ControlNet and the model's first half %s", words)

    def _time(self, step: Step, pattern: Pattern, way: str, inputs: Tensors, constant: frozenset[str]) -> float:
        from ...runtime.measure import milliseconds

        def once() -> Tensors:
            return self._run(step, pattern, way, inputs, constant)

        once()
        return sorted(milliseconds(once, inputs["x"].device) for _ in range(_TRIALS))[_TRIALS // 2]


def can_branch(device: torch.device) -> bool:
    return device.type == "cuda"


class Step:
    """One step of a run, and how it is computed."""

    def __init__(
        self, guider: Any, model_options: dict[str, Any], chain: list[Any], active: tuple[bool, ...], calls: ModelCalls
    ) -> None:
        self.guider = guider
        self.chain = chain
        self.active = active
        self._calls = calls
        self._options = model_options.get("transformer_options", {})
        self._model = guider.inner_model
        controls = tuple(
            kind_of_control(control) for control, is_active in zip(chain, active, strict=True) if is_active
        )
        self.kind: Hashable = (kind_of_sampling(self._model), guider.cfg, active, controls)

    @property
    def _used(self) -> list[Any]:
        """The ControlNets whose windows this step lies in."""
        return [control for control, is_active in zip(self.chain, self.active, strict=True) if is_active]

    def eager_calls(self, module: AcceleratedModule) -> int:
        modules = {id(each): each for each in (module, *(control.acceleration.module for control in self.chain))}
        return sum(each.status.eager_calls for each in modules.values())

    @contextmanager
    def noted(self) -> Iterator[list[Served]]:
        """Meanwhile all calls of engines are noted, not counted."""
        tally = self._calls.tally
        runs = {id(run): run for control in self._used if (run := control.calls().run) is not None}
        before = [(run, run.tally) for run in runs.values()]
        for run in runs.values():
            tally.follow(run)
        try:
            with tally.noting() as served:
                yield served
        finally:
            for run, known in before:
                run.tally = known

    def pattern(self, served: list[Served]) -> Pattern | None:
        """What a step consisted of; None where that is not one call of each part."""
        order = self._calls.options.get("cond_or_uncond")
        controls = {id(control.calls().run) for control in self._used}
        of_model = [each for each in served if id(each.run) not in controls]
        answers = [each for each in of_model if each.counts]
        if order is None or len(answers) != 1 or len(served) - len(of_model) != len(self._used):
            return None
        owner = answers[0].offer.engine
        if owner is None or sorted(order) not in ([0], [0, 1]):
            return None
        return Pattern(tuple(order), list(served), owner, is_halved=len(of_model) > 1)

    def generation(self, pattern: Pattern) -> Hashable:
        """Changes when anything lies elsewhere that a graph reads where it is."""
        sampling = self._model.model_sampling
        tables = tuple(tensor.data_ptr() for tensor in (*sampling.parameters(), *sampling.buffers()))
        return tables, tuple(engine.engine.generation for engine in pattern.engines)

    def hints(self) -> Tensors:
        """The embedded hints by name, as they are in this run."""
        found: Tensors = {}
        for place, control in enumerate(self._used):
            for name, tensor in (control.calls().embedding_of(control.cond_hint) or {}).items():
                found[f"hint_{place}_{name}"] = tensor
        return found

    def texts(self, pattern: Pattern, conditions: Conditions) -> Tensors:
        """The projected text of each part of the model by name, made once for what conditions a run."""
        context = conditions.context
        if not conditions.texts and context is not None:
            for place, source in enumerate(self._sources(pattern)):
                if source.architecture.projected:
                    conditions.texts[f"text_{place}"] = source.project(context.to(dtype_of(source.precision)))
        return conditions.texts

    def _sources(self, pattern: Pattern) -> list[ComfyUNetSource]:
        halves = self._calls.halves
        return [*halves.sources.values()] if pattern.is_halved and halves is not None else [self._calls.source]

    def compute(self, pattern: Pattern, way: str, **tensors: torch.Tensor) -> Tensors:
        """The step by ComfyUI's own code, on engines alone and without a wait.

        Args:
            tensors: x, sigma, what conditions the model, and embedded hints.

        Raises:
            WaitsOnHost: ComfyUI's code asks the GPU for a number.
            NotServed: an engine did not answer.
        """
        with ExitStack() as ending:
            ending.enter_context(inlined())
            ending.enter_context(self._calls.whole_steps())
            ending.enter_context(self.noted())
            ending.enter_context(self._engines_only())
            self._decide(ending, tensors)
            for place, source in enumerate(self._sources(pattern)):
                if (text := tensors.get(f"text_{place}")) is not None:
                    self._calls.texts[source.within] = text
            if not pattern.checked and tensors["x"].device.type == "cuda":
                ending.enter_context(_without_waits())
            result = self._denoised(pattern, way, tensors)
        pattern.checked = True
        return {"denoised": result}

    def _decide(self, ending: ExitStack, tensors: Tensors) -> None:
        for control, is_active in zip(self.chain, self.active, strict=True):
            ending.enter_context(control.decided(is_active))
        for place, control in enumerate(self._used):
            prefix = f"hint_{place}_"
            given = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            ending.enter_context(control.calls().given(control.cond_hint, given))

    @contextmanager
    def _engines_only(self) -> Iterator[None]:
        self._calls.engines_only = True
        try:
            yield
        finally:
            self._calls.engines_only = False
            self._calls.texts = {}
            self._calls.join = lambda: None

    def _denoised(self, pattern: Pattern, way: str, tensors: Tensors) -> torch.Tensor:
        x, sigma, count = tensors["x"], tensors["sigma"], len(pattern.order)
        batch, times = torch.cat([x] * count), torch.cat([sigma] * count)
        given: dict[str, Any] = Conditions.named(tensors)
        options = {**self._options, "cond_or_uncond": list(pattern.order), "uuids": self._uuids(pattern.order)}
        given["transformer_options"] = {**options, "sigmas": sigma}
        if any(self.active):
            given["control"] = self._control(pattern, way, batch, times, given)
        parts = self._model.apply_model(batch, times, **given).chunk(count)
        self._calls.join()
        predicted = dict(zip(pattern.order, parts, strict=True))
        without = predicted.get(1, torch.zeros_like(x))
        result: torch.Tensor = without + (predicted[0] - without) * self.guider.cfg
        return result

    def _control(
        self, pattern: Pattern, way: str, batch: torch.Tensor, times: torch.Tensor, given: dict[str, Any]
    ) -> dict[str, list[Any]]:
        def ask() -> dict[str, list[Any]]:
            options = given["transformer_options"]
            found: dict[str, list[Any]] = self.chain[-1].get_control(batch, times, given, len(pattern.order), options)
            return found

        if way == SERIAL or not pattern.residuals:
            control = ask()
            pattern.residuals = {kind: [_like(tensor) for tensor in control[kind]] for kind in control}
            return control
        return self._beside(pattern, ask, batch.device)

    def _beside(self, pattern: Pattern, ask: Callable[[], dict[str, list[Any]]], device: torch.device) -> Any:
        """The ControlNets on a second stream, until the model needs what they give."""
        places = {
            kind: [made if made is None else torch.empty_strided(*made[0], **made[1]) for made in entries]
            for kind, entries in pattern.residuals.items()
        }
        branch = Branch(device)
        with branch.begin():
            _copy_all(ask(), places)
        self._calls.join = branch.join
        return places

    def _uuids(self, order: tuple[int, ...]) -> list[Any]:
        conds = self.guider.conds
        lists = {0: conds.get("positive"), 1: conds.get("negative")}
        return [lists[place][0].get("uuid") for place in order]


def _copy_all(control: dict[str, list[Any]], places: dict[str, list[Any]]) -> None:
    """A function of its own: what was allocated for `control` is free again when it ends."""
    for kind, entries in places.items():
        for place, tensor in zip(entries, control[kind], strict=True):
            if place is not None:
                place.copy_(tensor)


def _like(tensor: torch.Tensor | None) -> Any:
    """How to allocate a tensor of the same kind."""
    if tensor is None:
        return None
    return (tuple(tensor.shape), tensor.stride()), {"dtype": tensor.dtype, "device": tensor.device}


@contextmanager
def _without_waits() -> Iterator[None]:
    """
    Raises:
        WaitsOnHost: something inside waited for the GPU.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [str(warning.message) for warning in heard if _WAIT in str(warning.message)]
    if waits:
        raise WaitsOnHost(f"a part of it waits for the GPU ({waits[0]})")
