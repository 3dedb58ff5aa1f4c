"""Step skipping in ComfyUI: around the prediction of a step, outside of guidance, ControlNets and accelerated models.

A skipped step calls none of them; the sampler goes on with what `sampling` expects instead, so previews, inpainting and
progress stay ComfyUI's own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ....core.errors import UnsupportedModel, warn_once
from ....sampling.presets import Preset
from ....sampling.run import AfterRun, Skipped, SkippingRun
from ....sampling.task import Task
from ...step_conditions import StepConditions
from ..process.build_waiting import throw_if_cancelled
from ..run.call_wrappers import put_around_ours, wrappers_of
from ..run.restart import SamplingStart
from ..run.wrapper_keys import OURS, STEP_SKIP
from .block_cache import CachedRun
from .call_sigmas import IN_ORDER, CallSigmas, is_waited_for
from .sampling_task import has_parts, task_of

log = logging.getLogger(__name__)

_OTHERS = ("easycache", "lazycache")

_out_of_order: set[tuple[str, type]] = set()
"""Samplers, and the guiders that they were used with, whose calls did not come in the schedule's order."""


def skip_steps(patcher: Any, preset: Preset, after_run: AfterRun | None = None) -> Any:
    """A clone of `patcher` whose sampling runs skip steps.

    Args:
        preset: takes the place of one that was there.
        after_run: told what happened in each run.

    Raises:
        UnsupportedModel: EasyCache or LazyCache is in the same model; also at sampling, where it was added later.
    """
    from comfy.patcher_extension import WrappersMP

    clone = without_skipping(patcher)
    _refuse_others(clone.model_options)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, STEP_SKIP, _SkippingRuns(preset, after_run))
    return clone


class _SkippingRuns:
    """The wrapper of a model's sampling runs.

    Attributes:
        last: what happened in the last of them; None before the first.
    """

    def __init__(self, preset: Preset, after_run: AfterRun | None) -> None:
        self._preset, self._after_run = preset, after_run
        self.last: Skipped | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        return _sample(self._preset, self._note, executor, args, kwargs)

    def _note(self, skipped: Skipped) -> None:
        self.last = skipped
        if self._after_run is not None:
            self._after_run(skipped)


def skips_steps(patcher: Any) -> bool:
    """Whether `skip_steps` made this model, or one that it was cloned from."""
    return bool(_runs_of(patcher))


def last_skipped(patcher: Any) -> Skipped | None:
    """What happened in the last sampling run of a model that `skip_steps` has made; None where there was none."""
    return next((each.last for each in _runs_of(patcher)), None)


def _runs_of(patcher: Any) -> list[_SkippingRuns]:
    from comfy.patcher_extension import WrappersMP

    return list(patcher.get_wrappers(WrappersMP.OUTER_SAMPLE, STEP_SKIP))


def without_skipping(patcher: Any) -> Any:
    """A clone of `patcher` that computes every step."""
    from comfy.patcher_extension import WrappersMP

    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, STEP_SKIP)
    return clone


def _refuse_others(model_options: dict[str, Any]) -> None:
    options = model_options.get("transformer_options", {})
    found = next((options[name] for name in _OTHERS if name in options), None)
    if found is not None:
        name = getattr(found, "name", "EasyCache")
        raise UnsupportedModel(
            f"{name} and step skipping are in the same model: each would go on from the other's guesses. Remove one of "
            "the two nodes."
        )


