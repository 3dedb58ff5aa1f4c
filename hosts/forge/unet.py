"""The Forge family's UNet as an `Architecture`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.placeholder import placeholder_of
from ...core.protocols import Tensors
from ...core.spec import ModelFingerprint, Precision, Role
from ..architecture import NetworkArchitecture, Remembered, architecture_digest, fingerprint_of, inputs_unwritten
from ..control_residuals import control_of
from .families import FAMILIES, Family, enter_for_layers


def call(unet: torch.nn.Module, inputs: Tensors) -> torch.Tensor:
    """Call a UNet with the runtime's names."""
    control, given = control_of(inputs)
    rest = {name: tensor for name, tensor in given.items() if name not in ("x", "timesteps")}
    result: torch.Tensor = unet(given["x"], given["timesteps"], **rest, control=control, transformer_options={})
    return result


class UNetGraph(torch.nn.Module):
    """The UNet as exported: plain inputs, one attention operator that compilers know, no patches."""

    def __init__(self, family: Family, unet: torch.nn.Module) -> None:
        super().__init__()
        self.model = unet
        self._family = family

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Args:
            inputs: x [N, C, H, W], timesteps [N], context [N, tokens, dim], y [N, dim] where the class takes it, and
                the residuals of ControlNets.

        Raises:
            UnsupportedModel: the model writes into its inputs, which the host's own calls would see.
        """
        with inputs_unwritten(inputs), self._family.plain_attention():
            return (call(self.model, inputs),)


class ForgeUNet(NetworkArchitecture):
    """What a UNet computes, apart from the model that was loaded."""

    role: Role = Role.UNET
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, family: Family, config: dict[str, Any], name: str) -> None:
        self.family = family
        self.config = config
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (self.family.name, self.family.checkout(), self.config, self.name)

    @classmethod
    def of(cls, family: Family, model: Any) -> ForgeUNet:
        """The architecture of what a `UnetPatcher` holds.

        Raises:
            UnsupportedModel: engines cannot stand for its class.
        """
        live = getattr(model, "diffusion_model", None)
        if not isinstance(live, torch.nn.Module) or not family.is_unet(live):
            raise UnsupportedModel(f"{type(live).__name__} models have no engines in this WebUI; the plain one is used")
        return _remembered.get(live, None, lambda: cls._read(family, model))

    @classmethod
    def _read(cls, family: Family, model: Any) -> ForgeUNet:
        config = family.arguments(copy.deepcopy(dict(family.config(model))))
        described = getattr(model, "config", None) or getattr(model, "model_config", None)
        return cls(family, config, type(described).__name__)

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        return fingerprint_of(architecture_digest(self.meta_module, self.config), self.name, self.meta_module)

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(lambda: UNetGraph(self.family, self.new_meta_module()), dtype_of(precision), device)

    def new_meta_module(self) -> torch.nn.Module:
        """A new UNet on the meta device."""
        with torch.device("meta"):
            return self.family.build(copy.deepcopy(self.config)).requires_grad_(False).eval()


_remembered: Remembered[ForgeUNet] = Remembered()


def _in_another_process(family: str, checkout: str, config: dict[str, Any], name: str) -> ForgeUNet:
    if family not in FAMILIES:
        raise UnsupportedModel(f"no WebUI is built on {family}")
    return ForgeUNet(enter_for_layers(family, checkout), config, name)
