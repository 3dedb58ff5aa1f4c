"""ComfyUI's classes of diffusion models that engines can stand for: one row of `MODEL_CLASSES` each.

A class that is missing here runs as ever, with a reason.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....core.shapes import Shape, Shapes
from ...architecture import Draw, fractions_below, whole_numbers_below

Config = Mapping[str, Any]


@dataclass(frozen=True)
class CallSize:
    """What a build is asked for: samples in a call, length of the text, size of the latent."""

    batch: int
    tokens: int
    height: int
    width: int

    def image(self, channels: int) -> Shape:
        return self.batch, channels, self.height, self.width

    def video(self, channels: int, frames: int) -> Shape:
        return self.batch, channels, frames, self.height, self.width

    def text(self, dim: int) -> Shape:
        return self.batch, self.tokens, dim


@dataclass(frozen=True)
class BlockStack:
    """Transformer blocks of a network that are called one after another, each on what the one before gave.

    Attributes:
        name: of the list that they are in.
        results: what a block gives, by the names of the arguments that it changes to it.
        picture: of these, the one with the picture's tokens, [B, tokens, channels].
    """

    name: str
    results: tuple[str, ...]
    picture: str


@dataclass(frozen=True)
class ModelClass:
    """
    Attributes:
        module, name: where the class is; it is made as `name(**unet_config, dtype, device, operations)`.
        computes: the method that all wrappers surround. Its signature tells how the host's calls are to be read; its
            first two arguments are the latent and the timesteps, whatever they are called.
        has_wrappers: whether the class runs DIFFUSION_MODEL wrappers. Where it does not, the model is hooked as a
            whole, by APPLY_MODEL.
        timesteps: as samplers give them.
        shapes: the inputs of an ordinary call; None where the config does not tell.
        draws: how its other inputs are made up, where noise would not do.
        attention: the module whose name `optimized_attention` stands for the attention of a class that does not hand
            `transformer_options` on, and so knows no override; None for the others.
        stacks: the transformer blocks between which a first-block cache adds what it kept, in the order of their calls.
    """

    module: str
    name: str
    computes: str
    has_wrappers: bool
    timesteps: Draw
    shapes: Callable[[Config, CallSize], Shapes] | None
    draws: Mapping[str, Draw] = field(default_factory=dict)
    attention: str | None = None
    stacks: tuple[BlockStack, ...] = ()

    def load(self) -> type:
        """The class itself."""
        found: type = getattr(importlib.import_module(self.module), self.name)
        return found

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; latent and timesteps are `x` and `timesteps` in every class.

        Raises:
            TypeError, ValueError: the class takes no such arguments.
        """
        signature = _signature_of(getattr(self.load(), self.computes))
        this, latent, timesteps = list(signature.parameters)[:3]
        ours = {latent: "x", timesteps: "timesteps"}
        given: dict[str, Any] = {}
        for name, value in signature.bind(None, *args, **kwargs).arguments.items():
            kind = signature.parameters[name].kind
            given |= value if kind is inspect.Parameter.VAR_KEYWORD else {ours.get(name, name): value}
        given.pop(this, None)
        return given


@functools.lru_cache(maxsize=16)
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def class_of(model: object) -> ModelClass | None:
    """The row of a live model; None when it is of another class, a subclass included."""
    kind = type(model)
    return next((row for row in MODEL_CLASSES if (row.module, row.name) == (kind.__module__, kind.__qualname__)), None)


def class_named(name: str) -> ModelClass:
    return next(row for row in MODEL_CLASSES if row.name == name)


def _unet(config: Config, size: CallSize) -> Shapes:
    text = {"context": size.text(config["context_dim"])} if config.get("context_dim") is not None else {}
    pooled = {"y": (size.batch, config["adm_in_channels"])} if config.get("adm_in_channels") else {}
    return {"x": size.image(config["in_channels"]), **text, **pooled}