def _sample(
    preset: Preset, after_run: AfterRun | None, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = inspect.signature(executor.original).bind(*args, **kwargs).arguments
    guider, mask, shapes = executor.class_obj, given.get("denoise_mask"), given.get("latent_shapes")
    task = task_of(guider, given["sampler"], given["sigmas"], mask, has_parts(shapes))
    mask = _of_size(mask, given["noise"])
    return sample_skipping(guider, preset, task, after_run, mask, executor, args, kwargs)


def _of_size(mask: torch.Tensor | None, noise: torch.Tensor) -> torch.Tensor | None:
    """A mask as ComfyUI's samplers get it; older ComfyUIs bring it to the latent's size later."""
    import comfy.utils

    if mask is None or mask.ndim == noise.ndim and mask.shape[2:] == noise.shape[2:]:
        return mask
    resized: torch.Tensor = comfy.utils.reshape_mask(mask.float(), noise.shape)
    return resized


def sample_skipping(
    guider: Any,
    preset: Preset,
    task: Task,
    after_run: AfterRun | None,
    mask: torch.Tensor | None,
    sample: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A run of `guider` whose predictions are skipped as `preset` says; what `sample` gives.

    Args:
        task: what the run is.
        mask: for inpainting, of the latent's size: above 0 where the picture changes.
        sample: called with `args` and `kwargs`, and once more where its calls were in no order that was expected.

    Raises:
        UnsupportedModel: something else skips steps in this run already.
        ValueError: the preset's steps do not belong to a run of that length.
    """
    case, device = (task.sampler, type(guider)), guider.model_patcher.load_device
    in_order = case not in _out_of_order and _keeps_order(guider, task, device) and preset.why_not(task) is None
    beginning = SamplingStart(guider, args, kwargs, device) if in_order else None
    sigmas = CallSigmas(task.sigmas, in_order)
    told: list[Skipped] = []
    try:
        with _skipping(guider, preset, task, told.append, mask, sigmas):
            result = sample(*args, **kwargs)
        if beginning is None or sigmas.were_right():
            return result
        log.info("Slipstream: %s has noise levels of its own, so this picture is sampled again", task.sampler)
        _out_of_order.add(case)
        again, more = beginning.restore()
        with _skipping(guider, preset, task, told.append, mask, CallSigmas((), in_order=False)):
            return sample(*again, **more)
    finally:
        if after_run is not None and told:
            after_run(told[-1])


def _keeps_order(guider: Any, task: Task, device: torch.device) -> bool:
    """Whether calls surely come in the schedule's order, so that no sigma has to be read before the end.

    Not where another node is around the steps, whose state a second sampling would not begin anew, nor with hooks,
    which read sigmas themselves.
    """
    from comfy.patcher_extension import WrappersMP

    where = WrappersMP.PREDICT_NOISE
    others = {*wrappers_of(guider.model_options, where), *getattr(guider.model_patcher, "wrappers", {}).get(where, {})}
    has_hooks = any(cond.get("hooks") for conds in guider.conds.values() for cond in conds or ())
    return is_waited_for(device) and task.kind in IN_ORDER and others <= OURS and not has_hooks


@contextmanager
def _skipping(
    guider: Any,
    preset: Preset,
    task: Task,
    after_run: AfterRun,
    mask: torch.Tensor | None,
    sigmas: CallSigmas,
) -> Iterator[None]:
    _refuse_others(guider.model_options)
    steps, rule, reason = task.steps, preset.rule_for(task), preset.why_not(task)
    remark = "" if reason else preset.remark(task)
    run = SkippingRun(task.sigmas, tuple(range(steps)) if reason else preset.computed(task), rule, mask)
    cache = None if reason or preset.caching is None else CachedRun(guider, preset.caching, task.sigmas)
    if reason:
        log.warning("Slipstream skips no steps: %s", reason)
    if remark:
        warn_once(log, f"Slipstream skips steps as in {preset.name}: {remark}")
    try:
        with nullcontext() if reason else _led(guider, run, cache, sigmas):
            yield
    finally:
        run.forget()
        if cache is not None:
            cache.forget()
        counts = (steps, 0) if reason else (run.computed_calls, run.skipped_calls)
        reused = "" if cache is None else str(cache)
        after_run(Skipped(preset.name, task.sampler, steps, *counts, rule.value, reason or "", remark, reused))


@contextmanager
def _led(guider: Any, run: SkippingRun, cache: CachedRun | None, sigmas: CallSigmas) -> Iterator[None]:
    """Put `run` inside of what other nodes put around a step's prediction, since they may change the guider for it, and
    outside of what nodes of ours put there, which stands in for the prediction itself.
    """
    from comfy.patcher_extension import WrappersMP

    wrappers = wrappers_of(guider.model_options, WrappersMP.PREDICT_NOISE)
    if STEP_SKIP in wrappers:
        raise UnsupportedModel("Two nodes skip steps in this run, Step Skip and Step Skip Sampler. Remove one of them.")
    put_around_ours(wrappers, STEP_SKIP, prediction(guider, run, sigmas, cache))
    try:
        yield
    finally:
        wrappers.pop(STEP_SKIP, None)


def prediction(
    guider: Any, run: SkippingRun, sigmas: CallSigmas, cache: CachedRun | None = None
) -> Callable[..., torch.Tensor]:
    """A wrapper of PREDICT_NOISE that leaves to `run` what is computed."""
    conditions = StepConditions(guider)

    def predict(
        executor: Any, x: torch.Tensor, timestep: torch.Tensor, model_options: Any = None, seed: Any = None
    ) -> torch.Tensor:
        def compute() -> torch.Tensor:
            options = {} if model_options is None else model_options
            with nullcontext() if cache is None else cache.step(sigma, at, options):
                result: torch.Tensor = executor(x, timestep, options, seed)
            return result

        throw_if_cancelled()
        sigma = sigmas.of(timestep)
        at = conditions.next(sigma)
        return run(x, sigma, compute, at)

    return predict
