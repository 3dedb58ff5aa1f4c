"""Hook an accelerated UNet into a `ModelPatcher`.

Only the sampling run as a whole is wrapped. At its beginning the wrapper puts itself around the UNet for that run, as
the innermost wrapper, so that what other nodes do (EasyCache, regional prompts, LoRA before or after) stays outside.
The model's own modules are never replaced: LoRA, offloading and saving keep working.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...core.errors import SlipstreamError
from ...runtime.module import AcceleratedModule, Run
from ...runtime.settings import BackendChoice
from .source import ComfyUNetSource
from .vetoes import why_not_this_call, why_not_this_run
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
        _make_innermost(guider.model_options, _unet_wrapper(run, source, veto))
        return executor(*args, **kwargs)


def _make_innermost(model_options: dict[str, Any], wrapper: Callable[..., Any]) -> None:
    """Wrappers run in the order of the dict; `model_options` is this run's own copy."""
    from comfy.patcher_extension import WrappersMP

    options = model_options.setdefault("transformer_options", {})
    wrappers = options.setdefault("wrappers", {}).setdefault(WrappersMP.DIFFUSION_MODEL, {})
    wrappers.pop(KEY, None)
    wrappers[KEY] = [wrapper]


def _unet_wrapper(run: Run, source: ComfyUNetSource, run_veto: str | None) -> Callable[..., Any]:
    def unet(
        executor: Any,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor | None = None,
        y: torch.Tensor | None = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        options = transformer_options if transformer_options is not None else {}
        veto = run_veto or why_not_this_call(control, options, extras)
        if executor.class_obj is not source.unet:
            veto = "this part of the batch runs on another GPU's copy of the model"
        given = {"x": x, "timesteps": timesteps, "context": context, "y": y}
        inputs = {name: tensor for name, tensor in given.items() if tensor is not None}

        def eager() -> dict[str, torch.Tensor]:
            return {"out": executor(x, timesteps, context, y, control, options, **extras)}

        return run(inputs, eager, veto)["out"]

    return unet
