"""The UNet of AUTOMATIC1111 as an `Architecture`: of Stability's `ldm` or `sgm`."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.placeholder import placeholder_of
from ...core.protocols import Tensors
from ...core.spec import ModelFingerprint, Precision, Role
from ..architecture import NetworkArchitecture, Remembered, architecture_digest, fingerprint_of

_CLASS = "UNetModel"
_MODULE = "modules.diffusionmodules.openaimodel"
_PACKAGES = ("ldm", "sgm")
_NOT_COMPUTED = ("use_fp16", "use_checkpoint", "image_size", "ckpt_path")


def call(unet: torch.nn.Module, inputs: Tensors) -> torch.Tensor:
    """Call a UNet with the runtime's names."""
    rest = {name: tensor for name, tensor in inputs.items() if name not in ("x", "timesteps")}
    result: torch.Tensor = unet(inputs["x"], timesteps=inputs["timesteps"], **rest)
    return result


class UNetGraph(torch.nn.Module):
    """The UNet as exported."""

    def __init__(self, unet: torch.nn.Module) -> None:
        super().__init__()
        self.model = unet

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """
        Args:
            inputs: x [N, C, H, W], timesteps [N], context [N, tokens, dim], y [N, dim] where the class takes it.
        """
        return (call(self.model, inputs),)


class LdmUNet(NetworkArchitecture):
    """What a UNet computes, apart from the model that was loaded.

    Args:
        package: `ldm` or `sgm`.
    """

    role: Role = Role.UNET
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, package: str, config: dict[str, Any]) -> None:
        self.package = package
        self.config = config

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (self.package, _folder(self.package), self.config)

    @classmethod
    def of(cls, unet: torch.nn.Module, config: Callable[[], Mapping[str, Any]]) -> LdmUNet:
        """
        Args:
            config: reads that of the file that the host made the UNet from; asked once for each UNet.

        Raises:
            UnsupportedModel: engines cannot stand for its class.
        """
        package = type(unet).__module__.partition(".")[0]
        if package not in _PACKAGES or f"{type(unet).__module__}.{type(unet).__qualname__}" != _full_name(package):
            raise UnsupportedModel(f"{type(unet).__name__} models have no engines in this WebUI; the plain one is used")
        return _remembered.get(unet, None, lambda: cls(package, _arguments(package, config())))

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        digest = architecture_digest(self.meta_module, self.config)
        return fingerprint_of(digest, f"{self.package} {_CLASS}", self.meta_module)

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(lambda: UNetGraph(self.new_meta_module()), dtype_of(precision), device)

    def new_meta_module(self) -> torch.nn.Module:
        """A new UNet on the meta device."""
        with torch.device("meta"):
            made: torch.nn.Module = _class(self.package)(**copy.deepcopy(self.config), **_image_size(self.package))
        made = made.requires_grad_(False).eval()
        for layer in made.modules():
            for name in ("use_checkpoint", "checkpoint"):  # what they save is for training, and no compiler follows
                if getattr(layer, name, None) is True:
                    setattr(layer, name, False)
        return made


_remembered: Remembered[LdmUNet] = Remembered()


def _full_name(package: str) -> str:
    return f"{package}.{_MODULE}.{_CLASS}"


def _class(package: str) -> type:
    found: type = getattr(importlib.import_module(f"{package}.{_MODULE}"), _CLASS)
    return found


def _arguments(package: str, config: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(_class(package)).parameters
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in config.items()
        if name in known and name not in _NOT_COMPUTED
    }


def _image_size(package: str) -> dict[str, int]:
    """An argument that `ldm` demands, and nothing reads."""
    parameter = inspect.signature(_class(package)).parameters.get("image_size")
    return {"image_size": 32} if parameter is not None and parameter.default is inspect.Parameter.empty else {}


def _folder(package: str) -> str:
    file = importlib.import_module(f"{package}.{_MODULE}").__file__ or ""
    return str(Path(file).resolve().parents[3])


def _in_another_process(package: str, folder: str, config: dict[str, Any]) -> LdmUNet:
    if package not in sys.modules:
        sys.path.insert(0, folder)
    return LdmUNet(package, config)
