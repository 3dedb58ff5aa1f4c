"""diffusers' own models with a case's weights, and the public recipe that makes them fast.

The recipe: query, key and value as one product, channels last, `torch.compile` that tries out kernels. Nothing of ours
is in it: it is what somebody gets who does without Slipstream and without ComfyUI.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.errors import UnsupportedModel
from ...core.protocols import Tensors
from .models import Model
from .setup import package_versions

PACKAGE, EIGHT_BITS_PACKAGE = "diffusers", "torchao"

OPTIONS: Mapping[str, Any] = {
    "conv_1x1_as_mm": True,
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "epilogue_fusion": False,
}
"""Of torch's compiler, in the recipe."""

OPTIONS_OF_EIGHT_BITS: Mapping[str, Any] = {"force_fuse_int_mm_with_mul": True}
"""What the recipe sets besides for int8: products are scaled back where they are computed."""

State = Mapping[str, torch.Tensor]


def why_not(model: Model, eight_bits: bool) -> str | None:
    """Why diffusers' model cannot stand beside this one; None where it can."""
    for package in _packages(eight_bits):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if not model.is_unet and not model.is_decoder:
        return "only UNets and the VAE's decoder are compared with diffusers"
    try:
        if model.is_unet:
            unet_layout(config_of(model))
    except UnsupportedModel as error:
        return str(error)
    return None


def _packages(eight_bits: bool) -> tuple[str, ...]:
    return (PACKAGE, EIGHT_BITS_PACKAGE) if eight_bits else (PACKAGE,)


def versions(eight_bits: bool) -> dict[str, str]:
    """Of the packages that the recipe is made of, as far as they tell."""
    return package_versions(_packages(eight_bits))


def config_of(model: Model) -> dict[str, Any]:
    """ComfyUI's configuration of a UNet, with what its class adds."""
    return dict(model.patcher.model.model_config.unet_config)


def network_of(model: Model) -> torch.nn.Module:
    """diffusers' module with copies of the model's weights.

    Raises:
        UnsupportedModel, ValueError: see `unet` and `decoder`.
    """
    if model.is_decoder:
        return decoder(model.module.autoencoder.state_dict())  # type: ignore[union-attr]
    return unet(config_of(model), model.module.state_dict())


def called(network: Any, inputs: Tensors) -> Tensors:
    """One call of such a module, or of it compiled."""
    if "z" in inputs:
        return {"out": network(inputs["z"])}
    args = (inputs["x"], inputs["timesteps"], inputs["context"])
    return {"out": network(*args, class_labels=inputs.get("y"), return_dict=False)[0]}


def compiler_options(eight_bits: bool) -> dict[str, Any]:
    """For `torch.compile`: what its mode "max-autotune" means, and the recipe's on top.

    The recipe sets them for the whole process; given to one compilation they leave the other variants alone.
    """
    from torch._inductor import list_mode_options

    return {**list_mode_options("max-autotune"), **OPTIONS, **(OPTIONS_OF_EIGHT_BITS if eight_bits else {})}


# UNets


def unet_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """diffusers' configuration of a UNet.

    The text as a whole, and sizes, arrive as one vector already, as ComfyUI gives them: `class_embed_type`.

    Args:
        config: ComfyUI's, of the model as it was made.

    Raises:
        UnsupportedModel: diffusers cannot put it together, as its blocks are unlike within a level.
    """
    widths = [config["model_channels"] * factor for factor in config["channel_mult"]]
    depths = _depths(config, len(widths))
    return {
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"],
        "block_out_channels": tuple(widths),
        "layers_per_block": config["num_res_blocks"][0],
        "down_block_types": tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        "up_block_types": tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)),
        # The last one is the middle's too; a level without attention reads none.
        "transformer_layers_per_block": (*(depth or 1 for depth in depths[:-1]), config["transformer_depth_middle"]),
        "attention_head_dim": tuple(_heads(config, width) for width in widths),  # diffusers' name for their number
        "cross_attention_dim": config["context_dim"],
        "use_linear_projection": config["use_linear_in_transformer"],
        **_vector(config["adm_in_channels"]),
    }


def _depths(config: Mapping[str, Any], levels: int) -> list[int]:
    """Transformer blocks in each attention of a level.

    Raises:
        UnsupportedModel: they are not the same everywhere in it.
    """
    blocks = config["num_res_blocks"]
    down, up = list(config["transformer_depth"]), list(config["transformer_depth_output"])
    each = blocks[0]
    depths = down[::each]
    middle = config["transformer_depth_middle"]
    is_even = (
        len(set(blocks)) == 1 and len(depths) == levels and down == [depth for depth in depths for _ in range(each)]
    )
    if not is_even or up != [depth for depth in depths for _ in range(each + 1)] or middle < 1:
        raise UnsupportedModel("diffusers puts no such UNet together: the blocks of a level are not alike")
    if depths[-1] not in (0, middle):
        raise UnsupportedModel("diffusers puts no such UNet together: the middle is not like the last level")
    return depths


