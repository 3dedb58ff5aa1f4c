"""A model's layers and tensors, in a fraction of the time that torch's walks take: each picture begins with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch

Names = tuple[list[int], list[str]]
"""How many things each of several dicts holds, and what all of them are called there."""


class Layers(dict[str, torch.nn.Module]):
    """Layers by name, the model itself as "".

    Attributes:
        walk: that found them.
    """

    def __init__(self, found: Mapping[str, torch.nn.Module], walk: _Walk) -> None:
        super().__init__(found)
        self.walk = walk


def layers_of(model: torch.nn.Module) -> Layers:
    """All layers: what `dict(model.named_modules())` gives, in the same order.

    What was found before is looked at again only where some layer has other parts now.
    """
    known = _known.get(id(model))
    if known is not None and (found := known.again(model)) is not None:
        return found
    for place, walk in list(_known.items()):
        if walk.is_over and _known.get(place) is walk:  # else another thread has put one of a new model there
            _known.pop(place, None)
    layers = _walked(model)
    walk = _known[id(model)] = _Walk(layers)
    return Layers(layers, walk)


def tensors_of(layers: Layers) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, as they are now. One that several layers share is there under each of its names.

    Args:
        layers: what `layers_of` gave just now.
    """
    return layers.walk.tensors(layers)


def names_in(holders: Sequence[Mapping[str, Any]]) -> Names:
    """What tells whether dicts hold things of other names, or in another order, than before."""
    are_dicts = all(issubclass(kind, dict) for kind in set(map(type, holders)))  # not so of scripted layers
    names = holders if are_dicts else [each.keys() for each in holders]
    return [*map(len, holders)], [*chain.from_iterable(names)]


class _Walk:
    """What a walk found. It keeps no layer alive: one may know the whole model."""

    def __init__(self, found: Mapping[str, torch.nn.Module]) -> None:
        self._names = list(found)
        self._layers = [ref(layer) for layer in found.values()]
        self._parts = _parts_of(found.values())
        self._named: tuple[Names, list[str]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether its model is gone."""
        return self._layers[0]() is None

    def again(self, model: torch.nn.Module) -> Layers | None:
        """The same layers; None where it was another model's, or one of them has other parts now, or is gone."""
        found = [layer for known in self._layers if (layer := known()) is not None]
        if len(found) != len(self._layers) or found[0] is not model or _parts_of(found) != self._parts:
            return None
        return Layers(dict(zip(self._names, found, strict=True)), self)

    def tensors(self, layers: Layers) -> dict[str, torch.Tensor]:
        """Of these layers, which are those of this walk. Only names are kept, for as long as no layer has others."""
        holders = [each for layer in layers.values() for each in (layer._parameters, layer._buffers)]
        own, values = names_in(holders), _values_of(holders)
        while own != (again := names_in(holders)):  # another thread changes them, and must not mix them up
            own, values = again, _values_of(holders)
        named = self._named
        if named is None or named[0] != own:
            named = self._named = own, [*self._names_of(own)]
        return {name: tensor for name, tensor in zip(named[1], values, strict=True) if tensor is not None}

    def _names_of(self, own: Names) -> Iterator[str]:
        """Also of those that are None."""
        counts, keys = own[0], iter(own[1])
        for name, parameters, buffers in zip(self._names, counts[::2], counts[1::2], strict=True):
            for _ in range(parameters + buffers):
                yield f"{name}.{next(keys)}" if name else next(keys)


def _values_of(holders: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [*chain.from_iterable([each.values() for each in holders if each])]


def _parts_of(layers: Iterable[torch.nn.Module]) -> tuple[list[int], list[str], list[int]]:
    """What tells their parts from others, while all of them live: how many each has, names, and which they are."""
    parts = [layer._modules for layer in layers]
    return *names_in(parts), [*map(id, _values_of(parts))]


def _walked(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found: dict[str, torch.nn.Module] = {}
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
