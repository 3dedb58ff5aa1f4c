"""Sampling runs of the demo model, with every call of it noted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comfy.sample
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from slipstream.hosts.comfy.models.demo_model import encode_demo_prompt
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.sampling.presets import Preset
from slipstream.sampling.run import Skipped

PROMPT = "a red circle left of a yellow square on a blue background"
SIZE = 64


@dataclass
class Watched:
    """A model with the sigma of each of its calls, and what its runs said of themselves."""

    patcher: Any
    sigmas: list[float] = field(default_factory=list)
    said: list[Skipped] = field(default_factory=list)

    def steps(self, schedule: Tensor) -> list[int]:
        """The steps of a schedule at which the model was called, each once."""
        levels = schedule[:-1].tolist()
        nearest = [min(range(len(levels)), key=lambda step: abs(levels[step] - sigma)) for sigma in self.sigmas]
        return sorted(set(nearest))


def watched(model: Any, preset: Preset | None = None) -> Watched:
    """A clone of `model` that skips steps, or does not, and notes its calls."""
    seen = Watched(model.clone())

    def note(executor: Any, x: Tensor, sigma: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.sigmas.append(float(sigma.flatten()[0]))
        return executor(x, sigma, *args, **kwargs)

    seen.patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "watched", note)
    if preset is not None:
        seen.patcher = skip_steps(seen.patcher, preset, seen.said.append)
    return seen


def schedule_of(model: Any, steps: int = 20, sampler: str = "euler", denoise: float = 1.0) -> Tensor:
    """The sigmas of a KSampler with the scheduler "normal"."""
    return comfy.samplers.KSampler(model, steps, torch.device("cpu"), sampler, "normal", denoise).sigmas


def prompts() -> tuple[list[Any], list[Any]]:
    """Positive and negative."""
    return encode_demo_prompt(PROMPT), encode_demo_prompt("")


def empty(batch: int = 1, size: int = SIZE) -> Tensor:
    return torch.zeros(batch, 4, size // 8, size // 8)


def noise_of(batch: int = 1, seed: int = 1) -> Tensor:
    return comfy.sample.prepare_noise(empty(batch), seed)


def sampled(
    model: Any,
    sampler: Any = "euler",
    sigmas: Tensor | None = None,
    *,
    steps: int = 20,
    cfg: float = 4.0,
    noise: Tensor | None = None,
    positive: list[Any] | None = None,
    negative: list[Any] | None = None,
    latent: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The latent that SamplerCustom makes: [B, 4, 8, 8].

    Args:
        sampler: a name or a SAMPLER.
        options: of `comfy.sample.sample_custom`.
    """
    noise = noise_of() if noise is None else noise
    if sigmas is None:
        sigmas = schedule_of(model, steps, sampler if isinstance(sampler, str) else "euler")
    method = comfy.samplers.sampler_object(sampler) if isinstance(sampler, str) else sampler
    return comfy.sample.sample_custom(
        model, noise, cfg, method, sigmas.clone(), positive or prompts()[0], negative or prompts()[1],
        torch.zeros_like(noise) if latent is None else latent, disable_pbar=True, seed=1, **options,
    )  # fmt: skip


def run_node(node: Any, **inputs: Any) -> tuple[Any, ...]:
    """The outputs of a node outside of a graph."""
    clone = type(node.__name__, (node,), {"hidden": SimpleNamespace(unique_id="1")})
    return clone.execute(**inputs).result