def _heads(config: Mapping[str, Any], width: int) -> int:
    """Heads of attention; 1 where a level is too narrow to have any."""
    if config.get("num_head_channels", -1) > 0:
        return max(1, width // int(config["num_head_channels"]))
    return int(config["num_heads"])


def _vector(channels: int | None) -> dict[str, Any]:
    if channels is None:
        return {}
    return {"class_embed_type": "projection", "projection_class_embeddings_input_dim": channels}


def unet(config: Mapping[str, Any], state: State) -> torch.nn.Module:
    """diffusers' UNet with copies of ComfyUI's weights.

    Args:
        config: ComfyUI's.
        state: of ComfyUI's UNet.

    Raises:
        UnsupportedModel: diffusers cannot put it together.
        ValueError: a weight has no place, or a place no weight.
    """
    from comfy.utils import unet_to_diffusers
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        made = UNet2DConditionModel(**unet_layout(config))
    return _filled(made, state, unet_to_diffusers(config))


# The VAE's decoder


class Decoder(torch.nn.Module):
    """An autoencoder of diffusers whose call is its second half: latent [N, C, h, w] to picture [N, 3, 8 h, 8 w]."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        picture: torch.Tensor = self.autoencoder.decode(z, return_dict=False)[0]
        return picture

    def fuse_qkv_projections(self) -> None:
        self.autoencoder.fuse_qkv_projections()


def decoder(state: State) -> torch.nn.Module:
    """diffusers' decoder with copies of ComfyUI's weights; the encoder is left out.

    Args:
        state: of ComfyUI's autoencoder.

    Raises:
        ValueError: a weight has no place, or a place no weight.
    """
    from diffusers import AutoencoderKL

    wanted = {name: tensor for name, tensor in state.items() if name.startswith(("decoder.", "post_quant_conv."))}
    with torch.device("meta"):
        made = AutoencoderKL(**_decoder_layout(wanted))
    made.encoder = made.quant_conv = None
    return Decoder(_filled(made, wanted, _decoder_names(wanted)))


def _levels(state: State) -> int:
    return 1 + max(int(name.split(".")[2]) for name in state if name.startswith("decoder.up."))


def _decoder_layout(state: State) -> dict[str, Any]:
    """diffusers' configuration of an autoencoder with this decoder."""
    levels = _levels(state)
    widths = tuple(len(state[f"decoder.up.{level}.block.0.conv1.weight"]) for level in range(levels))
    blocks = sum(name.startswith("decoder.up.0.block.") and name.endswith(".conv1.weight") for name in state)
    return {
        "latent_channels": state["decoder.conv_in.weight"].shape[1],
        "out_channels": len(state["decoder.conv_out.weight"]),
        "block_out_channels": widths,
        "layers_per_block": blocks - 1,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
    }


_PARTS_OF_DECODER = {
    "mid.block_1": "mid_block.resnets.0",
    "mid.block_2": "mid_block.resnets.1",
    "mid.attn_1.norm": "mid_block.attentions.0.group_norm",
    "mid.attn_1.q": "mid_block.attentions.0.to_q",
    "mid.attn_1.k": "mid_block.attentions.0.to_k",
    "mid.attn_1.v": "mid_block.attentions.0.to_v",
    "mid.attn_1.proj_out": "mid_block.attentions.0.to_out.0",
    "norm_out": "conv_norm_out",
}


def _decoder_names(state: State) -> dict[str, str]:
    """diffusers' name to ComfyUI's; diffusers counts levels from the other end."""
    levels, found = _levels(state), {}
    for name in state:
        changed = name.replace("nin_shortcut", "conv_shortcut")
        for ours, theirs in _PARTS_OF_DECODER.items():
            changed = changed.replace(f"decoder.{ours}.", f"decoder.{theirs}.")
        for level in range(levels):
            place = f"decoder.up_blocks.{levels - 1 - level}."
            changed = changed.replace(f"decoder.up.{level}.block.", f"{place}resnets.")
            changed = changed.replace(f"decoder.up.{level}.upsample.", f"{place}upsamplers.0.")
        found[changed] = name
    return found


# Both


def _filled(made: Any, state: State, names: Mapping[str, str]) -> torch.nn.Module:
    """A module of diffusers, made without memory, with copies of weights.

    Args:
        names: diffusers' to ComfyUI's; more than it has, perhaps.

    Raises:
        ValueError: a weight has no place, or a place no weight.
    """
    shapes = {name: tensor.shape for name, tensor in made.state_dict().items()}
    found = {name: names[name] for name in shapes if names.get(name) in state}
    if missing := sorted(shapes.keys() - found.keys()):
        raise ValueError(f"ComfyUI's model has no {missing[0]}")
    if homeless := sorted(state.keys() - set(found.values())):
        raise ValueError(f"diffusers' model has no place for {homeless[0]}")
    copies = {name: _copy(state[ours], shapes[name]) for name, ours in found.items()}
    made.load_state_dict(copies, assign=True)
    network: torch.nn.Module = made.eval().requires_grad_(False)
    return network


def _copy(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Of a weight; a convolution of 1×1 is a linear layer elsewhere.

    Raises:
        ValueError: the shapes differ otherwise.
    """
    if tensor.numel() != math.prod(shape) or list(tensor.shape[: len(shape)]) != list(shape):
        raise ValueError(f"{list(tensor.shape)} is no weight of shape {list(shape)}")
    return tensor.detach().clone().reshape(tuple(shape))


def fused(network: Any) -> torch.nn.Module:
    """The same module: query, key and value are computed by one product, or key and value of a text."""
    network.fuse_qkv_projections()
    made: torch.nn.Module = network
    return made


def quantise(network: torch.nn.Module) -> None:
    """Let linear layers of attentions and what follows them multiply in int8, in place.

    The others see one row a sample: too few for a product in int8.
    """
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    # By itself it would set options of the compiler for the whole process.
    config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    quantize_(network, config, filter_fn=lambda module, name: _is_large(module, name))


def _is_large(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and "attentions." in name
