"""What others compute in the midst of a block's engine: its attention, and what other nodes' functions do in it.

ComfyUI's blocks hand tensors to functions of other nodes: in the place of an attention, as IP-Adapter has it, or behind
one. An engine calls them out as it calls attention out, see `attention_out`, and computes the rest of the block.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from ....compile_backend.blocks.attention_out import Attention
from ....compile_backend.blocks.call_form import taken_apart
from ....core.errors import UnsupportedModel
from ...stand_in import copied
from ..models.diffusion_model import scaled_dot_product_attention
from .block_architecture import ATTENTION_OUT, PLACES_OUT
from .block_classes import OPTIONS, OVERRIDE, PLACE, BlockClass, layer_at, names_at, whole_of
from .block_patches import PATCHES, REPLACE, key_of_block

Told = tuple[frozenset[str], dict[str, Any]]
"""What a block tells the functions in its midst: which of its options it keeps to itself, and what it adds to them."""

_HEADS = "n_heads"
"""What a block tells whoever replaces its attention."""
_OF_BLOCKS = frozenset({_HEADS, "dim_head", "attn_precision", "img_slice"})
"""What blocks tell of their own, whatever options say."""


@dataclass
class Outside:
    """What others compute in one call of a block.

    Attributes:
        block: the live one.
        attention: what computes its attention; None where engines compute what it does.
        places: at which other nodes' functions compute.
        options: `transformer_options` of the call.
        tells: those that the layer around the block would have told it, were it not a graph.
        told: what the block tells functions; None where none is called.
    """

    block: torch.nn.Module
    attention: Attention | None
    places: tuple[str, ...]
    options: dict[str, Any]
    tells: Mapping[str, Any] = field(default_factory=dict)
    told: Told | None = None
    given: dict[str, Any] = field(default_factory=dict)
    """What functions gave in this call, by their places; they are not called again."""

    @property
    def names(self) -> frozenset[str]:
        """In `patches` and `patches_replace`: whose functions compute at these places."""
        return frozenset().union(*map(names_at, self.places))

    @property
    def form(self) -> dict[str, Any]:
        """What it adds to the arguments of a call."""
        form: dict[str, Any] = {ATTENTION_OUT: True} if self.attention is not None else {}
        return {**form, PLACES_OUT: " ".join(self.places)} if self.places else form

    def called(self, are_lent: bool = False) -> Attention:
        """What the block's engine calls out to, in this call.

        Args:
            are_lent: what it is given is overwritten after it was called.
        """
        self.options.update(self.tells)
        extra: dict[str, Any] = {}
        if self.told is not None:
            kept, added = self.told
            extra = {name: value for name, value in self.options.items() if name not in kept} | copied(added)

        def call(*args: Any, **kwargs: Any) -> Any:
            place = kwargs.pop(PLACE, None)
            given = [*args]
            if are_lent or place is not None:
                given, kwargs = copied([given, kwargs], with_tensors=True)  # their own, to keep or to write into
            if place is None:
                assert self.attention is not None
                return self.attention(*given, **kwargs)
            if place in self.given:  # in an attempt before this one
                return self.given[place]
            found = self._at(place, given, extra)
            self.given[place] = found.clone() if isinstance(found, torch.Tensor) else found
            return found

        return call

    def _at(self, place: str, tensors: Sequence[torch.Tensor], extra: dict[str, Any]) -> Any:
        """What the functions at a place give."""
        if (layer := layer_at(place)) is not None:
            return self._whole(layer, *tensors, extra=extra)
        if replacements := self.options.get(REPLACE, {}).get(place):
            return replacements[key_of_block(replacements, self.options)](*tensors, extra)
        (found,) = tensors
        for function in self.options[PATCHES][place]:
            found = function(found, extra)
        return found

    def _whole(
        self, name: str, tokens: torch.Tensor, text: torch.Tensor | None = None, *, extra: dict[str, Any]
    ) -> Any:
        """What an attention layer gives with the functions before it, in its place and behind it.

        Args:
            text: that it looks at; None: the tokens themselves.
        """
        layer: Any = getattr(self.block, name)
        before, _, behind = names_at(whole_of(name))
        patches, replacements = self.options[PATCHES], self.options.get(REPLACE, {}).get(name) or {}
        looked_at: Any = tokens if text is None else text
        values: Any = looked_at
        for function in patches[before]:
            tokens, looked_at, values = function(tokens, looked_at, values, extra)
        if (replacement := replacements.get(key_of_block(replacements, self.options))) is not None:
            if looked_at is None:  # a layer over the tokens themselves
                looked_at = values = tokens
            values = looked_at if values is None else values
            found = replacement(layer.to_q(tokens), layer.to_k(looked_at), layer.to_v(values), extra)
            tokens = layer.to_out(found)
        else:
            tokens = layer(tokens, context=looked_at, value=values, transformer_options=self.options)
        for function in patches.get(behind) or ():
            tokens = function(tokens, extra)
        return tokens

    @contextmanager
    def given_already(self) -> Iterator[None]:
        """Meanwhile what functions gave in this call, as far as an engine got, stands in their place: the block itself
        is called in its turn, and they may count their calls."""
        functions = {place: functools.partial(_given, found) for place, found in self.given.items()}
        given = with_functions(self.options, functions) if functions else {}
        before = {name: self.options[name] for name in given if name in self.options}
        self.options.update(given)
        try:
            yield
        finally:
            for name in given.keys() - before.keys():
                del self.options[name]
            self.options.update(before)


def _given(found: Any, *_: Any) -> Any:
    return found


def with_functions(options: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Both kinds of patches in options, with other functions at some places where there are any."""
    given: dict[str, dict[str, Any]] = {name: dict(options.get(name) or {}) for name in (PATCHES, REPLACE)}
    for place, function in functions.items():
        if layer_at(place) is not None:
            before, replaced, behind = names_at(place)
            given[REPLACE].pop(replaced, None)
            given[PATCHES][before], given[PATCHES][behind] = _before_and_behind(function)
        elif replacements := given[REPLACE].get(place):
            given[REPLACE][place] = {key_of_block(replacements, options): function}
        else:
            given[PATCHES][place] = [function]
    return given


