"""ComfyUI's UNet class (SD1.x, SD2, SDXL and their kin) as an `Architecture`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.skeleton import hollow
from ...core.spec import ModelFingerprint, Precision, Role
from ..architecture import architecture_digest, random_inputs
from .checkout import use_checkout

PREFIX = "model."
"""Of every weight's name in the exported program."""


class UNetGraph(torch.nn.Module):
    """The UNet as exported: plain inputs, plain attention, no patches."""

    def __init__(self, unet: torch.nn.Module) -> None:
        super().__init__()
        self.model = unet

    def forward(
        self,
        x: torch.Tensor,  # [N, C, H, W]
        timesteps: torch.Tensor,  # [N]
        context: torch.Tensor | None = None,  # [N, tokens, dim]
        y: torch.Tensor | None = None,  # [N, dim]
    ) -> tuple[torch.Tensor]:
        options = {"optimized_attention_override": _scaled_dot_product_attention}
        return (self.model(x, timesteps=timesteps, context=context, y=y, transformer_options=options),)


def _scaled_dot_product_attention(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """ComfyUI picks its attention by machine; an engine always gets the one operator that compilers know."""
    from comfy.ldm.modules.attention import attention_pytorch

    return attention_pytorch(*args, **kwargs)


class ComfyUNet:
    """What a ComfyUI UNet computes, apart from the model that was loaded."""

    role: Role = Role.UNET
    outputs: tuple[str, ...] = ("out",)

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config = config
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        import comfy.ops

        checkout = Path(comfy.ops.__file__).resolve().parents[1]
        return _in_another_process, (str(checkout), self.config, self._name)

    @classmethod
    def of(cls, model: Any) -> ComfyUNet:
        """The architecture of a `comfy.model_base.BaseModel`.

        Raises:
            UnsupportedModel: it is not a plain UNet of ComfyUI.
        """
        from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

        found = type(getattr(model, "diffusion_model", None))
        name = type(model.model_config).__name__
        if found is not UNetModel:
            raise UnsupportedModel(f"{name} models ({found.__name__}) have no engines yet; the plain model is used")
        # Where and in which dtype the host holds its weights is no part of what the model computes.
        outside = ("dtype", "device", "disable_unet_model_creation")
        config = {key: value for key, value in model.model_config.unet_config.items() if key not in outside}
        return cls(config, name)

    @functools.cached_property
    def fingerprint(self) -> ModelFingerprint:
        digest = architecture_digest(self._build("meta"), self.config)
        return ModelFingerprint(architecture=digest, architecture_name=self._name)

    @functools.cached_property
    def weight_names(self) -> frozenset[str]:
        """Without `PREFIX`."""
        return frozenset(self._build("meta").state_dict())

    def skeleton(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return hollow(lambda: UNetGraph(self._build("meta")), dtype_of(precision), device)

    def caster(self) -> torch.nn.Module:
        """The UNet with layers that cast whatever weights they are given to their input's dtype; has no weights."""
        import comfy.ops

        return self._build("meta", comfy.ops.manual_cast)

    random_inputs = staticmethod(random_inputs)

    def _build(self, device: str, operations: Any = None) -> torch.nn.Module:
        import comfy.ops
        from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

        module = UNetModel(
            **self.config,
            dtype=torch.float32,
            device=device,
            operations=operations or comfy.ops.disable_weight_init,
        )
        return module.requires_grad_(False).eval()


def _in_another_process(checkout: str, config: dict[str, Any], name: str) -> ComfyUNet:
    """A `ComfyUNet` in the build process, which has yet to find ComfyUI's code."""
    if "comfy" not in sys.modules:
        use_checkout(checkout)
        from comfy.cli_args import args

        args.cpu = True  # only its layers are needed: ComfyUI itself leaves the GPU alone
    return ComfyUNet(config, name)
