"""A model's layers and tensors, in a fraction of the time that torch's walks take: each picture begins with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import ref

import torch

Layers = dict[str, torch.nn.Module]


def layers_of(model: torch.nn.Module) -> Layers:
    """All layers by name, the model itself as "": what `dict(model.named_modules())` gives, in the same order.

    What was found before is looked at again only where some layer has other parts now.
    """
    known = _known.get(id(model))
    if known is not None and (found := known.again(model)) is not None:
        return found
    found = _walked(model)
    for gone in [place for place, walk in list(_known.items()) if walk.is_over]:
        _known.pop(gone, None)
    _known[id(model)] = _Walk(found)
    return found


def tensors_of(layers: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of `layers` by name. One that several layers share comes under each of its names."""
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        for tensors in (layer._parameters, layer._buffers):
            for part, tensor in tensors.items():
                if tensor is not None:
                    yield prefix + part, tensor


class _Walk:
    """What a walk found. It keeps no layer alive: one may know the whole model."""

    def __init__(self, found: Layers) -> None:
        self._names = list(found)
        self._layers = [ref(layer) for layer in found.values()]
        self._parts = [_parts_of(layer) for layer in found.values()]

    @property
    def is_over(self) -> bool:
        """Whether its model is gone."""
        return self._layers[0]() is None

    def again(self, model: torch.nn.Module) -> Layers | None:
        """The same layers; None where it was another model's, or one of them has other parts now, or is gone."""
        found = []
        for known, parts in zip(self._layers, self._parts, strict=True):
            layer = known()
            if layer is None or (layer._modules or parts) and _parts_of(layer) != parts:  # most have no parts
                return None
            found.append(layer)
        return dict(zip(self._names, found, strict=True)) if found[0] is model else None


def _parts_of(layer: torch.nn.Module) -> tuple[list[str], list[int]] | None:
    """What tells its parts from others, while all of them live; None where it has none."""
    parts = layer._modules
    return (list(parts.keys()), list(map(id, parts.values()))) if parts else None


def _walked(model: torch.nn.Module) -> Layers:
    found: Layers = {}
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        found[name] = layer
        prefix = f"{name}." if name else ""
        parts = reversed(layer._modules.items())  # so that the first is taken first
        waiting += [(prefix + part, child) for part, child in parts if child is not None]
    return found


_known: dict[int, _Walk] = {}
"""By the model's id: not every model can be a key."""
