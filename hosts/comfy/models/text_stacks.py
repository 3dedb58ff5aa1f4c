"""The stacks of layers in ComfyUI's text encoders, whose layers are blocks that engines can stand for."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....core.dtypes import dtype_of
from ....core.errors import UnsupportedModel
from ....core.placeholder import placeholder_of
from ....core.spec import ModelFingerprint, Precision, Role
from ...architecture import NetworkArchitecture, Remembered, architecture_digest, fingerprint_of
from ...live_model.layer_walk import layers_of
from .diffusion_model import checkout_in_use, enter_for_layers
from .tracing_layers import layers_with_weights, plain_layers

Config = Mapping[str, Any]

_CLIP, _T5, _LLAMA = "comfy.clip_model", "comfy.text_encoders.t5", "comfy.text_encoders.llama"


@dataclass(frozen=True)
class StackClass:
    """A class of stacks.

    Attributes:
        module, name: where the class is.
        read: the config of a live stack, which is plain data; what is odd about its layers shows when they are
            compared with those of a fresh one.
        arguments: what makes a stack of this config, but for where and of which layers it is made.
        layers: the argument that says of which layers.
        title: for people, by the config.
    """

    module: str
    name: str
    read: Callable[[Any], Config]
    arguments: Callable[[Config], Mapping[str, Any]]
    layers: str
    title: Callable[[Config], str]

    def load(self) -> Any:
        """The class itself."""
        return getattr(importlib.import_module(self.module), self.name)

    def build(self, config: Config, layers: Any) -> torch.nn.Module:
        """A new stack as a meta module."""
        where = {"device": "meta", "dtype": torch.float32, self.layers: layers}
        with layers_with_weights():
            made: torch.nn.Module = self.load()(**self.arguments(config), **where)
        return made.requires_grad_(False).eval()


def _read_clip(live: Any) -> Config:
    first = live.layers[0]
    return {
        "num_layers": len(live.layers),
        "embed_dim": first.self_attn.q_proj.in_features,
        "heads": first.self_attn.heads,
        "intermediate_size": first.mlp.fc1.out_features,
        "intermediate_activation": _activation_named(_CLIP, "ACTIVATIONS", first.mlp.activation),
    }


def _read_t5(live: Any) -> Config:
    attention, dense = live.block[0].layer[0].SelfAttention, live.block[0].layer[-1].DenseReluDense
    is_gated = type(dense).__name__ == "T5DenseGatedActDense"
    return {
        "num_layers": len(live.block),
        "model_dim": attention.q.in_features,
        "inner_dim": attention.q.out_features,
        "ff_dim": dense.wo.in_features,
        "ff_activation": _activation_named(_T5, "activations", dense.act),
        "gated_act": is_gated,
        "num_heads": attention.num_heads,
        "relative_attention": live.block[-1].layer[0].SelfAttention.relative_attention_bias is None,
    }


def _activation_named(module: str, table: str, function: Any) -> str:
    """
    Raises:
        UnsupportedModel: it is none of ComfyUI's.
    """
    known = getattr(importlib.import_module(module), table)
    name = next((name for name, each in known.items() if each is function), None)
    if name is None:
        raise UnsupportedModel("another extension changed the activation of the text encoder")
    return str(name)


def _read_llama(live: Any) -> Config:
    kind = type(live.config)
    if kind.__module__ != _LLAMA or not dataclasses.is_dataclass(kind):
        raise UnsupportedModel(f"Text encoders of this kind ({kind.__qualname__}) have no engines yet")
    return {"config": kind.__qualname__, **{each.name: getattr(live.config, each.name) for each in _fields(kind)}}


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _llama_arguments(config: Config) -> Mapping[str, Any]:
    fields = dict(config)
    return {"config": getattr(importlib.import_module(_LLAMA), fields.pop("config"))(**fields)}


_STACKS = (
    StackClass(_CLIP, "CLIPEncoder", _read_clip, dict, "operations", lambda config: "CLIP"),
    StackClass(_T5, "T5Stack", _read_t5, dict, "operations", lambda config: "T5"),
    StackClass(
        _LLAMA,
        "Llama2_",
        _read_llama,
        _llama_arguments,
        "ops",
        lambda config: str(config["config"]).removesuffix("Config").rstrip("_"),
    ),
)
_BY_PLACE = {(row.module, row.name): row for row in _STACKS}


def stacks_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """All stacks in a live text encoder; what belongs to a stack of another class is none."""
    return (layer for layer in layers_of(model).values() if _place_of(layer) in _BY_PLACE)


def _place_of(layer: torch.nn.Module) -> tuple[str, str]:
    kind = type(layer)
    return kind.__module__, kind.__qualname__


class ComfyTextStack(NetworkArchitecture):
    """What a stack of a text encoder's layers computes, apart from the model that was loaded. Only its blocks have
    engines."""

    role: Role = Role.TEXT_ENCODER

    def __init__(self, kind: StackClass, config: Config) -> None:
        self.kind, self.config = kind, config

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (checkout_in_use(), self.kind.module, self.kind.name, dict(self.config))

    @classmethod
    def of(cls, live: torch.nn.Module) -> ComfyTextStack:
        """The architecture of a live stack.

        Raises:
            UnsupportedModel: its layers cannot be read.
        """
        return _remembered.get(live, None, lambda: cls._read(live))

    @classmethod
    def _read(cls, live: torch.nn.Module) -> ComfyTextStack:
        kind = _BY_PLACE[_place_of(live)]
        try:
            return cls(kind, kind.read(live))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise UnsupportedModel(f"The text encoder's layers cannot be read ({error})") from error

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        return fingerprint_of(architecture_digest(self.fresh, self.config), self.kind.title(self.config), self.fresh)

    def new_meta_module(self) -> torch.nn.Module:
        import comfy.ops

        return self.kind.build(self.config, comfy.ops.disable_weight_init)

    def whole_for_tracing(self) -> torch.nn.Module:
        """A new meta module of the stack, whose layers compute plainly in one dtype."""
        return self.kind.build(self.config, plain_layers())

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        """A stack for tracing; engines stand for its blocks alone."""
        return placeholder_of(self.whole_for_tracing, dtype_of(precision), device)


_remembered: Remembered[ComfyTextStack] = Remembered()


def _in_another_process(checkout: str, module: str, name: str, config: Config) -> ComfyTextStack:
    enter_for_layers(checkout)
    return ComfyTextStack(_BY_PLACE[module, name], config)
