"""What the presets of step skipping ask about a run of a WebUI's sampler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ...sampling.few_steps import few_step_name
from ...sampling.task import Task

_ANCESTRAL_DDIM = "ddpm"
_LORA = re.compile(r"<lora:([^:>]+)")


def task_of(p: Any, sampler: Any, given: Mapping[str, Any]) -> Task | str:
    """
    Args:
        p: the WebUI's processing.
        sampler: of `modules.sd_samplers`.
        given: keyword arguments of the call of its function.

    Returns:
        The task, or why nothing is known of its steps.
    """
    name, sigmas = sampler_name(sampler), sigmas_of(sampler, given)
    if sigmas is None:
        return f"the sampler {name} chooses its steps as it goes"
    scale = getattr(p, "hr_cfg", p.cfg_scale) if getattr(p, "is_hr_pass", False) else p.cfg_scale
    few = few_step_name(_model_names(p))
    return Task(
        sampler=_ANCESTRAL_DDIM if name == "ddim" and (sampler.eta or 0) > 0 else name,
        steps=len(sigmas) - 1,
        guided=float(scale) > 1,
        has_mask=sampler.model_wrap_cfg.mask is not None,
        is_distilled=bool(few),
        distilled_by=few,
        sigmas=sigmas,
        cfg=float(scale),
    )


def _model_names(p: Any) -> list[str]:
    """Of the checkpoint, and of the LoRAs in the prompt."""
    return [str(getattr(p, "sd_model_name", None) or ""), *_LORA.findall(str(getattr(p, "prompt", "")))]


def sampler_name(sampler: Any) -> str:
    """ComfyUI's name of a sampler's method."""
    function = getattr(sampler, "func", None)
    name = str(getattr(function, "__name__", sampler.funcname))
    return name.removeprefix("sample_").removesuffix("_sampler")


def sigmas_of(sampler: Any, given: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The N + 1 noise levels of a run; None where they are not known before it."""
    sigmas, times = given.get("sigmas"), given.get("timesteps")
    if isinstance(sigmas, torch.Tensor):
        return tuple(sigmas.tolist())
    if isinstance(times, torch.Tensor):
        alphas = sampler.model_wrap_cfg.inner_model.inner_model.alphas_cumprod
        levels = ((1 - alphas) / alphas) ** 0.5
        # These samplers go through the times from the last one down, and not as far as the first.
        return (*(float(levels[int(time)]) for time in times.flip(0).tolist()[: len(times) - 1]), 0.0)
    return None
