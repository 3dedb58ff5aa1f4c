"""Times the steps of a sampling run; now and then two of them are computed by the user's model, to compare. Where it
seems to be the faster one they take turns, so that two or three pictures are enough to tell.

Around all else in a step: what other nodes, step skipping and whole steps do there is part of its time. A step that
calls no model, as those that are skipped, is none.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from ....runtime.checking.step_timers import StepTimer, on_purpose
from ....runtime.checking.step_times import EngineId, StepTimes, TimedStep
from ....runtime.loaded.device_memory import MemoryWatch, give_back_unused
from ....runtime.module import AcceleratedModule, Answer, Run
from ..blocks.block_patches import patches_in
from ..process.build_waiting import waiting_hooks
from ..process.free_memory import available
from .call_wrappers import put_outermost, wrappers_of
from .model_calls import ModelCalls
from .step_contents import controls_of
from .wrapper_keys import RECORDING, STEP_TIMES

log = logging.getLogger(__name__)


_LEAST_STEPS, _FIRST_STEP, _COMPARED = 8, 3, 2
"""Of a run in which steps of engines are timed, too; the first that is computed on purpose there; how many are, and how
many lie between, at least."""
_RUNS_APART = 2
"""Shorter runs, in which such steps are the last two but one: engines are timed in those between."""
_ROOM = 1.5
"""Times the memory that ComfyUI expects a call to take: with less it makes smaller batches."""
_ALL_STEPS = 0.0, 1.0


def time_steps(
    executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: ModelCalls, module: AcceleratedModule
) -> None:
    """Time the steps of a run, where that is wanted.

    Args:
        executor, args, kwargs: of OUTER_SAMPLE.
    """
    from comfy.patcher_extension import WrappersMP

    if (times := module.provider.step_times) is None:
        return
    run = arguments_of(executor, args, kwargs)
    if not {"sampler", "sigmas"} <= run.keys():
        return
    sampler, steps = run["sampler"], len(run["sigmas"]) - 1
    wrappers = wrappers_of(executor.class_obj.model_options, WrappersMP.PREDICT_NOISE)
    is_calibration = RECORDING in wrappers
    put_outermost(wrappers, STEP_TIMES, TimedSteps(calls, times, sampler, 0 if is_calibration else steps))


def arguments_of(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of OUTER_SAMPLE, by their names; none of a guider of another form."""
    try:
        return dict(inspect.signature(executor.original).bind(*args, **kwargs).arguments)
    except TypeError as error:
        log.debug("Slipstream: a guider of another form: %s", error)
        return {}


