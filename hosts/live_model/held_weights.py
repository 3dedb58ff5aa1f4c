"""Which weights a live model holds at a moment: engines were given those, and know of no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import is_, itemgetter
from typing import Any
from weakref import ref

import torch

from .layer_walk import Names, names_in

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)))
"""Classes of tensors whose values lie where they say."""
_FUNCTIONS = "weight_function", "bias_function", "weight_lowvram_function", "bias_lowvram_function"
"""Of ComfyUI's layers: what they do to their weights at each call."""


class HeldWeights:
    """Tensors of a model's layers, and the functions that layers apply to them. It keeps none of them in memory.

    Args:
        layers: what `layers_of(model)` gave just now.
        with_values: notice what is written into a tensor, too, unless that is done past torch's notice.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Module], with_values: bool = False) -> None:
        owns = [layer.__dict__ for layer in layers.values()]
        tensors, named = _tensors_in(_holders_in(owns))
        functions = [*_functions(owns)]
        self._parts = [*map(ref, tensors), *(_known(function) for _, function in functions)]
        are_plain = PLAIN.issuperset(map(type, tensors))
        self._facts: list[Any] = [named, [place for place, _ in functions]]
        self._facts += map(torch.Tensor.data_ptr, tensors if are_plain else filter(_is_plain, tensors))
        self._facts += map(version_of, tensors) if with_values else ()

    def are(self, others: HeldWeights) -> bool:
        """Whether nothing was exchanged, moved or written to between the two."""
        return self._facts == others._facts and _are_same(self._parts, others._parts)


class Hold:
    """The weights that a run began with; one for each run."""

    def __init__(self) -> None:
        self._held: _Held | None = None

    def why_changed(self, layers: Sequence[torch.nn.Module]) -> str | None:
        """What is so where layers hold others than when it was asked first, with the model loaded; None where not.

        Args:
            layers: those of the model, another list where they may hold them otherwise than when it was asked last.
        """
        if self._held is not None and self._held.layers is layers:
            is_same = self._held.is_as_it_was()
        else:
            held = _Held(layers)
            is_same = self._held is None or held.is_like(self._held)
            self._held = held if is_same else self._held
        return None if is_same else "the model's weights were changed in the midst of the run"


class _Held:
    """As `HeldWeights`, laid out so that another look at the same layers is quick, while they have the same dicts."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self.layers = layers
        owns = [layer.__dict__ for layer in layers]
        self._holders = _holders_in(owns)
        named = [(at, own, [name for name in _FUNCTIONS if name in own]) for at, own in enumerate(owns)]
        self._functions = [(itemgetter(*names, names[0]), own) for _, own, names in named if names]
        self._places = [(at, name) for at, _, names in named if names for name in (*names, names[0])]
        tensors, self._called, facts = self._look()
        self._are_plain = PLAIN.issuperset(map(type, tensors))
        self._facts = facts, self._addresses(tensors)
        self._tensors = [*map(ref, tensors)]

    def is_as_it_was(self) -> bool:
        """Whether nothing was exchanged or moved since."""
        tensors, called, facts = self._look()
        return self._are(tensors, called) and (facts, self._addresses(tensors)) == self._facts

    def is_like(self, other: _Held) -> bool:
        """Whether nothing was exchanged or moved between the two."""
        tensors = [tensor for known in self._tensors if (tensor := known()) is not None]
        is_same = _are_same(self.layers, other.layers) and self._facts == other._facts
        return is_same and other._are(tensors, self._called)

    def _are(self, tensors: Sequence[torch.Tensor], called: Sequence[Any]) -> bool:
        return _are_same(tensors, [known() for known in self._tensors]) and _are_same(called, self._called)

    def _look(self) -> tuple[list[torch.Tensor], list[Any], tuple[Any, ...]]:
        tensors, named = _tensors_in(self._holders)
        called: list[Any] = []
        places: list[tuple[int, str]] = []
        found = [*chain.from_iterable([get(own) for get, own in self._functions])]
        for place, each in zip(self._places, found, strict=True) if any(found) else ():
            if each:
                functions = each if isinstance(each, (list, tuple)) else [each]
                called += functions
                places += [place] * len(functions)
        return tensors, called, (named, places)

    def _addresses(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        return [*map(torch.Tensor.data_ptr, tensors if self._are_plain else filter(_is_plain, tensors))]


def _holders_in(owns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [each for own in owns for each in (own["_parameters"], own["_buffers"])]


def _tensors_in(holders: Sequence[dict[str, Any]]) -> tuple[list[torch.Tensor], tuple[Names, list[bool]]]:
    """Tensors, and what tells which of them are called what."""
    values = [*chain.from_iterable(map(dict.values, filter(None, holders)))]
    are_there = [each is not None for each in values]
    return [*compress(values, are_there)], (names_in(holders), are_there)


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each write into a tensor; 0 for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN


def _functions(owns: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, str], Any]]:
    """Functions, and where each of them is."""
    for at, own in enumerate(owns):
        for name in _FUNCTIONS:
            if value := own.get(name):
                yield from (((at, name), each) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _known(function: Any) -> Any:
    """What tells a function from others, while it lives."""
    try:
        return ref(function)
    except TypeError:  # it knows no weak references
        return function
