"""The demo model's sizes, and its networks for diffusers and as ComfyUI's configuration.

One set of weights, in diffusers' key format, serves both; `hosts/comfy/models/demo_model.py` renames the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .text import TextEncoder

if TYPE_CHECKING:  # inside ComfyUI there need be no diffusers
    from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel

WEIGHTS = Path(__file__).resolve().parent / "weights"
LATENT_SCALE = 0.18215  # SD1.x's: latents times this have unit variance; ComfyUI has it built in
SCHEDULE: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}


def alphas_cumprod() -> Tensor:
    """Share of the signal's variance left at each of the 1000 timesteps, float32 (Ho et al. 2020, eq. 4)."""
    start, end = SCHEDULE["beta_start"] ** 0.5, SCHEDULE["beta_end"] ** 0.5
    betas = torch.linspace(start, end, SCHEDULE["num_train_timesteps"]) ** 2
    return (1 - betas).cumprod(0)


_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class Sizes:
    """Widths and depths. SD1.x: 320 channels, multiples 1 2 4 4, two blocks a level, context 768.

    Attributes:
        down_depth: Transformer layers of each level on the way down.
        up_depth: And on the way up. Attention on the lower level only there keeps the ControlNet, a copy of
            the way down, small.
        vae_channels: From full size to an eighth. ComfyUI normalises in 32 groups; 64 channels at either end
            leave two to a group, so that a flat colour survives the normalisation.
    """

    channels: int = 64
    multiples: tuple[int, ...] = (1, 2)
    blocks: int = 1
    down_depth: tuple[int, ...] = (1, 0)
    up_depth: tuple[int, ...] = (1, 1)
    heads: int = 8
    context: int = 64
    text_layers: int = 2
    text_heads: int = 4
    latent: int = 4
    vae_channels: tuple[int, ...] = (64, 32, 32, 64)
    vae_blocks: int = 1


SIZES = Sizes()


def unet(sizes: Sizes = SIZES) -> UNet2DConditionModel:
    """The denoiser, untrained: (latent [B, 4, h, w], t [B], context [B, 77k, context]) to noise as latent."""
    from diffusers import UNet2DConditionModel

    up = ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(sizes.up_depth)]
    return UNet2DConditionModel(
        sample_size=32,
        in_channels=sizes.latent,
        out_channels=sizes.latent,
        up_block_types=tuple(up),
        **_half(sizes),
    )


def controlnet(sizes: Sizes = SIZES) -> ControlNetModel:
    """The canny ControlNet, untrained: hints are edges [B, 3, H, W] in {0, 1}."""
    from diffusers import ControlNetModel

    return ControlNetModel(in_channels=sizes.latent, **_half(sizes))


def _half(sizes: Sizes) -> dict[str, Any]:
    """What UNet and ControlNet share."""
    down = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in sizes.down_depth]
    return {
        "down_block_types": tuple(down),
        "block_out_channels": tuple(sizes.channels * multiple for multiple in sizes.multiples),
        "layers_per_block": sizes.blocks,
        "cross_attention_dim": sizes.context,
        "attention_head_dim": sizes.heads,  # diffusers' SD1.x models pass the number of heads by this name
    }


def vae(sizes: Sizes = SIZES) -> AutoencoderKL:
    """The autoencoder, untrained: pictures [B, 3, H, W] in [-1, 1] <-> latents [B, 4, H/8, W/8]."""
    from diffusers import AutoencoderKL

    levels = len(sizes.vae_channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=sizes.vae_channels,
        layers_per_block=sizes.vae_blocks,
        latent_channels=sizes.latent,
        sample_size=256,
        scaling_factor=LATENT_SCALE,
    )


def text_encoder(sizes: Sizes = SIZES) -> TextEncoder:
    """The text encoder, untrained."""
    return TextEncoder(sizes.context, sizes.text_layers, sizes.text_heads)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "unet": unet,
    "vae": vae,
    "controlnet": controlnet,
    "text": text_encoder,
}


def load_unet(folder: Path = WEIGHTS, dtype: torch.dtype = torch.float32) -> UNet2DConditionModel:
    """The trained denoiser, in eval mode on the CPU."""
    return _load(unet(), "unet", folder, dtype)


def load_vae(folder: Path = WEIGHTS, dtype: torch.dtype = torch.float32) -> AutoencoderKL:
    """The trained autoencoder, in eval mode on the CPU."""
    return _load(vae(), "vae", folder, dtype)


