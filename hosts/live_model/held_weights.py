"""Which weights a live model holds at a moment: engines were given those, and know of no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any
from weakref import ref

import torch

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
        holders = [each for own in owns for each in (own["_parameters"], own["_buffers"]) if each]
        tensors = [each for each in chain.from_iterable([held.values() for held in holders]) if each is not None]
        self._parts = [*map(ref, tensors), *_functions(owns)]
        are_plain = PLAIN.issuperset(map(type, tensors))
        self._facts = [*map(torch.Tensor.data_ptr, tensors if are_plain else filter(_is_plain, tensors))]
        self._facts += map(version_of, tensors) if with_values else ()

    def are(self, others: HeldWeights) -> bool:
        """Whether nothing was exchanged, moved or written to between the two."""
        return self._facts == others._facts and _are_same(self._parts, others._parts)


class Hold:
    """The weights that a run began with; one for each run."""

    def __init__(self) -> None:
        self._first: _Held | None = None

    def why_changed(self, layers: Sequence[torch.nn.Module]) -> str | None:
        """What is so where layers hold others than when it was asked first, with the model loaded; None where not.

        Args:
            layers: those of the model.
        """
        if self._first is None:
            self._first = _Held(layers)
        return None if self._first.are(layers) else "the model's weights were changed in the midst of the run"


class _Held:
    """As `HeldWeights`, laid out so that another look at the same layers is quick."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = layers
        owns = [layer.__dict__ for layer in layers]
        self._holders = [each for own in owns for each in (own["_parameters"], own["_buffers"]) if each]
        named = ((own, [name for name in _FUNCTIONS if name in own]) for own in owns)
        self._functions = [(itemgetter(*names, names[0]), own) for own, names in named if names]
        tensors, self._called = self._look()
        self._are_plain = PLAIN.issuperset(map(type, tensors))
        self._places = self._places_of(tensors)
        self._tensors = [*map(ref, tensors)]

    def are(self, layers: Sequence[torch.nn.Module]) -> bool:
        """Whether these are the same layers, in which nothing was exchanged or moved since."""
        if layers is not self._layers and not _are_same(layers, self._layers):
            return False
        tensors, called = self._look()
        if not _are_same(tensors, [known() for known in self._tensors]) or not _are_same(called, self._called):
            return False
        return self._places_of(tensors) == self._places

    def _look(self) -> tuple[list[torch.Tensor], list[Any]]:
        tensors = [each for each in chain.from_iterable(map(dict.values, self._holders)) if each is not None]
        called: list[Any] = []
        for each in chain.from_iterable([get(own) for get, own in self._functions]):
            if each:
                called += each if isinstance(each, (list, tuple)) else [each]
        return tensors, called

    def _places_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        return [*map(torch.Tensor.data_ptr, tensors if self._are_plain else filter(_is_plain, tensors))]


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each write into a tensor; 0 for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN


def _functions(owns: list[dict[str, Any]]) -> Iterator[Any]:
    for name in _FUNCTIONS:
        for value in filter(None, [own[name] for own in owns if name in own]):
            yield from map(_known, value if isinstance(value, (list, tuple)) else [value])


def _known(function: Any) -> Any:
    """What tells a function from others, while it lives."""
    try:
        return ref(function)
    except TypeError:  # it knows no weak references
        return function
