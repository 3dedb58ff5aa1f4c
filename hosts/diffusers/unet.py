"""diffusers' UNet2DConditionModel (SD1.x, SD2, SDXL and their kin) as an `Architecture`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.placeholder import placeholder_of
from ...core.protocols import Tensors
from ...core.spec import ModelFingerprint, Precision, Role
from ..architecture import NetworkArchitecture, architecture_digest, fingerprint_of

ADDED = ("text_embeds", "time_ids")
"""SDXL's further inputs, in `added_cond_kwargs`."""

_NOT_COMPUTED = ("sample_size", "dropout")
"""Settings that change no result: the size a model was trained at, and what only training uses."""

# What else a UNet may take as input, beside text.
_SUPPORTED = {
    "addition_embed_type": (None, "text_time"),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "encoder_hid_dim_type": (None, "text_proj"),
}


class UNetGraph(torch.nn.Module):
    """The UNet as exported: plain inputs, one attention operator that compilers know."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__()
        unet.set_attn_processor(AttnProcessor2_0())
        self.model = unet

    def forward(
        self,
        x: torch.Tensor,  # [N, C, H, W]
        timesteps: torch.Tensor,  # [N]
        context: torch.Tensor,  # [N, tokens, dim]
        text_embeds: torch.Tensor | None = None,  # [N, dim]
        time_ids: torch.Tensor | None = None,  # [N, 6]
    ) -> tuple[torch.Tensor]:
        given = {"x": x, "timesteps": timesteps, "context": context, "text_embeds": text_embeds, "time_ids": time_ids}
        return (call(self.model, {name: tensor for name, tensor in given.items() if tensor is not None})["out"],)


def call(unet: torch.nn.Module, inputs: Tensors) -> Tensors:
    """Call a UNet with the runtime's names."""
    added = {name: inputs[name] for name in ADDED if name in inputs}
    results = unet(
        inputs["x"],
        inputs["timesteps"],
        inputs["context"],
        added_cond_kwargs=added or None,
        return_dict=False,
    )
    return {"out": results[0]}


class DiffusersUNet(NetworkArchitecture):
    """What a UNet2DConditionModel computes, apart from the model that was loaded."""

    role: Role = Role.UNET
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    @classmethod
    def of(cls, unet: UNet2DConditionModel) -> DiffusersUNet:
        """The architecture of a live UNet.

        Raises:
            UnsupportedModel: it is no plain UNet2DConditionModel, or takes inputs that engines do not.
        """
        if type(unet) is not UNet2DConditionModel:
            raise UnsupportedModel(
                f"{type(unet).__name__} models have no engines yet; your model runs without an engine"
            )
        config = {key: value for key, value in unet.config.items() if not key.startswith("_")}
        for key, values in _SUPPORTED.items():
            if config.get(key) not in values:
                raise UnsupportedModel(
                    f"UNets with {key} {config[key]!r} have no engines yet; your model runs without an engine"
                )
        return cls({key: value for key, value in config.items() if key not in _NOT_COMPUTED})

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        digest = architecture_digest(self.meta_module, self.config)
        return fingerprint_of(digest, "UNet2DConditionModel", self.meta_module)

    @property
    def takes_added(self) -> bool:
        """Whether the inputs of `ADDED` are needed."""
        return self.config.get("addition_embed_type") == "text_time"

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(lambda: UNetGraph(self.new_meta_module()), dtype_of(precision), device)

    def new_meta_module(self) -> UNet2DConditionModel:
        """A new meta module, as this version of diffusers builds it."""
        with torch.device("meta"):
            return UNet2DConditionModel.from_config(self.config).requires_grad_(False).eval()