def _before_and_behind(function: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """Functions around an attention layer by which the block goes on with what `function` gives, whatever the layer
    makes of what it is given."""
    found: list[Any] = []

    def before(tokens: torch.Tensor, looked_at: torch.Tensor, values: Any, extra: dict[str, Any]) -> Any:
        found.append(function(tokens, *([] if looked_at is tokens else [looked_at]), extra))
        return tokens, looked_at, values

    return [before], [lambda tokens, extra: found.pop()]


def outside_of(
    block: torch.nn.Module,
    kind: BlockClass,
    options: dict[str, Any] | None,
    arguments: dict[str, Any],
    reads: Set[str],
) -> Outside | None:
    """What others compute in a call of a block; None where its engine computes all.

    Args:
        kind: of the block.
        options: `transformer_options` of the call.
        arguments: of the call, by name; a function among them that computes attention is taken out.
        reads: all names that the block's code knows.

    Raises:
        TypeError: the block is to be told what computes its attention, and is not.
    """
    attention = _attention_outside(kind, options, arguments)
    found = _places(block, kind, options) if options else ()
    places = tuple([place for place in found if reads >= {*names_at(place)}])
    return Outside(block, attention, places, options or {}) if attention is not None or places else None


def _places(block: torch.nn.Module, kind: BlockClass, options: Mapping[str, Any]) -> Iterator[str]:
    """The places at which functions compute, each name's at one place at most."""
    patches, replaced = (each if isinstance(each, Mapping) else {} for each in map(options.get, (PATCHES, REPLACE)))
    if not patches and not replaced:
        return
    taken: set[str] = set()
    for layer in kind.wholes if patches else ():
        if block._modules.get(layer) is None:
            continue
        before, name, behind = names = names_at(whole_of(layer))
        if patches.get(before) and _can_be_called(patches[before]) and _can_be_called(patches.get(behind)):
            taken |= {*names}
            if not replaced.get(name) or isinstance(replaced[name], Mapping):
                yield whole_of(layer)
    for place in kind.places:
        functions, replacements = patches.get(place), replaced.get(place)
        if place in taken:
            continue
        if functions:
            if _can_be_called(functions) and not replacements:
                yield place
        elif isinstance(replacements, Mapping) and callable(replacements.get(key_of_block(replacements, options))):
            yield place


def _can_be_called(functions: Any) -> bool:
    return not functions or (isinstance(functions, list) and all(map(callable, functions)))


_ATTENTION = "comfy.ldm.modules.attention"

_EXACT = frozenset(f"attention_{name}" for name in ("basic", "flash", "pytorch", "split", "sub_quad", "xformers"))
"""ComfyUI's ways to compute attention itself. Those that round it (SageAttention, comfy-kitchen) are called out."""


def _attention_outside(
    kind: BlockClass, options: Mapping[str, Any] | None, arguments: dict[str, Any]
) -> Attention | None:
    """The function of ComfyUI that the block itself would call, with the options of its call, by which that finds
    another node's. None where engines compute what it does: it rounds nothing, and nobody replaces it.
    """
    if not kind.has_attention:
        return None
    if kind.attends is not None:
        function = arguments.pop(kind.attends, None)
        if not callable(function):
            raise TypeError("nothing computes its attention")
    else:
        function = importlib.import_module(kind.attention or _ATTENTION).optimized_attention
    is_replaced = kind.takes_options and options is not None and OVERRIDE in options
    if not is_replaced and _is_exact(function):
        return None

    def attention(*args: Any, **kwargs: Any) -> Any:
        own = {OPTIONS: {} if options is None else options} if kind.takes_options else {}
        return function(*args, **kwargs, **own)

    return attention


def _is_exact(function: Any) -> bool:
    """Whether it is one of ComfyUI's, in nothing but ComfyUI's own wrapper."""
    while isinstance(function, FunctionType) and function.__globals__.get("__name__") == _ATTENTION:
        if (inner := function.__dict__.get("__wrapped__")) is None:
            return function.__name__ in _EXACT
        function = inner
    return False


def exact_attention(*args: Any, **kwargs: Any) -> Any:
    """What engines of blocks that call nothing out compute."""
    return scaled_dot_product_attention(None, *args, **kwargs)


class StandIns:
    """What a block and its engine are compared with, since functions of other nodes may count calls or add noise.

    Attributes:
        told: what the block told them; None before it called one.
    """

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self.told = outside.told

    def in_the_place_of_others(self, options: dict[str, Any]) -> dict[str, Any]:
        """A block's options, in which they stand.

        Args:
            options: a copy of those of the call.
        """
        options = {name: value for name, value in options.items() if name not in _OF_BLOCKS}
        options[OVERRIDE] = scaled_dot_product_attention
        if self._outside.places:
            names = options.keys() | {PATCHES, REPLACE}
            options |= with_functions(options, dict.fromkeys(self._outside.places, self._noting(names)))
        return options

    def _noting(self, names: Set[str]) -> Callable[..., Any]:
        def stand_in(*args: Any) -> Any:
            *tensors, extra = args
            self.told = frozenset(names - extra.keys()), _added(extra, names)
            return self._computed(tensors)

        return stand_in

    def in_the_engine(self, *args: Any, **kwargs: Any) -> Any:
        """What the engine calls out to."""
        return exact_attention(*args, **kwargs) if kwargs.pop(PLACE, None) is None else self._computed(args)

    def _computed(self, tensors: Sequence[torch.Tensor]) -> Any:
        if len(tensors) == 1:
            return 0.5 * tensors[0]
        if len(tensors) == 2:  # a whole layer, which looks at a text
            return 0.5 * tensors[0] + tensors[1].mean((1, 2), keepdim=True)
        heads = self.told[1].get(_HEADS) if self.told is not None else None
        if not isinstance(heads, int):
            raise UnsupportedModel("it does not say how many heads its attention has")
        return exact_attention(*tensors, heads)


def _added(extra: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """What a block says of its own to other nodes' functions, beside options of these names.

    Raises:
        UnsupportedModel: it is another kind of value than engines are told.
    """
    found = {name: value for name, value in extra.items() if name not in names}
    try:
        _, tensors = taken_apart(found)
    except TypeError as error:
        raise UnsupportedModel(f"it tells other nodes what engines do not know ({error})") from error
    if tensors:
        raise UnsupportedModel("it tells other nodes what engines do not know (tensors)")
    return found
