"""Model files at full size with random weights, which stock loader nodes take for real ones.

They are made once, by the Python that runs ComfyUI, on the GPU where there is one. Weights are scaled so that
activations stay finite in half precision. A UNet mostly predicts its own input, as a trained one does, and little else,
so that small differences stay small over many steps: another precision makes nearly the same picture, another prompt a
different one, and an error says something.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..patching.patches import ADAPTER, FLUXES, MOTION_MODULE, WANS
from ..subjects.models import FLUX_DEV, SD15, SDXL, VAE, flux_config
from ..subjects.weights import randomise, randomise_controlnet, randomise_t5, randomise_unet
from . import adapter, gguf_file, motion_module
from .families import CHECKPOINT, CONTROLNET, DIFFUSION_MODEL, FAMILIES, LORA, TEXT_ENCODER, ModelFile
from .families import VAE as VAE_FOLDER

SEED = 7
LORA_RANK = 16
UNET_SHARE = 0.03
"""The factor by which the part of a UNet's prediction is made smaller that is not its own input."""
UNET_GAIN = 0.85
"""How much of its input a UNet predicts: latents so end near the size of real ones. With all of it they end near 0, and
rounding that was small beside the noise is as large as they are."""

TINY = {
    **SD15, "num_res_blocks": [1], "channel_mult": [1], "transformer_depth": [1], "transformer_depth_output": [0, 0],
    "transformer_depth_middle": -1,
}  # fmt: skip
"""As small as the stock loader takes for SD1.5: the widths are what it looks at."""

TINY_DEEP = {
    **SD15, "num_res_blocks": [1, 1], "channel_mult": [1, 1], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
}  # fmt: skip
"""The same with a second level and a middle, into which other authors' nodes reach."""

UNETS: dict[str, dict[str, Any]] = {"sd15": SD15, "sdxl": SDXL, "tiny": TINY, "tiny-deep": TINY_DEEP}
_OF_A_DECODER = "out_channels", "transformer_depth_output"
"""What a UNet's config says of the half that a ControlNet has not."""

