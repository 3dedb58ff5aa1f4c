"""What a kind of block computes in one form of its calls, apart from any model that was loaded."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, Protocol

import torch

from ....compile_backend.blocks.attention_out import call_out
from ....compile_backend.blocks.call_form import Form, say_form
from ....compile_backend.blocks.ggml_types import TYPES
from ....compile_backend.blocks.program import Stored
from ....core.dtypes import dtype_name, dtype_named, dtype_of
from ....core.errors import UnsupportedModel
from ....core.placeholder import placeholder_of
from ....core.protocols import Tensors
from ....core.shapes import Shape
from ....core.spec import ModelFingerprint, Precision, Role
from ...architecture import RECIPE, fingerprint_of, random_inputs
from ...live_model.account import settings_of
from ...live_model.layer_walk import layers_of
from ...live_model.source_code import source_digest
from ..models.diffusion_model import (
    attention_over_a_text,
    plain_attention,
    plain_operators,
    scaled_dot_product_attention,
)
from .block_classes import OPTIONS, OVERRIDE, PLACE, BlockClass, block_class_of, layer_at, whole_of
from .block_patches import BLOCK, PATCHES, REPLACE

PREFIX = "block."
"""Of every weight's name in the traced program."""


class Owner(Protocol):
    """The architecture of a model that has blocks; it pickles."""

    @property
    def role(self) -> Role: ...

    @property
    def is_part(self) -> bool:
        """Whether it is that of some of the model's layers alone."""
        ...

    @property
    def fresh(self) -> torch.nn.Module:
        """The whole network as a meta module."""
        ...

    def whole_for_tracing(self) -> torch.nn.Module:
        """A new one whose layers compute plainly."""
        ...

    @property
    def fingerprint(self) -> ModelFingerprint: ...


ATTENTION_OUT = "attention_out"
"""Of a form: beside the block's own arguments, where its attention is called out of its package."""

PLACES_OUT = "places_out"
"""Of a form, likewise: the places that are called out, see `BlockClass`."""


STORED = "weights_stored"
"""Of a form, likewise: which weights are handed over as they are stored, as `say_stored` has it."""


def say_stored(stored: Mapping[str, Stored]) -> str:
    """A text for weights of a block, by their names in it, that are handed over as they are stored."""
    return "; ".join(_say_one(name, each) for name, each in sorted(stored.items()))


_SCALED, _UNCAST = "scaled", "uncast"


def _say_one(name: str, stored: Stored) -> str:
    marks = _SCALED * stored.is_scaled, _UNCAST * (not stored.is_cast), stored.ggml
    return " ".join([name, dtype_name(stored.dtype), *filter(None, marks)])


def attention_called_out(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the place of ComfyUI's attention in a trace; a call out leads back to it, see `computed_outside`.

    Raises:
        UnsupportedModel: the block tells its attention more than it is told itself.
    """
    kwargs.pop(_INSIDE, None)
    if kwargs.pop(OPTIONS, {}).keys() - {OVERRIDE, BLOCK, PATCHES, REPLACE}:  # which it is told in a trace
        raise UnsupportedModel("the block tells its attention more than it is told itself")
    return call_out(_attention_shape(*args, **kwargs), args, kwargs)


_INSIDE = "_inside_attn_wrapper"
"""A note of ComfyUI's to itself."""


def _attention_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **_: Any,
) -> list[Any]:
    """Of what ComfyUI's attention gives: [batch, tokens, channels], or [batch, heads, tokens, channels of each]."""
    batch, tokens = q.shape[0], q.shape[2 if skip_reshape else 1]
    width = q.shape[-1] if skip_reshape else q.shape[-1] // heads
    return [batch, heads, tokens, width] if skip_output_reshape else [batch, tokens, heads * width]


def _with_places_out(places: Sequence[str]) -> dict[str, Any]:
    """Options of a block at some of whose places functions are called that are called out."""
    here = "traced", 0
    functions = {place: functools.partial(_called_out, place) for place in places}
    return {
        BLOCK: here,
        PATCHES: {place: [function] for place, function in functions.items()},
        REPLACE: {place: {here: function} for place, function in functions.items()},
    }


