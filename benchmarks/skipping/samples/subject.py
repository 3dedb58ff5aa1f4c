"""The demo model in ComfyUI, sampled in batches by ComfyUI's own samplers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....engine_cache import EngineStore
from ....hosts.comfy.accelerate import accelerate_model
from ....hosts.comfy.models.demo_model import encode_demo_prompt, load_demo_controlnet, load_demo_model, load_demo_vae
from ....runtime.module import AcceleratedModule
from ....runtime.provider import EngineProvider
from ....runtime.settings.model_settings import BuildPolicy, Settings
from . import protocol

Patch = Callable[[Any], Any]
"""Given a MODEL, another."""


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        latents: [B, 4, 32, 32] float32.
        seconds: for the whole batch.
        calls: of the model's prediction of a step.
    """

    latents: Tensor
    seconds: float
    calls: int


class Subject:
    """A model, captions and noise.

    Args:
        captions: as many as samples.
        hints: canny edges [B, 256, 256, 3] for the ControlNet.
        engines: a store; the model runs on engines, made where they are missing. None: the plain model.
        seed: of the noise that stochastic samplers add.

    Attributes:
        mask: see `inpaint`; None as long as nothing is inpainted.
    """

    def __init__(
        self,
        captions: list[str],
        noise: Tensor,
        hints: Tensor | None = None,
        engines: Path | None = None,
        seed: int = protocol.NOISE_SEED,
    ) -> None:
        self.model = load_demo_model()
        self.noise = noise
        self.mask: Tensor | None = None
        self._latent = torch.zeros_like(noise)
        self._seed = seed
        self._engines: AcceleratedModule | None = None
        if engines is not None:
            settings = Settings(policy=BuildPolicy.FIRST_USE)
            self._engines = AcceleratedModule(EngineProvider(EngineStore(engines)), settings)
            self.model = accelerate_model(self.model, self._engines)
        self._vae: Any = None
        positive, negative = (encode_demo_prompt(texts) for texts in (captions, [""] * len(captions)))
        if hints is not None:
            control = load_demo_controlnet()
            positive, negative = (_guided(cond, control, hints) for cond in (positive, negative))
        self._conds = positive, negative

    def begin(self, noise: Tensor, latent: Tensor | None = None) -> None:
        """From now on runs begin with this noise, and with this picture: give them the last part of a schedule.

        Args:
            noise: [B, 4, h, w].
            latent: of the noise's shape; None begins with noise alone.
        """
        self.noise, self._latent = noise, torch.zeros_like(noise) if latent is None else latent

    def inpaint(self, latent: Tensor, mask: Tensor) -> None:
        """From now on sample only where the mask is 1.

        Args:
            latent: what stays as it is elsewhere, [B, 4, 32, 32].
            mask: [B, 1, 32, 32].
        """
        self._latent, self.mask = latent, mask

    def sigmas(self, sampler: str, scheduler: str, steps: int) -> Tensor:
        """As KSampler makes them, on the CPU, [steps + 1]."""
        import comfy.samplers

        if scheduler == "ays":
            return _ays(steps)
        chosen = comfy.samplers.KSampler(
            self.model, steps=steps, device=self.model.load_device, sampler=sampler, scheduler=scheduler, denoise=1.0
        )
        sigmas: Tensor = chosen.sigmas.cpu()
        return sigmas

    @torch.no_grad()
    def sample(self, sampler: str, sigmas: Tensor, cfg: float, patch: Patch | None = None) -> Outcome:
        import comfy.sample
        import comfy.samplers

        counter: _Counter | _EngineCounter = _Counter() if self._engines is None else _EngineCounter(self._engines)
        model = counter.counted(self.model if patch is None else patch(self.model))
        positive, negative = self._conds
        _wait()
        started = time.perf_counter()
        latents = comfy.sample.sample_custom(
            model,
            self.noise,
            cfg,
            comfy.samplers.sampler_object(sampler),
            sigmas.clone(),  # UniPC writes into them
            positive,
            negative,
            self._latent,
            self.mask,
            disable_pbar=True,
            seed=self._seed,
        )
        _wait()
        return Outcome(latents.float().cpu(), time.perf_counter() - started, counter.calls)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1]."""
        if self._vae is None:
            self._vae = load_demo_vae()
        pictures: Tensor = self._vae.decode(latents)
        return pictures.permute(0, 3, 1, 2).float().clamp(0, 1)


class _Counter:
    """Counts steps that a model computes, from inside of everything that may skip them."""

    def __init__(self) -> None:
        self.calls = 0

    def counted(self, model: Any) -> Any:
        from comfy.patcher_extension import WrappersMP

        clone = model.clone()

        def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
            options = next(each for each in (*args, *kwargs.values()) if isinstance(each, dict) and "sigmas" in each)
            self.calls += 0 in options["cond_or_uncond"]  # the prompt's part: one a step, however it is batched
            return executor(*args, **kwargs)

        # Innermost: wrappers run in the order in which they were added.
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "slipstream_benchmark", count)
        return clone


class _EngineCounter:
    """Counts calls of engines: one a step, for the prompt and the negative prompt are one batch."""

    def __init__(self, module: AcceleratedModule) -> None:
        self._module = module
        self._before = module.status.to_json()

    def counted(self, model: Any) -> Any:
        return model

    @property
    def calls(self) -> int:
        since = self._module.status.since(self._before)
        if since["eager_calls"]:
            raise RuntimeError(f"{since['eager_calls']} calls of the plain model where engines were asked for")
        return int(since["engine_calls"])


def _guided(cond: list[list[Any]], control: Any, hints: Tensor) -> list[list[Any]]:
    guide = control.copy().set_cond_hint(hints.movedim(-1, 1), 1.0, (0.0, 1.0))
    return [[text, {**options, "control": guide, "control_apply_to_uncond": False}] for text, options in cond]


def _ays(steps: int) -> Tensor:
    from comfy_extras.nodes_align_your_steps import AlignYourStepsScheduler

    sigmas: Tensor = AlignYourStepsScheduler.execute("SD1", steps, 1.0).result[0]
    return sigmas


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