def _sd3(config: Config, size: CallSize) -> Shapes:
    pooled = {"y": (size.batch, config["adm_in_channels"])} if config.get("adm_in_channels") else {}
    text = size.text(config["context_embedder_config"]["params"]["in_features"])
    return {"x": size.image(config["in_channels"]), "context": text, **pooled}


def _flux(config: Config, size: CallSize) -> Shapes:
    # ComfyUI gives a guidance to models without that embedding too.
    pooled = {"y": (size.batch, config["vec_in_dim"])} if config.get("vec_in_dim") else {}
    text = size.text(config["context_in_dim"])
    return {"x": size.image(config["in_channels"]), "context": text, "guidance": (size.batch,), **pooled}


def _qwen_image(config: Config, size: CallSize) -> Shapes:
    channels = config.get("in_channels", 64) // 4  # of patches of 2×2
    return {"x": size.video(channels, frames=1), "context": size.text(config.get("joint_attention_dim", 3584))}


def _pixart(config: Config, size: CallSize) -> Shapes:
    # ComfyUI tells every model the picture's size and its height by width; only PixArt-alpha reads them.
    told = {"c_size": (size.batch, 2), "c_ar": (size.batch, 1)}
    text = size.text(config.get("caption_channels", 4096))
    return {"x": size.image(config.get("in_channels", 4)), "context": text, **told}


MODEL_CLASSES = (
    # SD1.x, SD2, SDXL and their kin
    ModelClass(
        "comfy.ldm.modules.diffusionmodules.openaimodel",
        "UNetModel",
        computes="_forward",
        has_wrappers=True,
        timesteps=whole_numbers_below(1000),
        shapes=_unet,
    ),
    # SD3, SD3.5
    ModelClass(
        "comfy.ldm.modules.diffusionmodules.mmdit",
        "OpenAISignatureMMDITWrapper",
        computes="forward",
        has_wrappers=False,
        timesteps=fractions_below(1000),
        shapes=_sd3,
        stacks=(BlockStack("joint_blocks", ("context", "x"), "x"),),
    ),
    # Flux.1, Flux.2
    ModelClass(
        "comfy.ldm.flux.model",
        "Flux",
        computes="_forward",
        has_wrappers=True,
        timesteps=fractions_below(1),
        shapes=_flux,
        stacks=(BlockStack("double_blocks", ("img", "txt"), "img"), BlockStack("single_blocks", ("x",), "x")),
    ),
    # Wan 2.1, Wan 2.2: a prompt may ask for any number of frames
    ModelClass(
        "comfy.ldm.wan.model",
        "WanModel",
        computes="_forward",
        has_wrappers=True,
        timesteps=fractions_below(1000),
        shapes=None,
        stacks=(BlockStack("blocks", ("x",), "x"),),
    ),
    # Qwen-Image
    ModelClass(
        "comfy.ldm.qwen_image.model",
        "QwenImageTransformer2DModel",
        computes="_forward",
        has_wrappers=True,
        timesteps=fractions_below(1),
        shapes=_qwen_image,
        stacks=(BlockStack("transformer_blocks", ("encoder_hidden_states", "hidden_states"), "hidden_states"),),
    ),
    # Lumina 2, Z-Image. Calls tell the number of tokens beside them: blocks alone run on engines
    ModelClass(
        "comfy.ldm.lumina.model",
        "NextDiT",
        computes="_forward",
        has_wrappers=True,
        timesteps=fractions_below(1),
        shapes=None,
        stacks=(BlockStack("layers", ("x",), "x"),),
    ),
    # PixArt-alpha, PixArt-sigma. The original's mask over padded text is never used: ComfyUI cuts the padding off
    # beforehand, and gives each text at its own length.
    ModelClass(
        "comfy.ldm.pixart.pixartms",
        "PixArtMS",
        computes="forward",
        has_wrappers=False,
        timesteps=whole_numbers_below(1000),
        shapes=_pixart,
        draws={"c_size": whole_numbers_below(2048), "c_ar": fractions_below(4)},
        attention="comfy.ldm.pixart.blocks",
        stacks=(BlockStack("blocks", ("x",), "x"),),
    ),
)