def _called_out(place: str, *args: Any) -> torch.Tensor:
    *tensors, _ = args
    return call_out([*tensors[0].shape], tensors, {PLACE: place})


def _whole_called_out(place: str, tokens: torch.Tensor, context: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """Takes the place of a whole attention layer in a trace.

    Raises:
        UnsupportedModel: it is one over a text, of which there is none.
    """
    if context is None and place == _OVER_A_TEXT:
        raise UnsupportedModel("its attention over a text is given none")
    is_over_itself = context is None or context is tokens
    return call_out([*tokens.shape], [tokens] if is_over_itself else [tokens, context], {PLACE: place})


_OVER_A_TEXT = whole_of("attn2")


@contextmanager
def _with_wholes_out(block: torch.nn.Module, places: Sequence[str]) -> Iterator[None]:
    """Meanwhile those of the places that are whole layers of a block are called out."""
    names = {place: name for place in places if (name := layer_at(place)) is not None}
    owns = {place: block.get_submodule(name).__dict__ for place, name in names.items()}
    for place, own in owns.items():
        own["forward"] = functools.partial(_whole_called_out, place)
    try:
        yield
    finally:
        for own in owns.values():
            del own["forward"]


class BlockGraph(torch.nn.Module):
    """The block as it is traced: plain attention, or one that is called out, and no patches but such as are."""

    def __init__(self, block: torch.nn.Module, kind: BlockClass) -> None:
        super().__init__()
        self.block = block
        self._kind = kind

    def forward(self, **arguments: Any) -> Any:
        """
        Args:
            arguments: of the block, by name; and `ATTENTION_OUT`, `PLACES_OUT` and `STORED`.
        """
        arguments.pop(STORED, None)
        places = arguments.pop(PLACES_OUT, "").split()
        is_out = arguments.pop(ATTENTION_OUT, False)
        attention = attention_called_out if is_out else scaled_dot_product_attention
        if self._kind.takes_options:
            others = [place for place in places if layer_at(place) is None]
            arguments[OPTIONS] = {OVERRIDE: attention, **(_with_places_out(others) if others else {})}
        if self._kind.attends is not None:
            over_a_text = attention if is_out else attention_over_a_text
            arguments[self._kind.attends] = functools.partial(over_a_text, None)
        with (
            plain_operators(),
            plain_attention(self._kind.attention, attention),
            _with_wholes_out(self.block, places),
        ):
            return self.block(**arguments)


_MOST_ONES = 4
"""Axes of size one of which each choice is tried: fifteen choices."""


class ComfyBlock:
    """A kind of block, as a `BlockArchitecture`.

    Args:
        owner: of a model that has such a block.
        path: of one of them in that model.
        form, example: see `BlockArchitecture`.
        axes: of each tensor those that have another size in other calls.
    """

    role: Role = Role.BLOCK
    outputs: tuple[str, ...] = ()

    def __init__(
        self,
        owner: Owner,
        path: str,
        form: Form,
        example: Mapping[str, Shape],
        axes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._owner = owner
        self._path = path
        self._axes = {
            name: tuple(axis for axis in axes.get(name, ()) if axis < len(shape)) for name, shape in example.items()
        }
        self.form = form
        self.example = dict(example)

    @property
    def open_axes(self) -> Mapping[str, tuple[int, ...]]:
        """See `BlockArchitecture`; none of size one, which most code broadcasts."""
        return {name: tuple(axis for axis in axes if self.example[name][axis] > 1) for name, axes in self._axes.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ComfyBlock, (self._owner, self._path, self.form, self.example, self._axes)

    @property
    def larger(self) -> Sequence[ComfyBlock]:
        """See `BlockArchitecture`: with each choice of axes of size one, since some may have it in all calls."""
        ones = [(name, axis) for name, axes in self._axes.items() for axis in axes if self.example[name][axis] == 1]
        counts = range(len(ones), 0, -1) if len(ones) <= _MOST_ONES else [len(ones)]
        return [self._with_two_of(each) for count in counts for each in itertools.combinations(ones, count)]

    def _with_two_of(self, ones: Sequence[tuple[str, int]]) -> ComfyBlock:
        example = {
            name: tuple(2 if (name, axis) in ones else size for axis, size in enumerate(shape))
            for name, shape in self.example.items()
        }
        return ComfyBlock(self._owner, self._path, self.form, example, self._axes)

    @functools.cached_property
    def stored(self) -> Mapping[str, Stored]:
        """See `BlockArchitecture`."""
        said = next((node[2] for name, node in self.form if name == STORED), "")
        found: dict[str, Stored] = {}
        for entry in said.split("; ") if said else ():
            name, dtype, *how = entry.split(" ")
            ggml = next((mark for mark in how if mark in TYPES), "")
            found[PREFIX + name] = Stored(dtype_named(dtype), _SCALED in how, _UNCAST not in how, ggml)
        return found

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        block = self._owner.fresh.get_submodule(self._path)
        digest = hashlib.sha256(f"{block_digest(block)} {say_form(self.form)}".encode()).hexdigest()
        name = f"{self._owner.fingerprint.architecture_name} {type(block).__name__}{_say_width(block)}"
        if any(argument == ATTENTION_OUT for argument, _ in self.form):
            name += ", attention outside"
        name += "".join(f", {node[2]} outside" for argument, node in self.form if argument == PLACES_OUT)
        if self.stored:
            kinds = sorted({each.ggml or dtype_name(each.dtype) for each in self.stored.values()})
            name += f", weights in {' and '.join(kinds)}"
        return fingerprint_of(digest, name, block)

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        def build() -> torch.nn.Module:
            block = self._owner.whole_for_tracing().get_submodule(self._path)
            kind = block_class_of(block)
            if kind is None:
                raise UnsupportedModel(f"{type(block).__name__} is no block that engines stand for")
            return BlockGraph(block, kind)

        return placeholder_of(build, dtype_of(precision), device)

    def random_inputs(
        self,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        seed: int,
    ) -> Tensors:
        return random_inputs(shapes, dtypes, device, seed)


def block_digest(block: torch.nn.Module) -> str:
    """A SHA-256 of all that decides what a block computes, apart from its weights and its calls.

    Args:
        block: of a meta module.

    Raises:
        UnsupportedModel: the code of a layer, or one of its settings, cannot be known for certain.
    """
    layers = layers_of(block)
    facts = {
        "recipe": [RECIPE, BLOCK_RECIPE],
        "layers": [
            (name, type(layer).__module__, type(layer).__qualname__.rpartition(".")[2], _plain(_fixed(own), name))
            for (name, layer), own in zip(layers.items(), settings_of(layers), strict=True)
        ],
        "weights": sorted((name, list(tensor.shape)) for name, tensor in _tensors_of(block).items()),
        "source": source_digest(block),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


BLOCK_RECIPE = 4
"""Raise when the way in which engines of blocks are exported or compiled changes."""


_BY_MACHINE = "optimized_attention"
"""A VAE's attention blocks hold the function that ComfyUI chose for its process; programs are traced with one."""


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are the same in every process."""
    return {name: value for name, value in settings.items() if name != _BY_MACHINE}


def _tensors_of(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def _say_width(block: torch.nn.Module) -> str:
    """The channels of a block's first weight matrix, which tells its kinds apart for people."""
    shapes = (tensor.shape for tensor in block.parameters() if tensor.ndim > 1)
    shape = next(shapes, None)
    return "" if shape is None else f" {shape[1]}"


def _plain(value: Any, where: str) -> Any:
    """A layer's settings as JSON has them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each, where) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each, where) for name, each in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, (torch.dtype, torch.device)):
        return None  # says how weights are stored
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}{_say_unnamed(value)}"
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    raise UnsupportedModel(f"the setting of a layer ({where}) is a {type(value).__name__}")


def _say_unnamed(function: FunctionType) -> str:
    """What tells one function without a name from others of its module: its code, and what that names.

    Raises:
        UnsupportedModel: it knows more than those.
    """
    if function.__name__ != "<lambda>":
        return ""
    code = function.__code__
    if function.__closure__ or function.__defaults__ or any(map(_is_code, code.co_consts)):
        raise UnsupportedModel("a layer computes by a function without a name that knows more than its arguments")
    return f" {code.co_code.hex()} {code.co_names} {code.co_consts}"


def _is_code(value: object) -> bool:
    return isinstance(value, CodeType)