FLUX_SCHNELL = {**FLUX_DEV, "guidance_embed": False}
_GGUF = "-gguf"
"""Ends the name of a family that is another one in GGUF."""
FLUX_CONFIGS = {
    "flux": FLUX_SCHNELL,
    "flux-third": {**FLUX_SCHNELL, "depth": 6, "depth_single_blocks": 13},
    "tiny-flux": {
        **FLUX_SCHNELL, "hidden_size": 256, "num_heads": 2, "context_in_dim": 64, "vec_in_dim": 32, "depth": 5,
        "depth_single_blocks": 10,
    },
}  # fmt: skip
"""A third has 4 billion weights; a tiny one has the layers that SkipLayerGuidanceDiT leaves out."""
WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "patch_size": (1, 2, 2), "in_dim": 16, "dim": 1536, "ffn_dim": 8960,
    "freq_dim": 256, "out_dim": 16, "num_heads": 12, "num_layers": 30, "qk_norm": True, "cross_attn_norm": True,
}  # fmt: skip
"""Wan 2.1 T2V 1.3B."""
WAN_CONFIGS = {"wan": WAN, "tiny-wan": {**WAN, "dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 6}}
QWEN_IMAGE = {"image_model": "qwen_image", "num_layers": 10}
"""A sixth of its blocks, each of full size: 3.4 billion weights."""
Z_IMAGE = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 3840, "cap_feat_dim": 2560, "n_layers": 8,
    "qk_norm": True, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}  # fmt: skip
"""8 of its 30 layers, each of full size, and all of its refiners: 2.2 billion weights."""
T5_CONFIGS = {"t5-xxl": "t5_config_xxl.json", "t5-base": "t5_config_base.json"}
"""ComfyUI's own, by the family; with a type of Load CLIP that has no other part they are a whole text encoder."""

_LORA_TARGETS = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
_SPARE_BYTES = 2 * 2**30

Tensors = dict[str, torch.Tensor]


class NoRoom(Exception):
    """The disk is too full for a model file."""


def missing(files: Iterable[ModelFile], models: Path) -> list[ModelFile]:
    """Return the files that a folder of models lacks, each once."""
    return [file for file in dict.fromkeys(files) if not (models / file.path).is_file()]


def make(file: ModelFile, models: Path) -> None:
    """Make one file.

    Raises:
        NoRoom: the disk is too full.
    """
    with torch.inference_mode():
        tensors = {name: tensor.contiguous() for name, tensor in _MAKERS[file.folder](file.family).items()}
    _save(tensors, models / file.path)


def _save(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if shutil.disk_usage(path.parent).free < needed + _SPARE_BYTES:
        raise NoRoom(f"{path.name} needs {needed / 2**30:.1f} GiB in {path.parent}; name another folder by --models")
    unfinished = path.with_name(f"{os.getpid()}-{path.name}")
    if path.suffix == ".gguf":
        gguf_file.save(tensors, "flux", unfinished)
    else:
        save_file(tensors, unfinished)
    unfinished.replace(path)


def _checkpoint(family: str) -> Tensors:
    unet, vae = _unet(family).state_dict(), _vae(family)
    return {**_prefixed("model.diffusion_model.", unet), **_prefixed("first_stage_model.", vae)}


def _diffusion_model(family: str) -> Tensors:
    import comfy.model_base
    import comfy.supported_models

    family = family.removesuffix(_GGUF)
    if family in FLUXES:
        config, kind = comfy.supported_models.FluxSchnell(flux_config(FLUX_CONFIGS[family])), comfy.model_base.Flux
    elif family in WANS:
        config, kind = comfy.supported_models.WAN21_T2V(dict(WAN_CONFIGS[family])), comfy.model_base.WAN21
    elif family == "z-image":
        config, kind = comfy.supported_models.ZImage(dict(Z_IMAGE)), comfy.model_base.Lumina2
    else:
        assert family == "qwen-image", family
        config, kind = comfy.supported_models.QwenImage(dict(QWEN_IMAGE)), comfy.model_base.QwenImage
    network = _network(config, kind, torch.bfloat16)
    randomise(network, SEED)
    if family in WANS:
        _make_time_slow(network)
    tensors = _on_cpu(network.state_dict())
    return _in_old_names(tensors) if family in FLUXES else tensors


def _make_time_slow(wan: Any) -> None:
    """Have one step's embedding of time be near the next one's, as a trained model's is: caches go by that."""
    weight = wan.time_embedding[0].weight
    weight.view(len(weight), 2, -1)[:, :, : weight.shape[1] // 4] = 0  # the faster half of the waves


def _unet(family: str) -> Any:
    """A UNet on the device that computes."""
    import comfy.model_base
    import comfy.supported_models

    if family == "sdxl":
        network = _network(comfy.supported_models.SDXL(dict(SDXL)), comfy.model_base.SDXL, torch.float16)
    else:
        network = _network(comfy.supported_models.SD15(dict(UNETS[family])), comfy.model_base.BaseModel, torch.float16)
    randomise_unet(network, SEED)
    _make_steady(network)
    return network


@torch.no_grad()
def _make_steady(unet: Any) -> None:
    """Make the random part of a UNet's prediction small beside its own input, which `randomise_unet` leads past it."""
    led = 2 * unet.out_channels
    unet.out[-1].weight[:, :led].mul_(UNET_GAIN)
    unet.out[-1].weight[:, led:].mul_(UNET_SHARE)
    block, *others = unet.output_blocks[-1]
    for layer in (block.out_layers[-1], *(other.proj_out for other in others)):
        layer.weight[:led].mul_(UNET_SHARE)
        layer.bias[:led].mul_(UNET_SHARE)


def _network(config: Any, kind: Any, dtype: torch.dtype) -> Any:
    """A model's network on the device that computes, without weights yet."""
    import comfy.model_management as management

    config.set_inference_dtype(dtype, None)
    return kind(config, device=management.get_torch_device()).diffusion_model


def _vae(family: str) -> Tensors:
    if family.startswith("tiny"):
        return _tiny_vae()
    import comfy.model_management as management
    from comfy.ldm.models.autoencoder import AutoencoderKL

    channels = FAMILIES[family].channels
    with torch.device(management.get_torch_device()):
        network = AutoencoderKL(ddconfig={**VAE, "z_channels": channels}, embed_dim=channels)
    randomise(network, SEED)
    tensors = network.state_dict()
    if channels == 16:  # Flux's VAE, which ComfyUI knows by lacking these layers
        tensors = {name: tensor for name, tensor in tensors.items() if "quant_conv." not in name}
    return _on_cpu(tensors, torch.float16)


def _tiny_vae() -> Tensors:
    from comfy.taesd.taesd import TAESD

    network = TAESD()
    randomise(network, SEED)
    with torch.no_grad():
        network.vae_scale.fill_(0.18215)
        network.vae_shift.fill_(0)
    return _on_cpu(network.state_dict())


def _controlnet(family: str) -> Tensors:
    return _flux_controlnet(family) if family in FLUXES else _unet_controlnet(family)


def _flux_controlnet(family: str) -> Tensors:
    """Of XLabs's kind: two double blocks, and a hint in pixels."""
    import comfy.ldm.flux.controlnet
    import comfy.model_management as management
    import comfy.ops

    network = comfy.ldm.flux.controlnet.ControlNetFlux(
        **flux_config({**FLUX_CONFIGS[family], "depth": 2, "depth_single_blocks": 0}), dtype=torch.bfloat16,
        device=management.get_torch_device(), operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    randomise(network, SEED)
    return _in_old_names(_on_cpu(network.state_dict()))


def _in_old_names(flux: Tensors) -> Tensors:
    """By these names all ComfyUIs know a file of Flux's kind; newer ones have others for it in memory."""
    return {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in flux.items()}


def _unet_controlnet(family: str) -> Tensors:
    import comfy.cldm.cldm
    import comfy.model_management as management
    import comfy.ops
    import comfy.supported_models

    kind = comfy.supported_models.SDXL if family == "sdxl" else comfy.supported_models.SD15
    unet = {name: value for name, value in UNETS[family].items() if name not in _OF_A_DECODER}
    network = comfy.cldm.cldm.ControlNet(
        **unet, **kind.unet_extra_config, hint_channels=3, dtype=torch.float16,
        device=management.get_torch_device(), operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    randomise_controlnet(network, SEED)
    return _prefixed("control_model.", network.state_dict())


def _lora(family: str) -> Tensors:
    """Of all attention layers; its parts have the size of the weights' own rounding and more."""
    generator = torch.Generator().manual_seed(SEED)
    found: Tensors = {}
    for name, weight in _unet(family).state_dict().items():
        if name.endswith(_LORA_TARGETS):
            base, (rows, columns) = f"diffusion_model.{name.removesuffix('.weight')}", weight.shape
            down = torch.randn(LORA_RANK, columns, generator=generator) / columns**0.5
            up = 0.1 * torch.randn(rows, LORA_RANK, generator=generator) / LORA_RANK**0.5
            found |= {f"{base}.lora_down.weight": down.half(), f"{base}.lora_up.weight": up.half()}
    return found


def _text_encoder(family: str) -> Tensors:
    import comfy.model_management as management

    network = t5_of(family, management.get_torch_device())
    randomise_t5(network, SEED)
    return _on_cpu(network.state_dict())


def t5_of(family: str, device: torch.device) -> Any:
    """Return a family's T5 as ComfyUI has it, in half precision, without weights yet."""
    import comfy.ops
    from comfy.text_encoders import t5

    config = Path(t5.__file__).with_name(T5_CONFIGS[family]).read_text(encoding="utf-8")
    return t5.T5(json.loads(config), torch.float16, device, comfy.ops.disable_weight_init)


def _adapter(family: str) -> Tensors:
    return adapter.make(family, _unet(family).state_dict(), SEED)


def _motion_module(family: str) -> Tensors:
    assert family == "sd15", family
    return motion_module.make(SEED)


_MAKERS: Mapping[str, Callable[[str], Tensors]] = {
    CHECKPOINT: _checkpoint,
    DIFFUSION_MODEL: _diffusion_model,
    VAE_FOLDER: _vae,
    CONTROLNET: _controlnet,
    LORA: _lora,
    TEXT_ENCODER: _text_encoder,
    ADAPTER: _adapter,
    MOTION_MODULE: _motion_module,
}


def _prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {prefix + name: tensor for name, tensor in _on_cpu(tensors).items()}


def _on_cpu(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Tensors:
    """A copy in the CPU's memory, in another dtype where one is named."""
    return {name: tensor.to("cpu", dtype or tensor.dtype) for name, tensor in tensors.items()}