def load_controlnet(folder: Path = WEIGHTS, dtype: torch.dtype = torch.float32) -> ControlNetModel:
    """The trained canny ControlNet, in eval mode on the CPU."""
    return _load(controlnet(), "controlnet", folder, dtype)


def load_text_encoder(folder: Path = WEIGHTS, dtype: torch.dtype = torch.float32) -> TextEncoder:
    """The trained text encoder, in eval mode on the CPU."""
    return _load(text_encoder(), "text", folder, dtype)


SHARED = (
    "down_blocks.1.resnets.0.time_emb_proj.weight",
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight",
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0.weight",
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_q.weight",
    "mid_block.resnets.1.time_emb_proj.weight",
)
"""Weights of the ControlNet that are the UNet's own. It began as a copy; going back to it in these places moves what
the ControlNet adds by under 4 %, and they need not be kept twice."""


_SCALE = ".scale"
"""Behind a weight's name in its file: what its rows are multiplied by."""
_LARGEST = 127


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are stored: int8 with a float16 scale for each row [rows, ...]; those of one axis in float16."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim < 2:
            found[name] = weight.detach().half().cpu().contiguous()
            continue
        rows = weight.detach().float().cpu().flatten(1)
        scale = (rows.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float16).tiny).half()
        small = (rows / scale.float()).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        found |= {name: small.reshape(weight.shape), name + _SCALE: scale[:, 0].contiguous()}
    return found


def unpacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float16 weights of what `packed` gave."""
    scales = {name.removesuffix(_SCALE): scale for name, scale in stored.items() if name.endswith(_SCALE)}
    return {
        name: (weight.flatten(1).float() * scales[name].float()[:, None]).half().reshape(weight.shape)
        if name in scales
        else weight
        for name, weight in stored.items()
        if not name.endswith(_SCALE)
    }


def read_weights(name: str, folder: Path = WEIGHTS) -> dict[str, torch.Tensor]:
    """The float16 weights of "unet", "vae", "controlnet" or "text", in diffusers' names."""
    weights = unpacked(load_file(folder / f"{name}.safetensors"))
    if name == "controlnet":
        own = read_weights("unet", folder)
        weights = {**{shared: own[shared] for shared in SHARED}, **weights}
    return weights


def _load(module: _Module, name: str, folder: Path, dtype: torch.dtype) -> _Module:
    module.load_state_dict(read_weights(name, folder))
    return module.to(dtype).eval().requires_grad_(False)


# ---- the same networks in ComfyUI's terms


def comfy_unet_config(sizes: Sizes = SIZES) -> dict[str, Any]:
    """What `comfy.supported_models.SD15` takes: exactly `unet(sizes)`. Add `dtype` to choose one."""
    repeat = [sizes.blocks] * len(sizes.multiples)
    return {
        "image_size": 32,
        "in_channels": sizes.latent,
        "out_channels": sizes.latent,
        "model_channels": sizes.channels,
        "num_res_blocks": repeat,
        "channel_mult": list(sizes.multiples),
        "transformer_depth": [depth for depth in sizes.down_depth for _ in range(sizes.blocks)],
        "transformer_depth_middle": 1,
        "transformer_depth_output": [depth for depth in sizes.up_depth for _ in range(sizes.blocks + 1)],
        "context_dim": sizes.context,
        "num_heads": sizes.heads,
        "num_head_channels": -1,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
        "use_temporal_attention": False,
        "use_checkpoint": False,
        "legacy": False,
    }


class _Channels(int):
    """A channel multiple that stands for a number of channels: `ch * _Channels(32)` is 32.

    ComfyUI takes the first level's channels and every level's multiple of them; here the levels between are
    narrower than the first, which no whole multiple can say.
    """

    def __rmul__(self, other: int) -> int:
        return int(self)


def comfy_vae_config(sizes: Sizes = SIZES) -> dict[str, Any]:
    """What `comfy.sd.VAE(config=...)` takes: exactly `vae(sizes)`."""
    ddconfig = {
        "double_z": True,
        "z_channels": sizes.latent,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": sizes.vae_channels[0],
        "ch_mult": [_Channels(channels) for channels in sizes.vae_channels],
        "num_res_blocks": sizes.vae_blocks,
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    return {"params": {"ddconfig": ddconfig, "embed_dim": sizes.latent}}
