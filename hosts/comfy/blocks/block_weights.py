"""The weights of a live block as its engine takes them, for the length of one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ....core.errors import UnsupportedModel
from ...live_model.held_weights import PLAIN
from ..process.current_weights import CASTS, LayerCast, as_needed, is_quantized
from .block_architecture import PREFIX

Wanted = Sequence[tuple[str, tuple[int, ...], torch.dtype]]
"""Name, shape and dtype of each weight."""

_CHANGES = "weight_function", "bias_function", "weight_lowvram_function", "bias_lowvram_function"
_STAGED = "_v"
"""Of a layer whose weights ComfyUI stages on demand (dynamic VRAM)."""


class BlockWeights:
    """Where a kind's weights lie in a block, layer by layer.

    Args:
        wanted: as an engine takes them.
    """

    def __init__(self, wanted: Wanted) -> None:
        layers: dict[tuple[str, ...], list[tuple[int, str, tuple[int, ...], torch.dtype]]] = {}
        for place, (name, shape, dtype) in enumerate(wanted):
            *path, own = name.removeprefix(PREFIX).split(".")
            layers.setdefault(tuple(path), []).append((place, own, shape, dtype))
        self._layers = [*layers.items()]
        self._wanted = wanted

    def among(self, weights: Mapping[str, torch.Tensor], path: str) -> list[torch.Tensor] | None:
        """A block's weights in the engine's order, of those of the whole network; None where not all are there.

        Args:
            path: of the block in the network.
        """
        found = [weights.get(f"{path}.{name.removeprefix(PREFIX)}") for name, _, _ in self._wanted]
        given = [tensor for tensor in found if tensor is not None]
        if len(given) < len(found):
            return None
        for tensor, (_, shape, dtype) in zip(given, self._wanted, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                return None
        return given

    def of(self, block: torch.nn.Module, device: torch.device, until: ExitStack) -> list[torch.Tensor]:
        """A block's weights in the engine's order: its own tensors where they are as they should be; else what
        ComfyUI's own cast gives, so that LoRAs, offloading and staging go on as they do.

        Args:
            until: closed once the call has been made.

        Raises:
            UnsupportedModel: they are of a kind, or of a shape, that the engine does not take.
        """
        found: list[Any] = [None] * len(self._wanted)
        for path, parts in self._layers:
            layer: Any = block
            for name in path:
                layer = layer._modules[name]
            own = layer.__dict__
            tensors = own["_parameters"]
            is_plain = _STAGED not in own and not any(map(own.get, _CHANGES))
            cast: dict[str, torch.Tensor] | None = None
            for place, name, shape, dtype in parts:
                tensor = tensors.get(name) if name in tensors else own["_buffers"].get(name)
                is_right = is_plain and tensor is not None and type(tensor) in PLAIN
                if not is_right or tensor.device != device or tensor.dtype != dtype:
                    if cast is None:
                        cast = _cast(layer, [each for _, each, _, _ in parts], dtype, device, until)
                    tensor = cast[name]
                if tensor.shape != shape:
                    raise UnsupportedModel(f"its weight {'.'.join((*path, name))} has another shape than the engine's")
                found[place] = tensor if tensor.is_contiguous() else tensor.contiguous()
        return found


def _cast(
    layer: Any, names: Sequence[str], dtype: torch.dtype, device: torch.device, until: ExitStack
) -> dict[str, torch.Tensor]:
    """What a layer's weights are in its own call."""
    if not hasattr(type(layer), CASTS):
        return {name: _moved(layer, name, dtype, device) for name in names}
    if is_quantized(layer.weight):
        raise UnsupportedModel("its weights are quantised, and computed with as they are")
    cast = LayerCast(layer, dtype, device)
    weight, bias = cast.__enter__()
    if _stay(layer, weight, device):
        until.callback(cast.__exit__, None, None, None)
    else:  # ComfyUI may use the same memory for the next layer
        weight, bias = weight.clone(), None if bias is None else bias.clone()
        cast.__exit__(None, None, None)
    return {"weight": weight} | ({} if bias is None else {"bias": bias})


def _stay(layer: Any, weight: torch.Tensor, device: torch.device) -> bool:
    """Whether a cast gave memory that no other layer's cast is given before it is let go."""
    if _STAGED in layer.__dict__:
        return layer._v_signature is not None and weight is getattr(layer, "_v_weight", None)
    return bool(layer.weight.device == device)


def _moved(layer: Any, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a layer that ComfyUI does not cast by itself."""
    tensor = getattr(layer, name, None)
    if tensor is None or type(tensor) not in PLAIN:
        raise UnsupportedModel(f"its weight {name} is of a kind that engines do not take")
    return as_needed(tensor.detach(), dtype, device)
