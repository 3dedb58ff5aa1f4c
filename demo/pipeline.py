"""Sampling the demo model without a host, through diffusers' schedulers.

`Pipeline.unet` may be anything callable like `UNet2DConditionModel`, so that an accelerated module can take
its place and be compared on the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, DDIMScheduler, EulerDiscreteScheduler, SchedulerMixin
from PIL import Image
from torch import Tensor

from . import model
from .text import TextEncoder

SchedulerName = Literal["ddim", "euler"]
StepCallback = Callable[[int, int, Tensor], None]  # step, steps, the latent after it


@dataclass
class Result:
    """Latents [B, 4, h, w] float32, scaled to unit variance as ComfyUI's samplers hold them; pictures."""

    latents: Tensor
    pictures: Tensor  # [B, H, W, 3] uint8 on the CPU

    def images(self) -> list[Image.Image]:
        """The pictures for PIL."""
        return [Image.fromarray(picture.numpy()) for picture in self.pictures]


@dataclass
class Pipeline:
    """The demo model's parts; all on one device.

    Attributes:
        unet: Called as `unet(latents, timestep, encoder_hidden_states=..., return_dict=False)[0]`, with
            `down_block_additional_residuals` and `mid_block_additional_residual` under a ControlNet.
        controlnet: Called like diffusers' ControlNetModel; only needed for hints.
        scheduler: Of the picture that is or was sampled, as diffusers' pipelines have it; set by each call.
    """

    unet: Callable[..., Any]
    text: TextEncoder
    vae: AutoencoderKL
    controlnet: Callable[..., Any] | None = None
    dtype: torch.dtype = torch.float32
    scheduler: Any = None

    @classmethod
    def load(
        cls,
        folder: Path = model.WEIGHTS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        with_controlnet: bool = True,
    ) -> Pipeline:
        """The trained model. Text is always encoded in float32: it is tiny."""
        guide = model.load_controlnet(folder, dtype).to(device) if with_controlnet else None
        return cls(
            unet=model.load_unet(folder, dtype).to(device),
            text=model.load_text_encoder(folder).to(device),
            vae=model.load_vae(folder, dtype).to(device),
            controlnet=guide,
            dtype=dtype,
        )

    @torch.no_grad()
    def __call__(
        self,
        prompts: str | Sequence[str],
        *,
        negative: str = "",
        height: int = 256,
        width: int = 256,
        steps: int = 20,
        cfg: float = 5.0,
        seed: int = 0,
        scheduler: SchedulerName | SchedulerMixin = "ddim",
        hint: Tensor | None = None,
        hint_strength: float = 1.0,
        callback: StepCallback | None = None,
    ) -> Result:
        """Sample one picture per prompt.

        Args:
            prompts: One prompt or several.
            negative: What classifier-free guidance moves away from.
            height: Pixels, a multiple of 16.
            width: Pixels, a multiple of 16.
            steps: Denoising steps.
            cfg: Guidance scale; both halves run as one batch. At 1 the unconditional half is left out.
            seed: Of the noise, drawn on the CPU: the same on every device.
            scheduler: "ddim" or "euler", both deterministic, or one of diffusers' own for models that predict noise.
            hint: Edges [B or 1, 1 or 3, H, W] in {0, 1} for the ControlNet.
            hint_strength: Multiplies what the ControlNet adds.
            callback: Told after every step.
        """
        context = self._context(prompts, negative, cfg)
        guided = cfg != 1
        count = len(context) // (2 if guided else 1)
        device = context.device
        self.scheduler = schedule = _scheduler(scheduler)
        schedule.set_timesteps(steps, device=device)
        noise = torch.randn(count, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
        latents = noise.to(device) * schedule.init_noise_sigma
        edges = None if hint is None else self._hint(hint, len(context), device)
        for step, time in enumerate(schedule.timesteps):
            batch = schedule.scale_model_input(torch.cat([latents, latents]) if guided else latents, time)
            noise = self._predict(batch, time, context, edges, hint_strength).float()
            if guided:
                without, towards = noise.chunk(2)
                noise = without + cfg * (towards - without)
            latents = schedule.step(noise, time, latents, return_dict=False)[0]
            if callback is not None:
                callback(step, steps, latents)
        return Result(latents, self.decode(latents))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents [B, 4, h, w] to pictures [B, 8h, 8w, 3] uint8 on the CPU."""
        decoded = self.vae.decode((latents / model.LATENT_SCALE).to(self.dtype), return_dict=False)[0]
        return to_bytes(decoded / 2 + 0.5)

    def _context(self, prompts: str | Sequence[str], negative: str, cfg: float) -> Tensor:
        wanted = [prompts] if isinstance(prompts, str) else list(prompts)
        every = wanted if cfg == 1 else [negative] * len(wanted) + wanted
        return self.text.encode(every).to(self.dtype)

    def _hint(self, hint: Tensor, count: int, device: torch.device) -> Tensor:
        if self.controlnet is None:
            raise ValueError("A hint was given, but this pipeline was loaded without its ControlNet.")
        edges = hint.to(device, self.dtype).expand(-1, 3, -1, -1)
        return edges.repeat(count // len(edges), 1, 1, 1)

    def _predict(self, latents: Tensor, time: Tensor, context: Tensor, edges: Tensor | None, strength: float) -> Tensor:
        latents = latents.to(self.dtype)
        extra: dict[str, Any] = {}
        if edges is not None and self.controlnet is not None:
            down, mid = self.controlnet(
                latents,
                time,
                encoder_hidden_states=context,
                controlnet_cond=edges,
                conditioning_scale=strength,
                return_dict=False,
            )
            extra = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        extra |= {"encoder_hidden_states": context, "return_dict": False}
        predicted: Tensor = self.unet(latents, time, **extra)[0]
        return predicted


def _scheduler(wanted: SchedulerName | SchedulerMixin) -> Any:
    if wanted == "ddim":
        # SD1.x's own settings: no clipping, last step to the first training step's noise level
        return DDIMScheduler(**model.SCHEDULE, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    if wanted == "euler":
        return EulerDiscreteScheduler(**model.SCHEDULE, timestep_spacing="linspace")
    return wanted


def to_bytes(pictures: Tensor) -> Tensor:
    """[B, 3, H, W] in [0, 1] to [B, H, W, 3] uint8 on the CPU."""
    return (pictures.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu()


def grid(pictures: Tensor, columns: int) -> Image.Image:
    """Lay pictures [B, H, W, 3] uint8 out in rows; B must be a multiple of `columns`."""
    rows = pictures.unflatten(0, (-1, columns)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    return Image.fromarray(rows.contiguous().numpy())