class TimedSteps:
    """A wrapper of PREDICT_NOISE for the length of one run.

    Args:
        steps: of the run; 0 where none may be computed on purpose.
    """

    def __init__(self, calls: ModelCalls, times: StepTimes, sampler: Any, steps: int) -> None:
        self._calls, self._times, self._sampler, self._steps = calls, times, sampler, steps
        self._timer = StepTimer(times, calls.source.device)
        self._heard: dict[Run, int] = {}
        self._asked: set[TimedStep] = set()
        self._conditions: Hashable = None
        self._is_read = False
        self._begun = 0
        self._left = 0
        """Steps that the user's model is still to compute, that which is under way included."""
        self._last_left = self._turns = 0
        """The number of the latest step that it was to compute, and how often its turn came in this run."""

    def __call__(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def compute() -> torch.Tensor:
            result: torch.Tensor = executor(x, *args, **kwargs)
            return result

        if self._is_to_be_compared(executor.class_obj, x):
            return self._without_engines(compute, x.device)
        return compute()

    def _is_to_be_compared(self, guider: Any, x: torch.Tensor) -> bool:
        """Note that a step begins, and whether the user's model is to compute it."""
        try:
            self._begun += 1
            done = self._done(guider, x)
            is_warm = self._timer.begin(done)
            if self._left and done is not None:
                self._left -= 1
            elif done is not None and self._is_due(done, is_warm) and has_memory(guider, x):
                self._left, self._turns = _COMPARED, self._turns + 1
        except Exception:  # whatever a driver or other nodes' code raises: no picture may end for a figure
            log.debug("Slipstream: steps are not timed", exc_info=True)
            self._left = self._steps = 0
        if self._left:
            self._last_left = self._begun - 1
        return self._left > 0

    def _is_due(self, done: TimedStep, is_warm: bool) -> bool:
        """Whether two steps from here on are to be computed on purpose, the second of which is timed."""
        number, last = self._begun - 1, self._steps - _COMPARED - 1
        if not done.engines or done.work is None:
            return False
        if self._steps < _LEAST_STEPS:
            is_its_turn = 0 < number == last and not self._times.is_busy()
            return is_its_turn and self._times.is_due(done, _RUNS_APART)
        if not is_warm or not _FIRST_STEP <= number <= last:
            return False
        if self._turns:  # by unequal gaps, work of every so many steps falls on both sides
            return number - self._last_left > _COMPARED + self._turns % 2 and self._times.seems_slower(done)
        if done in self._asked:
            return False
        self._asked.add(done)
        return self._times.is_due(done)

    def _without_engines(self, compute: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
        watch = MemoryWatch(device)
        try:
            with on_purpose():
                return compute()
        except waiting_hooks().interruptions:
            raise
        except Exception as error:
            if not watch.ran_out(error):
                raise
        # Out here the error is gone, and with it the frames that kept tensors alive.
        log.info("Slipstream: too little memory to time steps of the model for comparison; engines stay in use")
        self._times.stop_comparing()
        self._left = 0
        give_back_unused(device)
        return compute()

    def _done(self, guider: Any, x: torch.Tensor) -> TimedStep | None:
        """What computed the step that ends; None where it called no model."""
        kinds, self._calls.kinds = tuple(self._calls.kinds), []
        answers = self._answers_of(self._calls.runs)
        others = _engines_of(self._answers_of(_runs_of_controls(guider)))
        if not kinds:
            return None
        if not self._is_read:  # not before the first step, which the GPU waits for
            self._is_read = True
            self._conditions = conditions_of_run(guider, x, self._sampler, self._calls)
        engines = _engines_of(answers)
        is_mixed = engines and any(answer.engine is None for answer in answers)
        is_half = others and not engines
        if self._conditions is None or is_mixed or is_half or any(answer.is_vetoed for answer in answers):
            return TimedStep(None)
        return TimedStep((self._conditions, kinds), engines, others)

    def _answers_of(self, runs: list[Run]) -> list[Answer]:
        """Those since this was asked last."""
        found: list[Answer] = []
        for run in runs:
            found += run.answers[self._heard.get(run, 0) :]
            self._heard[run] = len(run.answers)
        return found


def _engines_of(answers: list[Answer]) -> tuple[EngineId, ...]:
    return tuple(sorted({answer.engine for answer in answers if answer.engine is not None}))


def _runs_of_controls(guider: Any) -> list[Run]:
    """Those of accelerated ControlNets, each once."""
    found = dict.fromkeys(getattr(control, "acceleration", None) for control in controls_of(guider))
    return [run for acceleration in found if acceleration is not None for run in acceleration.runs]


def conditions_of_run(guider: Any, x: torch.Tensor, sampler: Any, calls: ModelCalls) -> Hashable:
    """What a step of this run costs depends on, the calls of the model apart; None where it changes between steps."""
    source = calls.source
    controls = tuple(map(id, map(_network_of, controls_of(guider))))
    if len(controls) > 1 and any(map(_is_for_some_steps, controls_of(guider))):
        return None
    stored = frozenset(parameter.dtype for parameter in source.unet.parameters())
    model = source.architecture.fingerprint, source.precision, stored, source.device
    return model, _name_of(sampler), tuple(x.shape), controls, tuple(others_in(guider.model_options))


def _network_of(control: Any) -> Any:
    return getattr(control, "control_model", None) or type(control)


def _is_for_some_steps(control: Any) -> bool:
    return tuple(getattr(control, "timestep_percent_range", _ALL_STEPS)) != _ALL_STEPS


def _name_of(sampler: Any) -> str:
    function = getattr(sampler, "sampler_function", None)
    return str(getattr(function, "__name__", type(sampler).__name__))


def others_in(model_options: dict[str, Any]) -> Iterator[str]:
    """What other nodes put into the options of a run, by its names."""
    yield from sorted(str(name) for name, value in model_options.items() if value is not None)
    options = model_options.get("transformer_options") or {}
    yield from patches_in(options)
    wrappers: Mapping[Any, Any] = options.get("wrappers") or {}
    yield from sorted(f"{kind} {name}" for kind, named in wrappers.items() for name, each in named.items() if each)


def has_memory(guider: Any, x: torch.Tensor) -> bool:
    """Whether memory suffices for the model beside its engines, as ComfyUI reckons."""
    needed: float = guider.inner_model.memory_required([2 * x.shape[0], *x.shape[1:]])
    return _ROOM * needed < available(x.device)
