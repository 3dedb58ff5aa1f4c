"""A SAMPLER that skips steps, with any model."""

from __future__ import annotations

from typing import Any

import torch

from ....sampling.presets import Preset
from ....sampling.run import AfterRun
from .sampling_task import are_packed, has_parts, task_of
from .step_skip import sample_skipping


class SkippingSampler:
    """One of ComfyUI's samplers, whose steps are skipped as a preset says; in all else it is that sampler.

    Args:
        sampler: where it skips steps already, `preset` takes the place of its own.
    """

    def __init__(self, sampler: Any, preset: Preset, after_run: AfterRun | None = None) -> None:
        self._sampler: Any = sampler._sampler if isinstance(sampler, SkippingSampler) else sampler
        self._preset = preset
        self._after_run = after_run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying asks for these before there is a sampler
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def sample(
        self,
        model_wrap: Any,
        sigmas: torch.Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: torch.Tensor,
        latent_image: torch.Tensor | None = None,
        denoise_mask: torch.Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Any:
        """See `comfy.samplers.KSAMPLER.sample`; `model_wrap` is the guider."""
        model = model_wrap.inner_model
        # Older ComfyUIs do not tell the model; there is no other latent of that shape.
        parted = has_parts(model.latent_shapes) if hasattr(model, "latent_shapes") else are_packed(noise)
        task = task_of(model_wrap, self._sampler, sigmas, denoise_mask, parted)
        args = model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
        sample = self._sampler.sample
        return sample_skipping(model_wrap, self._preset, task, self._after_run, denoise_mask, sample, args, {})
