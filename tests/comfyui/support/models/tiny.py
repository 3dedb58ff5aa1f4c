"""Models of about a million parameters, made in this process without files."""

from __future__ import annotations

from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.supported_models
import comfy.taesd.taesd
import torch

from .architectures import (
    TINY_FLUX,
    TINY_LUMINA,
    TINY_PIXART,
    TINY_QWEN,
    TINY_SD2,
    TINY_SD3,
    TINY_SD15,
    TINY_SDXL,
    TINY_WAN,
    Transformer,
)
from .weights import randomise, randomise_controlnet, randomise_taesd, randomise_unet

FAMILIES = {family.name: family for family in (TINY_SD15, TINY_SD2, TINY_SDXL)}
CONFIGS = {
    "sd15": comfy.supported_models.SD15,
    "sd2": comfy.supported_models.SD20,
    "sdxl": comfy.supported_models.SDXL,
}
TRANSFORMERS = {family.name: family for family in (TINY_SD3, TINY_FLUX, TINY_WAN, TINY_QWEN, TINY_PIXART)}
OF_BLOCKS = {TINY_LUMINA.name: TINY_LUMINA}
"""Those that run by engines of their blocks alone."""
_TRANSFORMERS = {**TRANSFORMERS, **OF_BLOCKS}


def model(family: str = "sd15", seed: int = 1, v_prediction: bool = False, depth: int = 1) -> Any:
    """Return a `ModelPatcher` over a tiny UNet of a family: "sd15", "sd2" or "sdxl".

    Args:
        depth: how many blocks each of its transformers has.
    """
    shape = FAMILIES[family]
    config = CONFIGS[family]({**_deepened(shape.config(), depth), "dtype": torch.float32})
    config.unet_config.update(shape.heads)
    kind = comfy.model_base.ModelType.V_PREDICTION if v_prediction else comfy.model_base.ModelType.EPS
    base = comfy.model_base.SDXL if family.startswith("sdxl") else comfy.model_base.BaseModel
    made = base(config, model_type=kind, device=torch.device("cpu"))
    randomise_unet(made.diffusion_model, seed)
    return comfy.model_patcher.ModelPatcher(
        made, comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    )


def _deepened(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """A UNet's config with so many blocks where it has one."""
    depths = {name: value for name, value in config.items() if name.startswith("transformer_depth")}
    more = {
        name: [depth * each for each in value] if isinstance(value, list) else depth for name, value in depths.items()
    }
    return {**config, **more}


def transformer(family: str, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a `ModelPatcher` over a tiny diffusion transformer: "sd3", "flux", "wan", "qwen", "pixart" or "lumina".

    `changes` of its config make a rarer member of the family.
    """
    shape = _TRANSFORMERS[family]
    config = getattr(comfy.supported_models, shape.supported)({**_config(shape), **changes, "dtype": dtype})
    made = getattr(comfy.model_base, shape.base)(config, device=torch.device("cpu")).eval()
    randomise(made.diffusion_model, seed)
    for buffer in made.diffusion_model.buffers():
        buffer.detach().normal_(generator=torch.Generator().manual_seed(seed))
    return comfy.model_patcher.ModelPatcher(
        made, comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    )


def _config(family: Transformer) -> dict[str, Any]:
    """Newer ComfyUIs detect one more thing about Flux."""
    known = getattr(comfy.ldm.flux.model.FluxParams, "__dataclass_fields__", {})
    newer = {"txt_ids_dims": []} if family.name == "flux" and "txt_ids_dims" in known else {}
    return {**family.config, **newer}


def controlnet(family: str = "sd15", seed: int = 1) -> Any:
    """Return a tiny ControlNet that fits `model(family)`."""
    shape = FAMILIES[family]
    config = {name: value for name, value in shape.config().items() if name != "out_channels"}
    network = comfy.cldm.cldm.ControlNet(
        **config, **shape.heads, hint_channels=3, operations=comfy.ops.disable_weight_init
    )
    randomise_controlnet(network, seed)
    return comfy.controlnet.ControlNet(network, load_device=comfy.model_management.get_torch_device())


def vae(seed: int = 1, quantised: bool = True) -> Any:
    """Return a `comfy.sd.VAE` of the usual kind, a few channels wide; with or without convolutions around latents."""
    config = {
        "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3,
        "ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    made = comfy.sd.VAE(sd={}, config={"params": {"ddconfig": config, "embed_dim": 4}}, dtype=torch.float32)
    if not quantised:
        parts = {"params": config}
        here = "comfy.ldm.modules.diffusionmodules.model."
        made.first_stage_model = comfy.ldm.models.autoencoder.AutoencodingEngine(
            encoder_config={"target": here + "Encoder", **parts},
            decoder_config={"target": here + "Decoder", **parts},
            regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        ).eval()
        made.patcher = comfy.model_patcher.ModelPatcher(
            made.first_stage_model, made.device, made.patcher.offload_device
        )
    randomise(made.first_stage_model, seed)
    return made


def taesd(seed: int = 1) -> Any:
    """Return a `comfy.sd.VAE` over the tiny autoencoder of previews, at its real size."""
    weights = comfy.taesd.taesd.TAESD()
    with torch.no_grad():
        randomise_taesd(weights, seed)
    return comfy.sd.VAE(sd=weights.state_dict(), dtype=torch.float32)


def conditioning(family: str = "sd15", seed: int = 1, tokens: int = 77, **extras: Any) -> list[Any]:
    """Return a random prompt in ComfyUI's form; `extras` go into its options (control, area, strength, …)."""
    shape = {**FAMILIES, **_TRANSFORMERS}[family]
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randn(1, tokens, shape.context_dim, generator=generator)
    pooled = torch.randn(1, shape.pooled, generator=generator) if shape.pooled else None
    return [[prompt, {"pooled_output": pooled, **extras}]]


def size_of(family: str) -> int:
    """Of the pictures that a family is tried on."""
    return _TRANSFORMERS[family].size if family in _TRANSFORMERS else 64


def latent(size: int = 64, batch: int = 1, family: str = "sd15") -> dict[str, torch.Tensor]:
    """Return an empty latent for pictures of `size` pixels, or of one frame of them."""
    shape = _TRANSFORMERS.get(family)
    frames = (1,) if shape and shape.video else ()
    return {"samples": torch.zeros(batch, shape.channels if shape else 4, *frames, size // 8, size // 8)}


def sample(
    patcher: Any,
    family: str = "sd15",
    *,
    steps: int = 3,
    cfg: float = 7.0,
    seed: int = 7,
    size: int | None = None,
    batch: int = 1,
    positive: list[Any] | None = None,
    negative: list[Any] | None = None,
    sampler: str = "euler",
    scheduler: str = "normal",
    **options: Any,
) -> torch.Tensor:
    """Sample as the KSampler node does and return the latent; `options` go to `comfy.sample.sample`."""
    empty = latent(size or size_of(family), batch, family)["samples"]
    noise = comfy.sample.prepare_noise(empty, seed)
    return comfy.sample.sample(
        patcher, noise, steps, cfg, sampler, scheduler,
        positive or conditioning(family, 1), negative or conditioning(family, 2), empty,
        seed=seed, disable_pbar=True, **options,
    )  # fmt: skip
