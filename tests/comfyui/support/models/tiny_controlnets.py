"""ControlNets of transformers with random weights, small ones, from files as their authors publish them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.cldm.dit_embedder
import comfy.cldm.mmdit
import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.ldm.qwen_image.controlnet
import comfy.model_detection
import comfy.ops
import comfy.utils
import pytest
import torch
from safetensors.torch import save_file

from . import tiny
from .weights import randomise

POOLED_SD35 = 2048
"""ComfyUI's loader knows no other size of the pooled prompt."""

_STRENGTH = 0.3
_SIZES = (
    "hidden_size", "num_heads", "axes_dim", "context_in_dim",  # Flux
    "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope",  # Qwen-Image
)  # fmt: skip
"""What ComfyUI takes for granted about transformers, as all that are published have it."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        family: of the model that it is for, see `tiny.transformer`.
        network: makes one of ComfyUI's class.
        published: its weights under the names that a file has.
        takes_latents: its hint is led through a VAE.
        types: of a Union.
    """

    family: str
    network: Callable[..., Any]
    published: Callable[[Weights], Weights]
    takes_latents: bool = True
    types: tuple[int, ...] = ()


def _made(kind: Any, **config: Any) -> Any:
    layers = comfy.ops.disable_weight_init
    return kind(**config, dtype=torch.float32, device="cpu", operations=layers)


def _sd3() -> Any:
    config = {**tiny.TRANSFORMERS["sd3"].config, "x_block_self_attn_layers": []}
    return _made(comfy.cldm.mmdit.ControlNet, **config, num_blocks=2, control_latent_channels=16)


def _sd35(large: bool = False) -> Any:
    return _made(
        comfy.cldm.dit_embedder.ControlNetEmbedder,
        img_size=None, patch_size=2, in_chans=16, attention_head_dim=64, num_attention_heads=2,
        adm_in_channels=POOLED_SD35, num_layers=2, main_model_double=2, double_y_emb=large,
    )  # fmt: skip


def _flux(**more: Any) -> Any:
    config = {**tiny.transformer("flux").model.model_config.unet_config, "depth": 2}
    config.pop("dtype")
    return _made(comfy.ldm.flux.controlnet.ControlNetFlux, **config, **more)


def _qwen() -> Any:
    config = {**tiny.TRANSFORMERS["qwen"].config, "num_layers": 2}
    return _made(comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel, **config)


def _in_the_names_of(names: dict[str, Any], weights: Weights) -> Weights:
    """What ComfyUI would read as these weights, by a table from names in files to its own."""
    found: Weights = {}
    rest = dict(weights)
    for name, here in names.items():
        ours, part, change = (here, None, None) if isinstance(here, str) else (*here, None)[:3]
        if ours in weights:
            value = weights[ours] if part is None else weights[ours].narrow(*part)
            found[name] = value.clone() if change is None else change(value)
            rest.pop(ours, None)
    return {**found, **rest}


def _as_diffusers_sd3(weights: Weights) -> Weights:
    return _in_the_names_of(comfy.utils.mmdit_to_diffusers({"depth": 2, "num_blocks": 2}), weights)


def _as_stability(weights: Weights) -> Weights:
    found = _in_the_names_of({name: here for here, name, *_ in comfy.utils.MMDIT_MAP_BASIC}, weights)
    return {name: tensor for name, tensor in found.items() if not name.startswith("orig_y_embedder")}


def _as_diffusers_flux(weights: Weights) -> Weights:
    sizes = {"depth": 2, "depth_single_blocks": 1, "hidden_size": tiny.TRANSFORMERS["flux"].config["hidden_size"]}
    return _in_the_names_of(comfy.utils.flux_to_diffusers(sizes), weights)


def _as_xlabs(weights: Weights) -> Weights:
    return {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in weights.items()}


def _as_mistoline(weights: Weights) -> Weights:
    named = {name.replace("controlnet_single_", "single_controlnet_"): value for name, value in weights.items()}
    return _as_xlabs(named)


KINDS = {
    "sd3": Kind("sd3", _sd3, _as_diffusers_sd3),
    "sd35": Kind("sd3", _sd35, _as_stability),
    "sd35 large": Kind("sd3", lambda: _sd35(large=True), _as_stability),
    "flux xlabs": Kind("flux", _flux, _as_xlabs, takes_latents=False),
    "flux mistoline": Kind("flux", lambda: _flux(mistoline=True), _as_mistoline, takes_latents=False),
    "flux instantx": Kind("flux", lambda: _flux(latent_input=True, control_latent_channels=16), _as_diffusers_flux),
    "flux union": Kind(
        "flux",
        lambda: _flux(latent_input=True, control_latent_channels=16, num_union_modes=3),
        _as_diffusers_flux,
        types=(1,),
    ),
    "qwen": Kind("qwen", _qwen, dict),
}


def controlnet(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> Any:
    """Return a ControlNet that ComfyUI's own loader made, which is told of small sizes that it takes for granted."""
    kind = KINDS[name]
    network = kind.network()
    randomise(network, seed)
    for buffer in network.buffers():
        buffer.normal_(generator=torch.Generator().manual_seed(seed))
    for parameter_name, parameter in network.named_parameters():
        if parameter_name.startswith(("controlnet_blocks", "controlnet_single_blocks")):
            parameter.data.mul_(_STRENGTH)
    path = folder / f"{name}.safetensors"
    save_file(kind.published(network.state_dict()), path)
    detect, sizes = comfy.model_detection.detect_unet_config, tiny.TRANSFORMERS[kind.family].config

    def detected(*args: Any, **kwargs: Any) -> Any:
        return {**detect(*args, **kwargs), **{size: sizes[size] for size in _SIZES if size in sizes}}

    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detected)
    made = comfy.controlnet.load_controlnet(str(path))
    for key, tensor in made.control_model.state_dict().items():
        assert key.startswith("orig_y_embedder") or torch.equal(tensor, network.state_dict()[key]), key
    if kind.types:
        made.set_extra_arg("control_type", [*kind.types])
    return made


def model(name: str) -> Any:
    """Return a model that one of these ControlNets fits."""
    changes = {"adm_in_channels": POOLED_SD35} if name.startswith("sd35") else {}
    return tiny.transformer(KINDS[name].family, **changes)


def applied(
    control: Any, name: str, strength: float = 1.0, window: tuple[float, float] = (0.0, 1.0), seed: int = 3
) -> Any:
    """As Apply ControlNet (Advanced) has it: a copy with its hint, which `seed` tells."""
    kind = KINDS[name]
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    vae = _vae(tiny.TRANSFORMERS[kind.family].video) if kind.takes_latents else None
    return control.copy().set_cond_hint(picture, strength, window, vae)


def prompts(control: Any, name: str) -> dict[str, Any]:
    """A positive and a negative prompt with the same ControlNet, or with none."""
    more: dict[str, Any] = {} if control is None else {"control": control, "control_apply_to_uncond": False}
    if name.startswith("sd35"):
        more["pooled_output"] = torch.randn(1, POOLED_SD35, generator=torch.Generator().manual_seed(5))
    family = KINDS[name].family
    return {
        "positive": tiny.conditioning(family, 1, **more),
        "negative": tiny.conditioning(family, 2, **more),
    }


def _vae(has_frames: bool) -> Any:
    """Pictures in, latents of 16 channels out."""

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        small = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8) - 0.5
        latent = small.repeat(1, 6, 1, 1)[:, :16] * 4
        return latent.unsqueeze(2) if has_frames else latent

    return SimpleNamespace(encode=encode, spacial_compression_encode=lambda: 8)
