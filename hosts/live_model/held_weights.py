"""Which weights a live model holds at a moment: engines were given those, and know of no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import is_, itemgetter, methodcaller
from typing import Any
from weakref import ref

import torch

from .layer_walk import Names, names_in

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)))
"""Classes of tensors whose values lie where they say."""
CHANGES_AT_CALLS = "weight_function", "bias_function"
"""Of ComfyUI's layers: what they do to their weights at each call."""
PATCHES = "weight_lowvram_function", "bias_lowvram_function"
"""Of ComfyUI's layers: what they do to weights, such as LoRAs, each time that these are brought to the device."""
CHANGES = *CHANGES_AT_CALLS, *PATCHES


class HeldWeights:
    """Tensors of a model's layers, and the functions that layers apply to them. It keeps none of them in memory.

    Args:
        layers: what `layers_of(model)` gave just now, or what reads them.
        with_values: notice what is written into a tensor, too, unless that is done past torch's notice.
        changes: the names of the functions; what reads layers knows its own.
    """

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Module] | _Reader,
        with_values: bool = False,
        changes: Sequence[str] = CHANGES,
    ) -> None:
        reader = layers if isinstance(layers, _Reader) else _Reader(layers.values(), changes)
        tensors, functions, names = reader.read()
        self._parts = [*map(ref, tensors), *map(_known, functions)]
        are_plain = PLAIN.issuperset(map(type, tensors))
        self._facts: list[Any] = [*names]
        self._facts += map(torch.Tensor.data_ptr, tensors if are_plain else filter(_is_plain, tensors))
        self._facts += map(version_of, tensors) if with_values else ()

    def are(self, others: HeldWeights) -> bool:
        """Whether nothing was exchanged, moved or written to between the two."""
        return self._facts == others._facts and are_same(self._parts, others._parts)


class Hold:
    """The weights that a run began with; one for each run."""

    def __init__(self) -> None:
        self._layers: Sequence[torch.nn.Module] = ()
        self._reader = _Reader(())
        self._first: HeldWeights | None = None
        self._glance: _Glance | None = None

    def why_changed(self, layers: Sequence[torch.nn.Module]) -> str | None:
        """What is so where layers hold others than when it was asked first, with the model loaded; None where not.

        Args:
            layers: those of the model, another list where they may hold them otherwise than when it was asked last.
        """
        if self._layers is not layers:
            if self._first is not None and not are_same(layers, self._layers):
                return _CHANGED
            self._layers, self._reader, self._glance = layers, _Reader(layers), None
        glance = _Glance(self._reader)
        if self._glance is not None and glance.is_like(self._glance):
            return None
        now, self._glance = HeldWeights(self._reader), None
        self._first = self._first or now
        if not now.are(self._first):
            return _CHANGED
        self._glance = glance
        return None


class _Glance:
    """A quicker look at what layers hold, which tells for certain only that nothing is other than before.

    It keeps tensors alive: no other one can be taken for one of them.
    """

    def __init__(self, reader: _Reader) -> None:
        self._values, self._functions = reader.values(), reader.functions()
        plain = [each for each in self._values if each is not None and type(each) in PLAIN]
        self._facts = reader.names(), [*map(torch.Tensor.data_ptr, plain)]

    def is_like(self, other: _Glance) -> bool:
        """Whether it shows the same."""
        if any(self._functions) or self._facts != other._facts:  # lists of functions change where they are
            return False
        return are_same(self._values, other._values) and are_same(self._functions, other._functions)


_CHANGED = "the model's weights were changed in the midst of the run"


class _Reader:
    """Reads what layers hold: quickly and as often as one likes, while they have the same dicts."""

    def __init__(self, layers: Iterable[torch.nn.Module], changes: Sequence[str] = CHANGES) -> None:
        owns = [layer.__dict__ for layer in layers]
        self._holders = [each for own in owns for each in (own["_parameters"], own["_buffers"])]
        are_dicts = all(issubclass(kind, dict) for kind in set(map(type, self._holders)))  # not so of scripted layers
        self._values_of = dict.values if are_dicts else methodcaller("values")
        named = [(at, own, [name for name in changes if name in own]) for at, own in enumerate(owns)]
        self._functions = [(itemgetter(*names, names[0]), own) for _, own, names in named if names]
        self._places = [(at, name) for at, _, names in named if names for name in (*names, names[0])]

    def values(self) -> list[Any]:
        """Return the tensors, and None for each that a layer of this kind may have and has not."""
        return [*chain.from_iterable(map(self._values_of, filter(None, self._holders)))]

    def names(self) -> Names:
        """Return what they are called."""
        return names_in(self._holders)

    def functions(self) -> list[Any]:
        """Return what layers do to their weights: a function, a list of them, or nothing."""
        return [*chain.from_iterable([get(own) for get, own in self._functions])]

    def read(self) -> tuple[list[torch.Tensor], list[Any], tuple[Any, ...]]:
        """Return tensors, functions, and what tells which of both are called what."""
        values = self.values()
        are_there = [each is not None for each in values]
        functions: list[Any] = []
        places: list[tuple[int, str]] = []
        found = self.functions()
        for place, each in zip(self._places, found, strict=True) if any(found) else ():
            if each:
                several = each if isinstance(each, (list, tuple)) else [each]
                functions += several
                places += [place] * len(several)
        return [*compress(values, are_there)], functions, (self.names(), are_there, places)


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each write into a tensor; 0 for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two rows hold the same objects, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN


def _known(function: Any) -> Any:
    """What tells a function from others, while it lives."""
    try:
        return ref(function)
    except TypeError:  # it knows no weak references
        return function
