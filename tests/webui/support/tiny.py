"""A checkpoint of about a million parameters as a WebUI of the Forge family holds it, made without files.

Its UNet, patcher, predictor and everything around them are the WebUI's own. Text encoder and autoencoder are stand-ins:
a prompt's letters make its embedding, and a latent's first channels are its picture.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from backend import memory_management
from backend.diffusion_engine.base import ForgeDiffusionEngine, ForgeObjects
from backend.nn.unet import IntegratedUNet2DConditionModel
from backend.operations import using_forge_operations
from backend.patcher.unet import UnetPatcher
from backend.state_dict import load_state_dict
from diffusers import DDIMScheduler
from huggingface_guess import model_list

CONTEXT = 32
CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1],
    "use_spatial_transformer": True,
    "context_dim": CONTEXT,
    "num_heads": 4,
    "adm_in_channels": None,
    "use_linear_in_transformer": False,
}


def unet(seed: int = 1, storage: torch.dtype = torch.float32) -> Any:
    """As the WebUI's loader makes it, of random numbers.

    Args:
        storage: another dtype than float32 is cast at each call.
    """
    with torch.device("cpu"):
        weights = _random(IntegratedUNet2DConditionModel(**_copied(CONFIG)), seed).state_dict()
    options = {"device": torch.device("cpu"), "dtype": storage}
    with using_forge_operations(**options, manual_cast_enabled=storage != torch.float32):
        made = IntegratedUNet2DConditionModel.from_config(_copied(CONFIG)).to(**options)
    load_state_dict(made, {name: tensor.to(storage) for name, tensor in weights.items()})
    made._internal_dict = {**_copied(CONFIG), "image_size": 32}  # loaders keep what was found in the file
    made.storage_dtype, made.computation_dtype = storage, torch.float32
    made.load_device = made.initial_device = made.offload_device = torch.device("cpu")
    return made


def _copied(config: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in config.items()}


def _random(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            is_scale = tensor.ndim == 1 and name.endswith("weight")
            tensor.copy_(1 + 0.1 * noise if is_scale else noise * (0.5 / max(1, tensor[0].numel()) ** 0.5))
    return module


def patcher(seed: int = 1, storage: torch.dtype = torch.float32) -> Any:
    """A `UnetPatcher` over such a UNet."""
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    return UnetPatcher.from_model(unet(seed, storage), scheduler, model_list.SD15(_copied(CONFIG)))


class TinyEngine(ForgeDiffusionEngine):
    """What a WebUI calls its `sd_model`."""

    def __init__(self, made: Any) -> None:
        vae = SimpleNamespace(latent_format=None, latent_channels=4)
        super().__init__(made.model.config, {"vae": vae})
        self.forge_objects = ForgeObjects(unet=made, clip=None, vae=vae, clipvision=None)
        self.forge_objects_original = self.forge_objects.shallow_copy()
        self.forge_objects_after_applying_lora = self.forge_objects.shallow_copy()
        self.is_sd1 = True
        self.sd_checkpoint_info = SimpleNamespace(name_for_extra="tiny", model_name="tiny", short_title="tiny")
        self.sd_model_hash = "0"

    def get_learned_conditioning(self, prompt: list[str]) -> torch.Tensor:
        """[N, 77, CONTEXT]"""
        seeds = [sum(map(ord, text)) for text in prompt]
        return torch.stack([torch.randn(77, CONTEXT, generator=torch.Generator().manual_seed(s)) for s in seeds])

    def encode_first_stage(self, x: torch.Tensor) -> torch.Tensor:
        small = torch.nn.functional.interpolate(x.float(), scale_factor=1 / 8)
        return torch.cat([small, small[:, :1]], dim=1)

    def decode_first_stage(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x[:, :3].float(), scale_factor=8).clamp(-1, 1)


def load(seed: int = 1, storage: torch.dtype = torch.float32) -> Any:
    """Make a tiny checkpoint the WebUI's current one, and return its `sd_model`."""
    from modules import sd_models, shared

    memory_management.unload_all_models()
    engine = TinyEngine(patcher(seed, storage))
    sd_models.model_data.set_sd_model(engine)
    sd_models.model_data.forge_hash = str(sd_models.model_data.forge_loading_parameters)
    shared.sd_model = engine
    return engine


def lora(model: Any, seed: int, strength: float = 1.0, online: bool = False) -> None:
    """Let the UNet of an `sd_model` have a LoRA from the next picture on, and none of before."""
    made = model.forge_objects_original.unet.clone()
    generator = torch.Generator().manual_seed(seed)
    key = "diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_q.weight"
    difference = torch.randn(made.model.state_dict()[key].shape, generator=generator)
    given = {"filename": f"lora {seed}", "strength_patch": strength, "online_mode": online}
    made.add_patches(patches={key: ("diff", (difference,))}, **given)
    model.forge_objects_after_applying_lora.unet = made
