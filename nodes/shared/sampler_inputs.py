"""Inputs of ComfyUI's KSampler, for nodes that sample."""

from __future__ import annotations

from comfy.samplers import KSampler
from comfy_api.latest import io


def sampler_inputs() -> list[io.Input]:
    """CFG, sampler and scheduler."""
    return [
        io.Float.Input("cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01, tooltip="Scale of guidance."),
        io.Combo.Input("sampler_name", options=KSampler.SAMPLERS, tooltip="The algorithm of sampling."),
        io.Combo.Input("scheduler", options=KSampler.SCHEDULERS, tooltip="How noise goes down from step to step."),
    ]


def denoise_input() -> io.Float.Input:
    return io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01, tooltip="Less keeps more of the latent.")
