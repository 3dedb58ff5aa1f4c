"""What a plain engine cannot honour. Each check gives one reason in words, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models import attention_processor as processors

from ...core.dtypes import dtype_name
from .unet import ADDED, DiffusersUNet

# These compute the same thing, by different kernels.
_PLAIN_ATTENTION = (
    processors.AttnProcessor,
    processors.AttnProcessor2_0,
    processors.SlicedAttnProcessor,
    processors.XFormersAttnProcessor,
)
_FREEU = ("s1", "s2", "b1", "b2")
_RESIDUALS = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)
_HONOURED = ("sample", "timestep", "encoder_hidden_states", "added_cond_kwargs", "return_dict")


def why_not_these_layers(unet: UNet2DConditionModel, plain: torch.nn.Module) -> str | None:
    """Reasons in the structure of the UNet, compared with a fresh one of the same configuration."""
    layers = dict(unet.named_modules())
    if reason := _why_not_this_attention(unet):
        return reason
    if any(hasattr(layer, "base_layer") for layer in layers.values()):
        return (
            "a LoRA was added to the model as layers of its own; call pipe.fuse_lora() and then "
            "pipe.unload_lora_weights(), so that it becomes part of the weights"
        )
    wanted = dict(plain.named_modules())
    for name in [*wanted, *layers]:
        if type(layers.get(name)) is not type(wanted.get(name)):
            return f"the layer {name or 'at the root'} is not what the model's configuration says"
    return _why_not_these_tensors(unet, plain)


def _why_not_these_tensors(unet: UNet2DConditionModel, plain: torch.nn.Module) -> str | None:
    found = dict([*unet.named_parameters(), *unet.named_buffers()])
    wanted = dict([*plain.named_parameters(), *plain.named_buffers()])
    for name in [*wanted, *found]:
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            return f"the weight {name} is missing, new or of another shape than the model's configuration says"
        if type(found[name].data) is not torch.Tensor:
            return f"the weight {name} is stored as {type(found[name].data).__name__}, which engines cannot read"
    return None


def why_not_this_run(unet: UNet2DConditionModel) -> str | None:
    """Reasons in the state of the UNet, which hold for a whole sampling run."""
    if unet.training:
        return "the model is in training mode; call unet.eval()"
    if any(getattr(layer, factor, None) is not None for layer in unet.modules() for factor in _FREEU):
        return "FreeU is on, which engines do not have"
    return _why_not_this_attention(unet)


def _why_not_this_attention(unet: UNet2DConditionModel) -> str | None:
    for layer in unet.modules():
        processor = getattr(layer, "processor", None)
        if processor is not None and type(processor) not in _PLAIN_ATTENTION:
            return f"attention is computed by {type(processor).__name__}, as IP-Adapter and others do"
    return None


def why_not_this_call(
    unet: UNet2DConditionModel, arguments: Mapping[str, Any], architecture: DiffusersUNet
) -> str | None:
    """Reasons that hold for one call.

    Args:
        arguments: of `UNet2DConditionModel.forward`, by name.
    """
    if any(arguments.get(name) is not None for name in _RESIDUALS):
        return "a ControlNet or T2I-Adapter is active, which engines do not take yet"
    for name, value in arguments.items():
        if name not in _HONOURED and value is not None and value != {}:
            return f"the model is given {name!r}, which engines do not take"
    added = dict(arguments.get("added_cond_kwargs") or {})
    if set(added) != (set(ADDED) if architecture.takes_added else set()):
        return f"the model is given added_cond_kwargs {sorted(added)}, which its engines do not take"
    tensors = {name: arguments[name] for name in ("sample", "encoder_hidden_states")} | added
    return _why_not_these_inputs(tensors, unet)


def _why_not_these_inputs(tensors: Mapping[str, Any], unet: UNet2DConditionModel) -> str | None:
    device, dtype = unet.device, unet.dtype
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, which engines do not know; load the model in half precision instead"
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            return f"{name} is a {type(tensor).__name__}, engines take tensors"
        if tensor.device != device:
            return f"{name} lies on {tensor.device}, the model on {device}"
        if tensor.dtype != dtype and name != "time_ids":
            return f"{name} is {dtype_name(tensor.dtype)}, the model computes in {dtype_name(dtype)}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in [*tensors.values(), *unet.parameters()]):
        return "gradients are recorded, which engines do not have; sample inside torch.no_grad()"
    return None
