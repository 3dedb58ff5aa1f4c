"""The demo model inside ComfyUI: the same weights as ComfyUI's own MODEL, VAE and CONTROL_NET.

ComfyUI's file loaders know only the sizes of published models, so the networks are made from their
configuration here, and the weights' keys renamed from diffusers' to ComfyUI's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.errors import UnsupportedModel
from ....demo import model as demo
from ....demo import text

_RGB = [[0.3111, -0.4031, 0.1580], [0.5716, -0.8946, 0.0624], [0.6550, -0.2542, -0.4430], [0.0299, 0.8553, 0.4931]]
_RGB_BIAS = [0.0760, -0.0464, -0.0697]
"""Colours from -1 to 1 of a latent's four channels: least squares over the first 48 scenes, encoded."""


def load_demo_model() -> Any:
    """The denoiser as ComfyUI's MODEL, a `ModelPatcher`, in the precision that ComfyUI chooses here."""
    import comfy.model_base
    import comfy.model_management as mm
    import comfy.supported_models

    config = comfy.supported_models.SD15(demo.comfy_unet_config())
    config.set_inference_dtype(*_precision())
    model = comfy.model_base.BaseModel(config, device=mm.unet_offload_device())
    # For previews: latents of another autoencoder than Stable Diffusion's.
    model.latent_format.latent_rgb_factors, model.latent_format.latent_rgb_factors_bias = _RGB, _RGB_BIAS
    model.latent_format.taesd_decoder_name = None
    patcher = _patcher(model, mm.get_torch_device(), mm.unet_offload_device())
    _fill(model.diffusion_model, unet_weights(), patcher)
    return patcher


def load_demo_vae() -> Any:
    """The autoencoder as ComfyUI's VAE."""
    import comfy.sd

    return comfy.sd.VAE(sd=_stored("vae"), config=demo.comfy_vae_config())


def load_demo_controlnet() -> Any:
    """The canny ControlNet as ComfyUI's CONTROL_NET; its hint is white edges on black."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.model_management as mm
    import comfy.ops

    dtype, cast_dtype = _precision()
    config = {key: value for key, value in demo.comfy_unet_config().items() if key != "out_channels"}
    network = comfy.cldm.cldm.ControlNet(
        **config,
        hint_channels=3,
        dtype=dtype,
        device=mm.unet_offload_device(),
        operations=comfy.ops.pick_operations(dtype, cast_dtype),
    )
    _fill(network, controlnet_weights())
    return comfy.controlnet.ControlNet(network.eval(), load_device=mm.get_torch_device(), manual_cast_dtype=cast_dtype)


def encode_demo_prompt(prompt: str | Sequence[str]) -> list[list[Any]]:
    """A prompt as ComfyUI's CONDITIONING: `[[context [1, 77 * chunks, width] float32, {}]]`; several as one batch.

    Raises:
        UnknownWord: On a word outside the model's vocabulary.
    """
    return [[_text_encoder().encode(prompt), {}]]


@functools.cache
def _text_encoder() -> text.TextEncoder:
    return demo.load_text_encoder()  # 0.4 MB: stays on the CPU


def unet_weights() -> dict[str, Tensor]:
    """The denoiser's weights, float16, under ComfyUI's keys without a prefix."""
    return _renamed(_stored("unet"), _unet_keys())


def controlnet_weights() -> dict[str, Tensor]:
    """The ControlNet's weights, float16, under ComfyUI's keys without a prefix."""
    stored = _stored("controlnet")
    return _renamed(stored, _unet_keys() | _control_keys(stored))


def _unet_keys() -> dict[str, str]:
    import comfy.utils

    keys: dict[str, str] = comfy.utils.unet_to_diffusers(demo.comfy_unet_config())
    return keys


def _control_keys(stored: dict[str, Tensor]) -> dict[str, str]:
    """diffusers' key to ComfyUI's for what a ControlNet has beyond the UNet's way down."""
    blocks = sum(key.startswith("controlnet_cond_embedding.blocks.") for key in stored) // 2
    parts = {f"controlnet_cond_embedding.blocks.{i}": f"input_hint_block.{2 * i + 2}" for i in range(blocks)}
    parts["controlnet_cond_embedding.conv_in"] = "input_hint_block.0"
    parts["controlnet_cond_embedding.conv_out"] = f"input_hint_block.{2 * blocks + 2}"
    outlets = sum(key.startswith("controlnet_down_blocks.") for key in stored) // 2
    parts |= {f"controlnet_down_blocks.{i}": f"zero_convs.{i}.0" for i in range(outlets)}
    parts["controlnet_mid_block"] = "middle_block_out.0"
    return {f"{old}.{kind}": f"{new}.{kind}" for old, new in parts.items() for kind in ("weight", "bias")}


def _renamed(stored: dict[str, Tensor], keys: dict[str, str]) -> dict[str, Tensor]:
    return {keys[key]: value for key, value in stored.items()}


def _stored(name: str, folder: Path = demo.WEIGHTS) -> dict[str, Tensor]:
    file = folder / f"{name}.safetensors"
    if not file.is_file():
        raise UnsupportedModel(
            f"The demo model's weights are missing: {file}. Reinstall Slipstream, or train with demo/train.py"
        )
    return demo.read_weights(name, folder)


def _precision() -> tuple[torch.dtype, torch.dtype | None]:
    """What ComfyUI would hold such weights in, and compute in if that differs."""
    import comfy.model_management as mm

    dtype = mm.unet_dtype(model_params=7_000_000, weight_dtype=torch.float16)
    return dtype, mm.unet_manual_cast(dtype, mm.get_torch_device())


def _patcher(model: torch.nn.Module, load_device: torch.device, offload_device: torch.device) -> Any:
    """ComfyUI's current kind of patcher; before 0.16 there is but one."""
    import comfy.model_patcher

    kind = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return kind(model, load_device=load_device, offload_device=offload_device)


def _fill(network: torch.nn.Module, weights: dict[str, Tensor], patcher: Any = None) -> None:
    """Load all weights; a missing or unknown key is an error."""
    dynamic = hasattr(patcher, "is_dynamic") and patcher.is_dynamic()  # then the network holds no memory yet
    dtypes = {key: value.dtype for key, value in network.state_dict().items()}
    converted = {key: value.to(dtypes.get(key, value.dtype)) for key, value in weights.items()}
    network.load_state_dict(converted, assign=dynamic)
    network.requires_grad_(False)
