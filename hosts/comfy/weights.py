"""The weights that ComfyUI computes with right now, as plain tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...core.errors import UnsupportedModel


def current_weights(
    unet: torch.nn.Module, names: Iterable[str], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """State-dict name -> tensor in `dtype` on `device`, LoRA included.

    A loaded model's own parameters are handed out as they are. Where ComfyUI casts a layer's weights at every call
    (stored in fp8, kept in RAM, patched on the fly), its own cast gives a copy, so that engine and plain model use the
    same numbers.

    Raises:
        UnsupportedModel: weights are missing, or the copies would not fit into the device's memory.
    """
    wanted = set(names)
    layers = {name: layer for name, layer in unet.named_modules() if _casts(layer)}
    _check_memory(unet, layers, dtype, device)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, layer in layers.items():
            found.update(_cast_layer(name, layer, dtype, device))
        for name, tensor in [*unet.named_parameters(), *unet.named_buffers()]:
            if name in wanted and name not in found:
                found[name] = _as_needed(tensor.detach(), dtype, device)
    if missing := sorted(wanted - set(found)):
        raise UnsupportedModel(f"The model holds no weight {missing[0]!r} ({len(missing)} are missing)")
    return {name: found[name] for name in wanted}


def _casts(layer: Any) -> bool:
    """Whether ComfyUI computes this layer's weights anew at every call."""
    if getattr(layer, "weight", None) is None or not hasattr(layer, "comfy_cast_weights"):
        return False
    return bool(layer.comfy_cast_weights or layer.weight_function or layer.bias_function or hasattr(layer, "_v"))


def _cast_layer(name: str, layer: Any, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    import comfy.ops

    weight, bias = comfy.ops.cast_bias_weight(layer, dtype=dtype, device=device, bias_dtype=dtype)
    cast = {f"{name}.weight": weight} | ({f"{name}.bias": bias} if bias is not None else {})
    # The host may use the same staging buffer again for the next layer.
    own = {id(layer.weight), id(getattr(layer, "bias", None))}
    return {key: tensor.detach() if id(tensor) in own else tensor.detach().clone() for key, tensor in cast.items()}


def _as_needed(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)


def _check_memory(unet: torch.nn.Module, casting: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu":
        return
    import comfy.model_management as management

    copied = [
        tensor
        for name, tensor in unet.named_parameters()
        if name.rpartition(".")[0] in casting or tensor.dtype != dtype or tensor.device != device
    ]
    needed = sum(tensor.numel() for tensor in copied) * dtype.itemsize
    free = management.get_free_memory(device)
    if needed > 0.8 * free:
        raise UnsupportedModel(
            f"The model's weights are not in the engine's form (low VRAM mode, or stored in another dtype), and a copy "
            f"needs {needed >> 20} MB of the {int(free) >> 20} MB that are free on {device}"
        )
