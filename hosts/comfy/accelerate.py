"""Hook an accelerated UNet into a `ModelPatcher`.

Only the sampling run as a whole is wrapped. At its beginning the wrapper puts itself around the UNet for that run, as
the innermost wrapper, so that what other nodes do (EasyCache, regional prompts, LoRA before or after) stays outside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from ...runtime.checking.sentinel import StartAgain
from ...runtime.module import AcceleratedModule
from ...runtime.settings.model_settings import SWITCHED_OFF, Settings
from .block_calls.block_calls import BlockCalls, block_calls_of
from .models.fallback_reasons import why_not_this_run, why_nothing_of_it
from .models.unet_source import ComfyUNetSource
from .process.dynamic_vram import loading_once
from .run.call_wrappers import lead_calls
from .run.model_calls import ModelCalls, halves_of
from .run.restart import SamplingStart
from .run.run_start import RunRecorder, begin_run, recorded
from .run.timed_steps import arguments_of, others_in, time_steps
from .run.wrapper_keys import ACCELERATE
from .step_graph.graphed_steps import lead_steps

log = logging.getLogger(__name__)

_BY_ITSELF = "another node computes the model's parts itself, so that no engine is asked"


def accelerate_model(patcher: Any, module: AcceleratedModule, after_run: RunRecorder | None = None) -> Any:
    """A clone of `patcher` whose UNet calls go through `module`.

    Args:
        after_run: given what happened in each sampling run, see `Status.since`.
    """
    from comfy.patcher_extension import WrappersMP

    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, ACCELERATE)
    clone.set_attachments(ACCELERATE, module)

    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with recorded(module, after_run):
            return _sample(module, executor, args, kwargs)

    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, ACCELERATE, outer_sample)
    return clone


def accelerated_module(patcher: Any) -> AcceleratedModule | None:
    """The module that `accelerate_model` put into this model or one it was cloned from."""
    found = patcher.get_attachment(ACCELERATE)
    return found if isinstance(found, AcceleratedModule) else None


def _sample(module: AcceleratedModule, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    guider = executor.class_obj

    def read() -> ComfyUNetSource:
        return ComfyUNetSource(guider.model_patcher, module.provider.weights_memo)

    with ExitStack() as ending:
        others = tuple(others_in(guider.model_options))
        found = begin_run(module, read, ending, conditions=others, can_start_again=True)
        if isinstance(found, str):
            if module.status.count_eager(found) and found != SWITCHED_OFF:
                log.warning("Slipstream runs your model without an engine: %s", found)
            return executor(*args, **kwargs)
        run, source = found
        halves = halves_of(module, run.settings, source, guider.model_patcher, ending)
        veto = why_not_this_run(guider.model_patcher, guider.model_options)
        blocks = _blocks_of(module, run.settings, source, guider, ending)
        calls = ModelCalls(run, source, veto, halves, blocks)
        ending.callback(calls.end)
        lead_calls(guider.model_options, source.architecture.kind, ACCELERATE, calls)
        lead_steps(guider, ACCELERATE, calls, module)
        time_steps(executor, args, kwargs, calls, module)
        beginning = SamplingStart(guider, args, kwargs, source.device)
        with loading_once(guider.model_patcher, *_accelerated_controlnets(guider)):
            with suppress(StartAgain):
                result = executor(*args, **kwargs)
            if not run.has_to_start_again:
                if not calls.are_answered and len(arguments_of(executor, args, kwargs).get("sigmas", ())) > 1:
                    module.status.count_eager(_BY_ITSELF)
                return result
            log.warning("Slipstream: sampling restarts with your model alone, because %s", run.wrong)
            again, more = beginning.restore()
            return executor(*again, **more)


def _blocks_of(
    module: AcceleratedModule, settings: Settings, source: ComfyUNetSource, guider: Any, ending: ExitStack
) -> BlockCalls | None:
    """The blocks of a model where they are to run on engines of their own."""
    if why_nothing_of_it(guider.model_options) is not None:
        return None
    return block_calls_of(source.unet, source, module, settings, guider.model_patcher, ending)


def _accelerated_controlnets(guider: Any) -> Iterator[Any]:
    """The patchers of those that condition this run, and are not switched off."""
    for conds in guider.conds.values():
        for cond in conds:
            control = cond.get("control")
            while control is not None:
                ours = vars(control).get("acceleration")  # put there by accelerate_controlnet
                if ours is not None and not ours.module.settings.is_off:
                    yield control.control_model_wrapped
                control = control.previous_controlnet
