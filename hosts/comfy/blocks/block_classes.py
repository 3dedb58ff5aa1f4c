"""ComfyUI's classes of blocks that engines can stand for: one row of `BLOCK_CLASSES` each.

A block inside of another one is computed by the other's engine; it has its turn where the other one runs as it is.
`GROUP_CLASSES` are layers around several blocks, which have no engine of their own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....core.errors import UnsupportedModel

OPTIONS = "transformer_options"
OVERRIDE = "optimized_attention_override"
"""Of options: what other nodes want attention computed by."""
PLACE = "place"
"""Of a call out of an engine: where in the block it is, see `BlockClass`."""

_WHOLE = "whole:"


def whole_of(layer: str) -> str:
    """The place of a whole layer, see `BlockClass`."""
    return _WHOLE + layer


def layer_at(place: str) -> str | None:
    """The layer that a place is the whole of; None where it is another place."""
    return place.removeprefix(_WHOLE) if place.startswith(_WHOLE) else None


@functools.cache
def names_at(place: str) -> tuple[str, ...]:
    """The names in `patches` and `patches_replace` whose functions compute at a place."""
    layer = layer_at(place)
    return (place,) if layer is None else (f"{layer}_patch", layer, f"{layer}_output_patch")


@dataclass(frozen=True)
class BlockClass:
    """
    Attributes:
        module, name: where the class is.
        open_axes: axes of its inputs that have another size in other pictures, prompts or batches, by the argument
            that they are in; what depends on them, such as tables of positions, included.
        names: of its arguments that are given by place, for a class whose signature does not tell.
        attention: the module whose name `optimized_attention` stands for the attention of a class that does not hand
            `transformer_options` on; None for the others.
        attends: the argument that is the function which computes attention, for a class that is given one; None for
            the others.
        keeps: the argument that the block writes into for its next call; None where it has none.
        places: names in `patches` and `patches_replace`, of `transformer_options`, at which other nodes' functions are
            given tensors, and options, and give one tensor such as the first, which the block does not use otherwise.
        wholes: names of its attention layers before which functions in `patches`, such as `attn1_patch`, may divide or
            join tokens: what they and the layer make of these is computed elsewhere as a whole.
        writes: of `transformer_options`, what a call leaves there for other nodes to look at.
    """

    module: str
    name: str
    open_axes: Mapping[str, tuple[int, ...]]
    names: tuple[str, ...] = ()
    attention: str | None = None
    attends: str | None = None
    keeps: str | None = None
    places: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def arguments(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The arguments of a call by name, without those that have their defaults; and its `transformer_options`.

        Args:
            method: the class's `forward`.

        Raises:
            TypeError: it takes no such arguments.
            UnsupportedModel: it is to keep something for its next call.
        """
        _, defaults = _parameters_of(method)
        given = self.by_name(method, args, kwargs)
        options = given.pop(OPTIONS, None)
        found = {name: value for name, value in given.items() if name not in defaults or value is not defaults[name]}
        if self.keeps in found:
            raise UnsupportedModel("it keeps what it computes for its next call")
        return found, options

    def by_name(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name.

        Raises:
            TypeError: it takes no such arguments.
        """
        names = self.names or _parameters_of(method)[0]
        if len(args) > len(names):
            raise TypeError("more arguments than the block takes")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    @cached_property
    def has_attention(self) -> bool:
        """Whether it computes any attention."""
        return self.takes_options or self.attention is not None or self.attends is not None

    @cached_property
    def takes_options(self) -> bool:
        """Whether its calls are given `transformer_options`, by which other nodes reach into it."""
        return bool(self.names) or OPTIONS in _parameters_of(self.load().forward)[0]

    def load(self) -> type[torch.nn.Module]:
        """The class itself."""
        found: type[torch.nn.Module] = getattr(importlib.import_module(self.module), self.name)
        return found

    @cached_property
    def names_outside(self) -> frozenset[str]:
        """All names in `patches` and `patches_replace` whose functions may compute elsewhere."""
        return frozenset(self.places).union(*(names_at(whole_of(layer)) for layer in self.wholes))

    @cached_property
    def place(self) -> tuple[str, str]:
        """Module and name."""
        return self.module, self.name


_known_parameters: dict[Any, tuple[tuple[str, ...], dict[str, Any]]] = {}


def _parameters_of(method: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of a method's arguments, `self` left out, and their defaults."""
    if (known := _known_parameters.get(method)) is None:
        parameters = [*inspect.signature(method).parameters.values()][1:]
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = tuple(each.name for each in parameters if each.kind in kinds)
        defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
        known = _known_parameters[method] = names, defaults
    return known


_UNET = "comfy.ldm.modules.diffusionmodules.openaimodel"
_ATTENTION = "comfy.ldm.modules.attention"
_FLUX = "comfy.ldm.flux.layers"
_WAN = "comfy.ldm.wan.model"
_MMDIT = "comfy.ldm.modules.diffusionmodules.mmdit"
_VAE = "comfy.ldm.modules.diffusionmodules.model"
_LLAMA = "comfy.text_encoders.llama"
_TOLD = "optimized_attention"

BLOCK_CLASSES = (
    # UNets of SD1.x, SD2, SDXL, and their ControlNets
    BlockClass(
        _ATTENTION,
        "BasicTransformerBlock",
        {"x": (0, 1), "context": (0, 1)},
        places=("attn1", "attn1_output_patch", "middle_patch", "attn2", "attn2_output_patch"),
        wholes=("attn1", "attn2"),
    ),
    BlockClass(_ATTENTION, "CrossAttention", {"x": (0, 1), "context": (0, 1), "value": (0, 1)}),
    BlockClass(_ATTENTION, "FeedForward", {"x": (0, 1)}),
    BlockClass(_UNET, "ResBlock", {"x": (0, 2, 3), "emb": (0,)}),
    # Flux.1, Flux.2, and their ControlNets
    BlockClass(
        _FLUX,
        "DoubleStreamBlock",
        {"img": (0, 1), "txt": (0, 1), "vec": (0,), "pe": (0, 2)},
        places=("attn1_output_patch",),
    ),
    BlockClass(
        _FLUX,
        "SingleStreamBlock",
        {"x": (0, 1), "vec": (0,), "pe": (0, 2)},
        places=("attn1_output_patch",),
    ),
    # SD3, SD3.5, and ControlNets of SD3
    BlockClass(_MMDIT, "JointBlock", {"context": (0, 1), "x": (0, 1), "c": (0,)}, names=("context", "x")),
    # ControlNets of SD3.5
    BlockClass(_MMDIT, "DismantledBlock", {"x": (0, 1), "c": (0,)}, attention=_MMDIT),
    # Wan 2.1, Wan 2.2
    BlockClass(_WAN, "WanAttentionBlock", {"x": (0, 1), "e": (0,), "freqs": (0, 1), "context": (0, 1)}),
    BlockClass(_WAN, "WanSelfAttention", {"x": (0, 1), "freqs": (0, 1)}),
    *(BlockClass(_WAN, f"Wan{name}CrossAttention", {"x": (0, 1), "context": (0, 1)}) for name in ("T2V", "I2V")),
    BlockClass(_WAN, "WanFeedForward", {"x": (0, 1)}),  # which older ComfyUIs lack
    # Qwen-Image, and its ControlNets
    BlockClass(
        "comfy.ldm.qwen_image.model",
        "QwenImageTransformerBlock",
        {
            "hidden_states": (0, 1),
            "encoder_hidden_states": (0, 1),
            "encoder_hidden_states_mask": (0, 1),
            "temb": (0,),
            "image_rotary_emb": (0, 1, 2),
        },
    ),
    # Lumina 2, Z-Image
    BlockClass(
        "comfy.ldm.lumina.model",
        "JointTransformerBlock",
        {"x": (0, 1), "x_mask": (0, 1), "freqs_cis": (0, 1, 2), "adaln_input": (0,)},
    ),
    # PixArt
    BlockClass(
        "comfy.ldm.pixart.pixartms",
        "PixArtMSBlock",
        {"x": (0, 1), "y": (0, 1), "t": (0,)},
        attention="comfy.ldm.pixart.blocks",
    ),
    # VAEs of SD1.x, SD2, SDXL, SD3, Flux
    BlockClass(_VAE, "ResnetBlock", {"x": (0, 2, 3)}),
    BlockClass(_VAE, "AttnBlock", {"x": (0, 2, 3)}),
    BlockClass(_VAE, "Upsample", {"x": (0, 2, 3)}),
    BlockClass(_VAE, "Downsample", {"x": (0, 2, 3)}),
    # TAESD
    BlockClass("comfy.taesd.taesd", "Block", {"x": (0, 2, 3)}),
    # Text encoders: CLIP-L, CLIP-G
    BlockClass("comfy.clip_model", "CLIPLayer", {"x": (0, 1), "mask": (0, 1, 2, 3)}, attends=_TOLD),
    # T5-XXL, UMT5
    BlockClass(
        "comfy.text_encoders.t5",
        "T5Block",
        {"x": (0, 1), "mask": (0, 1, 2, 3), "past_bias": (0, 2, 3)},
        attends=_TOLD,
    ),
    # Llama, Mistral, Qwen 2.5 and 3; Gemma 2 and 3
    *(
        BlockClass(
            _LLAMA,
            name,
            {"x": (0, 1), "attention_mask": (0, 1, 2, 3), "freqs_cis": (0, 1, 2)},
            attends=_TOLD,
            keeps="past_key_value",
        )
        for name in ("TransformerBlock", "TransformerBlockGemma2")
    ),
)

GROUP_CLASSES = (
    # UNets of SD1.x, SD2, SDXL, and their ControlNets
    BlockClass(_ATTENTION, "SpatialTransformer", {}, writes=("activations_shape", "block_index")),
)

_BLOCKS, _GROUPS = ({row.place: row for row in rows} for rows in (BLOCK_CLASSES, GROUP_CLASSES))


def block_class_of(module: object) -> BlockClass | None:
    """The row of a module; None where it is of another class, a subclass included."""
    return _BLOCKS.get(_place_of(module))


def group_class_of(module: object) -> BlockClass | None:
    """The same for a layer around several blocks."""
    return _GROUPS.get(_place_of(module))


def _place_of(module: object) -> tuple[str, str]:
    kind = type(module)
    return kind.__module__, kind.__qualname__
