"""Model files with random weights that ComfyUI's stock loaders accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd1_clip
import comfy.utils
import torch
from comfy.cldm.cldm import ControlNet
from comfy.clip_model import CLIPTextModel
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.taesd.taesd import TAESD
from safetensors.torch import save_file

from slipstream.demo.model import comfy_unet_config

from ..server import FOLDERS
from .architectures import SD2, SD15, SDXL, Family
from .weights import randomise, randomise_controlnet, randomise_taesd, randomise_unet

FAMILIES = {family.name: family for family in (SD15, SD2, SDXL)}
LORA_RANK = 4
# Diffusers' names, as LoRA trainers write them.
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "conv1", "conv2")

Tensors = dict[str, torch.Tensor]


class ModelFiles:
    """A models folder that fills on demand; each method returns the name that the stock loader takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)

    def checkpoint(self, family: str = "sd15", seed: int = 1) -> str:
        """Make a checkpoint for CheckpointLoaderSimple: UNet and tiny VAE, no text encoder."""

        def tensors() -> Tensors:
            unet = _prefixed("model.diffusion_model.", _unet(FAMILIES[family], seed))
            return unet | _prefixed("first_stage_model.", _vae(seed))

        return self._made("checkpoints", f"{family}-{seed}", tensors)

    def unet(self, family: str = "sd15", seed: int = 1, dtype: torch.dtype = torch.float16) -> str:
        """Make a UNet alone for UNETLoader; fp8 for a checkpoint stored in 8 bits."""

        def tensors() -> Tensors:
            return {name: tensor.to(dtype) for name, tensor in _unet(FAMILIES[family], seed).items()}

        return self._made("diffusion_models", f"{family}-{seed}-{str(dtype).removeprefix('torch.')}", tensors)

    def vae(self, seed: int = 1) -> str:
        """Make a VAE for VAELoader."""
        return self._made("vae", f"vae-{seed}", lambda: _vae(seed))

    def controlnet(self, family: str = "sd15", seed: int = 1) -> str:
        """Make a ControlNet for ControlNetLoader."""

        def tensors() -> Tensors:
            return _prefixed("control_model.", _controlnet(FAMILIES[family], seed))

        return self._made("controlnet", f"{family}-{seed}", tensors)

    def text_encoder(self, seed: int = 1) -> str:
        """Make CLIP-L at its real size for CLIPLoader, which knows it by its widths."""

        def tensors() -> Tensors:
            config = json.loads((Path(comfy.sd1_clip.__file__).parent / "sd1_clip_config.json").read_text())
            model = CLIPTextModel(config, torch.float32, "cpu", comfy.ops.disable_weight_init)
            randomise(model, seed)
            return _half(model.state_dict())

        return self._made("text_encoders", f"clip-l-{seed}", tensors)

    def lora(self, family: str = "sd15", seed: int = 1) -> str:
        """Make a LoRA for LoraLoaderModelOnly, over attention, projections and convolutions."""
        shape = FAMILIES[family]
        return self._made("loras", f"{family}-{seed}", lambda: _lora({**shape.config(), **shape.heads}, seed))

    def demo_lora(self, seed: int = 1) -> str:
        """Make such a LoRA for the demo model."""
        return self._made("loras", f"demo-{seed}", lambda: _lora(comfy_unet_config(), seed))

    def _made(self, kind: str, name: str, make: Callable[[], Tensors]) -> str:
        path = self.folder / kind / f"{name}.safetensors"
        if not path.exists():
            tensors = {key: tensor.contiguous() for key, tensor in make().items()}
            save_file(tensors, path)
        return path.name


def _unet(family: Family, seed: int) -> Tensors:
    unet = UNetModel(**family.config(), **family.heads, operations=comfy.ops.disable_weight_init)
    randomise_unet(unet, seed)
    return _half(unet.state_dict())


def _controlnet(family: Family, seed: int) -> Tensors:
    config = {name: value for name, value in family.config().items() if name != "out_channels"}
    controlnet = ControlNet(**config, **family.heads, hint_channels=3, operations=comfy.ops.disable_weight_init)
    randomise_controlnet(controlnet, seed)
    return _half(controlnet.state_dict())


def _vae(seed: int) -> Tensors:
    vae = TAESD()
    randomise_taesd(vae, seed)
    return vae.state_dict()


def _lora(config: dict[str, Any], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        unet = UNetModel(**config, operations=comfy.ops.disable_weight_init)
    weights = unet.state_dict()
    lora: Tensors = {}
    for theirs, ours in sorted(comfy.utils.unet_to_diffusers(config).items()):
        layer = theirs.removesuffix(".weight")
        if theirs.endswith(".weight") and layer.endswith(LORA_TARGETS) and ours in weights:
            lora |= _lora_layer("lora_unet_" + layer.replace(".", "_"), weights[ours].shape, generator)
    return lora


def _lora_layer(name: str, shape: torch.Size, generator: torch.Generator) -> Tensors:
    fan_in = shape[1:].numel()
    down = torch.randn(LORA_RANK, *shape[1:], generator=generator) / fan_in**0.5
    up = torch.randn(shape[0], LORA_RANK, *[1] * (len(shape) - 2), generator=generator) / LORA_RANK**0.5
    alpha = torch.tensor(float(LORA_RANK))
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": 0.1 * up, f"{name}.alpha": alpha}


def _half(tensors: Tensors) -> Tensors:
    return {name: tensor.half() for name, tensor in tensors.items()}


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}
