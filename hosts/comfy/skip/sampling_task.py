"""What the presets of step skipping ask about a run of ComfyUI."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ....sampling.few_steps import few_step_name
from ....sampling.task import Task
from .model_files import model_files

_DISTILLED = frozenset({"ModelSamplingDiscreteDistilled", "LCM"})
"""Of ComfyUI's nodes_model_advanced.py: by name, since its nodes may not be loaded."""

_FEW_STEP_CLASSES = frozenset({"FluxSchnell"})

_NO_END = 10000
_MOST_FORESEEN = 1000
"""Noise levels of a longer schedule are not made only to count them."""

log = logging.getLogger(__name__)


def has_parts(latent_shapes: Any) -> bool:
    """Whether latents were packed into one.

    Args:
        latent_shapes: as ComfyUI hands them on; None where it does not.
    """
    return isinstance(latent_shapes, Sequence) and len(latent_shapes) > 1


def are_packed(latents: torch.Tensor) -> bool:
    """Whether latents have the shape of packed ones, [N, 1, length]."""
    return latents.ndim == 3 and latents.shape[1] == 1


def task_of(guider: Any, sampler: Any, sigmas: torch.Tensor, denoise_mask: Any, parted: bool) -> Task:
    """
    Args:
        denoise_mask: of the run; None where it inpaints nothing.
        parted: whether the latents are several that were packed into one.
    """
    scale, patcher = getattr(guider, "cfg", None), guider.model_patcher
    named = few_step_name(model_files(patcher))
    return Task(
        sampler=sampler_name(sampler),
        steps=len(sigmas) - 1,
        guided=_is_guided(guider),
        has_mask=denoise_mask is not None,
        has_parts=parted,
        is_distilled=bool(named) or _is_distilled(patcher),
        distilled_by=named,
        sigmas=tuple(sigmas.tolist()),
        cfg=float(scale) if isinstance(scale, (int, float)) else None,
        model=model_class(patcher),
    )


def foreseen_steps(
    sampler: str, scheduler: str, steps: int, denoise: float = 1.0, start_at_step: int = 0, end_at_step: int = _NO_END
) -> int:
    """How many steps the run of a sampler node will have: some schedulers make more of them than are asked for.

    The noise levels are those of Stable Diffusion: which model a page's node will have is not known before it runs.
    """
    from comfy.samplers import KSampler

    part = denoise if denoise > 0 else 1.0
    if scheduler in KSampler.SCHEDULERS and steps / part <= _MOST_FORESEEN:
        try:
            steps = len(KSampler(_StableDiffusion(), steps, "cpu", sampler, scheduler, part).sigmas) - 1
        except Exception:  # a scheduler of another extension, which asks for more of the model
            log.debug("Slipstream: the noise levels of %s are not foreseen", scheduler, exc_info=True)
    left = min(end_at_step, steps) - max(start_at_step, 0)
    return left if left > 0 else steps


class _StableDiffusion:
    """What ComfyUI's KSampler asks of a model to make noise levels."""

    @functools.cached_property
    def sampling(self) -> Any:
        from comfy.model_sampling import ModelSamplingDiscrete

        return ModelSamplingDiscrete()

    def get_model_object(self, name: str) -> Any:
        return self.sampling


def sampler_name(sampler: Any) -> str:
    """ComfyUI's name of a SAMPLER's method, without what tells CPU and GPU noise apart. DDIM's is euler."""
    function = getattr(sampler, "sampler_function", None)
    name = str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")
    return name.removesuffix("_function").removesuffix("_gpu").replace("unipc", "uni_pc")


def model_class(patcher: Any) -> str:
    """ComfyUI's name of a model's architecture, such as SD15."""
    return type(patcher.model.model_config).__name__


def _is_guided(guider: Any) -> bool:
    """Whether a negative prompt takes part: CFG above 1, by whichever name a guider has for it."""
    scales = [getattr(guider, name, None) for name in ("cfg", "cfg1", "cfg2")]
    return any(isinstance(scale, (int, float)) and scale > 1 for scale in scales)


def _is_distilled(patcher: Any) -> bool:
    kinds = type(patcher.get_model_object("model_sampling")).__mro__
    return model_class(patcher) in _FEW_STEP_CLASSES or any(kind.__name__ in _DISTILLED for kind in kinds)
