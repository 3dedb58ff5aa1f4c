"""The weights that a WebUI of the Forge family computes with right now, as plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...core.errors import UnsupportedModel
from .families import Family

Weights = dict[str, torch.Tensor]


def current_weights(
    family: Family, unet: torch.nn.Module, wanted: frozenset[str], dtype: torch.dtype, device: torch.device
) -> Weights:
    """State-dict name -> tensor in `dtype` on `device`, LoRA included.

    A loaded model's own parameters are handed out as they are. Where the host casts a layer's weights at every call
    (stored in fp8, kept in RAM, patched on the fly), its own cast gives a copy, so that engine and plain model use the
    same weights.

    Raises:
        UnsupportedModel: weights are missing or quantised, or the copies would not fit into the device's memory.
    """
    layers = {name: layer for name, layer in unet.named_modules() if _has_own(layer)}
    if reason := next(filter(None, map(family.why_unreadable, layers.values())), None):
        raise UnsupportedModel(f"The plain model is used: {reason}")
    _check_memory(family, layers, dtype, device)
    like = torch.empty(0, dtype=dtype, device=device)
    found: Weights = {}
    with torch.no_grad():
        for name, layer in layers.items():
            found.update(_weights_of(family, name, layer, like))
    if missing := sorted(wanted - set(found)):
        raise UnsupportedModel(f"The model holds no weight {missing[0]!r} ({len(missing)} are missing)")
    return {name: found[name] for name in wanted}


def _has_own(layer: torch.nn.Module) -> bool:
    tensors = [*layer._parameters.values(), *layer._buffers.values()]
    return any(tensor is not None for tensor in tensors)


def _weights_of(family: Family, prefix: str, layer: Any, like: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    own = {name: tensor for name, tensor in _own(layer) if name not in ("weight", "bias")}
    if _is_at_hand(family, layer, like.dtype, like.device):
        own |= {name: tensor for name, tensor in _own(layer) if name in ("weight", "bias")}
    else:
        weight, bias = family.cast(layer, like)
        own |= {name: part for name, part in (("weight", weight), ("bias", bias)) if part is not None}
    for name, tensor in own.items():
        wanted = like.dtype if tensor.is_floating_point() else tensor.dtype
        yield f"{prefix}.{name}" if prefix else name, tensor.detach().to(device=like.device, dtype=wanted)


def _own(layer: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
        if tensor is not None:
            yield name, tensor


def _is_at_hand(family: Family, layer: Any, dtype: torch.dtype, device: torch.device) -> bool:
    parts = [tensor for name, tensor in _own(layer) if name in ("weight", "bias")]
    return not family.casts(layer) and all((part.dtype, part.device) == (dtype, device) for part in parts)


def _check_memory(family: Family, layers: dict[str, torch.nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu":
        return
    copied = [layer for layer in layers.values() if not _is_at_hand(family, layer, dtype, device)]
    needed = sum(tensor.numel() for layer in copied for _, tensor in _own(layer)) * dtype.itemsize
    manager = family.manager()
    free = max(0, int(manager.get_free_memory(device)) - int(manager.minimum_inference_memory())) if needed else 0
    if needed > free:
        raise UnsupportedModel(
            f"The model's weights are not in the engine's form (low VRAM mode, or stored in another dtype), and a copy "
            f"needs {needed >> 20} MB of the {free >> 20} MB that are free on {device}; your model runs without an "
            "engine. "
            "A smaller picture or batch, or fewer loaded models, may leave room"
        )
