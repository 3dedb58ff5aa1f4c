"""Hook an accelerated UNet into a `ModelPatcher`.

Only the sampling run as a whole is wrapped. At its beginning the wrapper puts itself around the UNet for that run, as
the innermost wrapper, so that what other nodes do (EasyCache, regional prompts, LoRA before or after) stays outside.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from ...core.errors import SlipstreamError
from ...core.protocols import Tensors
from ...runtime.module import AcceleratedModule, Run
from ...runtime.settings import BackendChoice
from .hook import Compute, Plain, lead_calls
from .model_classes import ModelClass
from .source import ComfyUNetSource
from .vetoes import why_not_these_layers, why_not_this_call, why_not_this_run
from .waiting import waiting_hooks

log = logging.getLogger(__name__)

KEY = "slipstream"

RunRecorder = Callable[[dict[str, Any]], None]


def accelerate_model(patcher: Any, module: AcceleratedModule, after_run: RunRecorder | None = None) -> Any:
    """A clone of `patcher` whose UNet calls go through `module`.

    Args:
        after_run: given what happened in each sampling run, see `Status.since`.
    """
    from comfy.patcher_extension import WrappersMP

    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    clone.set_attachments(KEY, module)

    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        before = module.status.to_json()
        try:
            return _sample(module, executor, args, kwargs)
        finally:
            if after_run is not None:
                after_run(module.status.since(before))

    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, outer_sample)
    return clone


def accelerated_module(patcher: Any) -> AcceleratedModule | None:
    """The module that `accelerate_model` put into this model or one it was cloned from."""
    found = patcher.get_attachment(KEY)
    return found if isinstance(found, AcceleratedModule) else None


def _sample(module: AcceleratedModule, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    guider = executor.class_obj
    if module.settings.backend is BackendChoice.OFF:
        module.status.count_eager("acceleration is switched off in the node")
        return executor(*args, **kwargs)
    try:
        source = ComfyUNetSource(guider.model_patcher, module.provider.weights_memo)
        source.precision  # noqa: B018  an unsupported dtype is a reason too
    except SlipstreamError as error:
        if module.status.count_eager(str(error)):
            log.warning("Slipstream uses the plain model: %s", error)
        return executor(*args, **kwargs)
    with module.run(source, waiting_hooks()) as run:
        veto = why_not_this_run(guider.model_patcher, guider.model_options)
        lead_calls(guider.model_options, source.architecture.kind, KEY, _computing(run, source, veto))
        return executor(*args, **kwargs)


def _computing(run: Run, source: ComfyUNetSource, run_veto: str | None) -> Compute:
    kind = source.architecture.kind

    @functools.cache
    def veto_of_run() -> str | None:
        # Not before the first call: in between ComfyUI loads the model, and other packs change it then.
        return run_veto or why_not_these_layers(source.unet)

    def compute(module: Any, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        inputs, veto = _read(kind, args, kwargs)
        if module is not source.unet:
            veto = "this part of the batch runs on another GPU's copy of the model"
        return run(inputs, lambda: {"out": plain(*args, **kwargs)}, veto_of_run() or veto)["out"]

    return compute


def _read(kind: ModelClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensors, str | None]:
    """The tensors of a call, and why it cannot go to an engine."""
    try:
        given = kind.arguments(args, kwargs)
    except (TypeError, ValueError) as error:  # an extension replaced the method by one of another form
        return {}, f"{kind.name} is called in an unknown way ({error})"
    inputs = {name: value for name, value in given.items() if torch.is_tensor(value)}
    if any(tensor.requires_grad for tensor in inputs.values()):
        return inputs, "gradients are asked for, which engines do not give"
    return inputs, why_not_this_call({name: value for name, value in given.items() if name not in inputs})
