"""ComfyUI's image autoencoders that have engines: how each half is read from its layers and built anew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....core.errors import UnsupportedModel
from ....core.spec import Role
from ...live_model.layer_walk import layers_of
from .tracing_layers import layers_with_weights

Config = Mapping[str, Any]

_LAYERS = "comfy.ldm.modules.diffusionmodules.model."
_REGULARIZER = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"


@dataclass(frozen=True)
class Half:
    """One direction of an autoencoder.

    Attributes:
        part: the autoencoder's attribute that holds most of its layers, by the names of the usual kind.
        method: of the autoencoder, which computes this half.
        input: of the engine.
    """

    role: Role
    part: str
    method: str
    input: str


DECODER = Half(Role.VAE_DECODE, "decoder", "decode", "z")
ENCODER = Half(Role.VAE_ENCODE, "encoder", "encode", "pixels")
HALVES = {half.role: half for half in (DECODER, ENCODER)}


@dataclass(frozen=True)
class Kind:
    """A class of autoencoders.

    Attributes:
        name: for people; it also finds the kind in the build process.
        read: the config of a half of a live autoencoder; what is odd about its layers shows when they are compared.
        build: that half alone, under the names of the whole.
        latent_channels: by the config of either half.
        pixels_per_latent: of a picture in each direction, to one value of its latent.
    """

    name: str
    read: Callable[[Any, Half], Config]
    build: Callable[[Config, Half], torch.nn.Module]
    latent_channels: Callable[[Config], int]
    pixels_per_latent: Callable[[Config], int]


def kind_of(model: Any) -> Kind | None:
    """The kind of a live `first_stage_model`; None for those without engines."""
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
    from comfy.taesd.taesd import TAESD

    kinds: dict[type, Kind] = {AutoencoderKL: KINDS["VAE"], AutoencodingEngine: KINDS["VAE"], TAESD: KINDS["TAESD"]}
    return kinds.get(type(model))


def build_half(kind: Kind, config: Config, half: Half) -> torch.nn.Module:
    """Built as a meta module, without weights."""
    with torch.device("meta"), layers_with_weights():
        return kind.build(config, half).requires_grad_(False).eval()


def why_other_layers(live: torch.nn.Module, built: torch.nn.Module) -> str | None:
    """The first layer of a live autoencoder that is not as in its half that was built; None where all are."""
    wanted = _looks_of(built)
    parts = {name.partition(".")[0] for name in wanted}
    found = {name: layer for name, layer in layers_of(live).items() if name.partition(".")[0] in parts}
    others = [name for name in found.keys() & wanted.keys() if not wanted[name].is_of(found[name])]
    if wrong := [*others, *(found.keys() ^ wanted.keys())]:
        return min(wrong)
    own = _shapes(live)
    return next((name for name, shape in _shapes(built).items() if own.get(name) != shape), None)


@functools.lru_cache(maxsize=8)
def _looks_of(built: torch.nn.Module) -> dict[str, _Look]:
    """Of a half that nobody changes."""
    return {name: _Look.of(layer) for name, layer in layers_of(built).items() if name}


@dataclass(frozen=True)
class _Look:
    """What decides how a layer computes, apart from its weights.

    Attributes:
        settings: padding, stride and the like: whatever plain value its code keeps under a public name.
        shapes: of its parameters and buffers.
    """

    kind: type
    settings: Mapping[str, object]
    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, layer: torch.nn.Module) -> _Look:
        settings = {
            name: value
            for name, value in vars(layer).items()
            if _is_plain(value) and not name.startswith(("_", "comfy_")) and name != "training"
        }
        return cls(type(layer), settings, _shapes(layer))

    def is_of(self, layer: torch.nn.Module) -> bool:
        own = vars(layer)
        return (
            type(layer) is self.kind
            and all(_is_same(own.get(name), value) for name, value in self.settings.items())
            and _shapes(layer) == self.shapes
        )


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, str, type(None))


def _is_same(found: Any, wanted: Any) -> bool:
    """Unlike ==, which takes 1 for True, also within tuples."""
    if type(found) is not type(wanted):
        return False
    if type(wanted) is tuple:
        return len(found) == len(wanted) and all(map(_is_same, found, wanted))
    return bool(found == wanted)


def _shapes(layer: torch.nn.Module) -> dict[str, torch.Size]:
    holders = [holder for holder in (layer._parameters, layer._buffers) if holder]  # most have none
    return {name: tensor.shape for holder in holders for name, tensor in holder.items() if tensor is not None}


# ------------------------------------------------------------------------------------ SD1.x, SDXL, SD3, Flux


def _read_usual(model: Any, half: Half) -> Config:
    part = getattr(model, half.part)
    is_plain = type(part).__module__ + "." + type(part).__qualname__ == _LAYERS + half.part.capitalize()
    first = getattr(getattr(part, "conv_in", None), "weight", None)
    if not is_plain or first is None or first.ndim != 4 or getattr(model, "bn", None) is not None:
        raise UnsupportedModel(_other(model, part))
    if half is ENCODER and getattr(model.regularization, "sample", None) is not False:
        raise UnsupportedModel(
            "The VAE's encoder draws random numbers, which engines do not; your model runs without an engine"
        )
    return {"layers": _layers_of(part, half), "embed_dim": _embed_dim(model, half)}


def _other(model: Any, part: Any) -> str:
    kind = f"{type(model).__name__} with {type(part).__name__}"
    return f"VAEs of this kind ({kind}) have no engines yet; your model runs without an engine"


def _layers_of(part: Any, half: Half) -> Config:
    """The arguments that made a live `Decoder` or `Encoder`, which keeps some of them only in its layers."""
    levels = range(part.num_resolutions)
    if half is DECODER:
        steps, resampling = part.up, [part.up[level].upsample for level in levels[1:]]
        latent, out = part.conv_in.weight.shape[1], part.conv_out.weight.shape[0]
        own = {"tanh_out": part.tanh_out}
    else:
        steps, resampling = part.down, [part.down[level].downsample for level in levels[:-1]]
        latent, out = part.conv_out.weight.shape[0] // 2, part.in_channels
        own = {}
    return {
        **own,
        "ch": part.ch,
        "widths": [steps[level].block[0].out_channels for level in levels],
        "num_res_blocks": part.num_res_blocks,
        "attn_resolutions": [part.resolution // 2**level for level in levels if len(steps[level].attn)],
        "dropout": part.mid.block_1.dropout.p,
        "in_channels": part.in_channels,
        "resolution": part.resolution,
        "z_channels": latent,
        "out_ch": out,
        "double_z": True,  # mean and deviation, of which the regularizer takes the mean
        "resamp_with_conv": all(layer.with_conv for layer in resampling),
    }


class _Width(int):
    """A level's multiple of channels that stands for its channels: they need not be a multiple of the first level's."""

    def __rmul__(self, other: int) -> int:
        return int(self)


def _embed_dim(model: Any, half: Half) -> int | None:
    """Channels of latents that pass a convolution beside the layers; None where there is none."""
    if half is DECODER:
        convolution = getattr(model, "post_quant_conv", None)
        return None if convolution is None else int(convolution.weight.shape[1])
    convolution = getattr(model, "quant_conv", None)
    return None if convolution is None else int(convolution.weight.shape[0]) // 2


def _build_usual(config: Config, half: Half) -> torch.nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine

    layers = dict(config["layers"])
    layers["ch_mult"] = tuple(map(_Width, layers.pop("widths")))
    other = ENCODER if half is DECODER else DECODER
    if config["embed_dim"] is None:
        parts: dict[str, Any] = {
            f"{half.part}_config": {"target": _LAYERS + half.part.capitalize(), "params": layers},
            f"{other.part}_config": {"target": "torch.nn.Identity"},
        }
        model = AutoencodingEngine(**parts, regularizer_config={"target": _REGULARIZER})
    else:
        model = AutoencoderKL(ddconfig=layers, embed_dim=config["embed_dim"])
        delattr(model, "quant_conv" if half is DECODER else "post_quant_conv")
    delattr(model, other.part)
    if half is DECODER:
        delattr(model, "regularization")  # of what the encoder gives
    built: torch.nn.Module = model
    return built


def _usual_channels(config: Config) -> int:
    return int(config["embed_dim"] or config["layers"]["z_channels"])


def _usual_scale(config: Config) -> int:
    return 2 ** (len(config["layers"]["widths"]) - 1)


# ----------------------------------------------------------------------------------------------------- TAESD


def _read_taesd(model: Any, half: Half) -> Config:
    return {"latent_channels": int(model.taesd_decoder[1].weight.shape[1])}


def _build_taesd(config: Config, half: Half) -> torch.nn.Module:
    from comfy.taesd.taesd import TAESD

    model = TAESD(latent_channels=config["latent_channels"])
    delattr(model, "taesd_encoder" if half is DECODER else "taesd_decoder")
    built: torch.nn.Module = model
    return built


KINDS = {
    kind.name: kind
    for kind in (
        Kind("VAE", _read_usual, _build_usual, _usual_channels, _usual_scale),
        Kind("TAESD", _read_taesd, _build_taesd, lambda config: int(config["latent_channels"]), lambda config: 8),
    )
}
