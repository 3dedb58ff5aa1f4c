"""A model's layers and tensors, in a fraction of the time that torch's walks take: each picture begins with them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
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


def tensors_of(layers: Layers) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, as they are now. One that several layers share is there under each of its names.

    Args:
        layers: what `layers_of` gave just now.
    """
    return _known[id(layers[""])].tensors(layers)


class _Walk:
    """What a walk found. It keeps no layer alive: one may know the whole model."""

    def __init__(self, found: Layers) -> None:
        self._names = list(found)
        self._layers = [ref(layer) for layer in found.values()]
        self._parts = _parts_of(found.values())
        self._own: tuple[list[int], list[str]] | None = None
        self._names_of_tensors: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether its model is gone."""
        return self._layers[0]() is None

    def again(self, model: torch.nn.Module) -> Layers | None:
        """The same layers; None where it was another model's, or one of them has other parts now, or is gone."""
        found = [layer for known in self._layers if (layer := known()) is not None]
        if len(found) != len(self._layers) or found[0] is not model or _parts_of(found) != self._parts:
            return None
        return dict(zip(self._names, found, strict=True))

    def tensors(self, layers: Layers) -> dict[str, torch.Tensor]:
        """Of these layers, which are those of this walk. Only their names are kept, while no layer has others."""
        holders = [each for layer in layers.values() for each in (layer._parameters, layer._buffers)]
        filled = [each for each in holders if each]
        own = [*map(len, holders)], [*chain.from_iterable([each.keys() for each in filled])]
        if own != self._own:
            self._names_of_tensors = _names_of_tensors(layers)
            self._own = own
        found = zip(self._names_of_tensors, chain.from_iterable([each.values() for each in filled]), strict=True)
        return {name: tensor for name, tensor in found if tensor is not None}


def _names_of_tensors(layers: Layers) -> list[str]:
    """Also of those that are None."""
    return [
        f"{name}.{part}" if name else part
        for name, layer in layers.items()
        for holder in (layer._parameters, layer._buffers)
        for part in holder.keys()  # noqa: SIM118  of a scripted layer it is no dict
    ]


def _parts_of(layers: Iterable[torch.nn.Module]) -> tuple[list[int], list[str], list[int]]:
    """What tells their parts from others, while all of them live: how many each has, names, and which they are."""
    parts = [layer._modules for layer in layers]
    filled = [each for each in parts if each]  # most have none
    names = chain.from_iterable([each.keys() for each in filled])
    return [*map(len, parts)], [*names], [*map(id, chain.from_iterable([each.values() for each in filled]))]


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
