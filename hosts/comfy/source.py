"""A live ComfyUI model in the words of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.dtypes import dtype_of, precision_of
from ...core.protocols import Tensors
from ...core.spec import Precision
from ...engine_cache import WeightsMemo
from ..architecture import cast_inputs
from .checkpoint import unet_digest
from .unet import PREFIX, ComfyUNet
from .weights import current_weights


class ComfyUNetSource:
    """The UNet of a `ModelPatcher` during one sampling run.

    Args:
        patcher: loaded on its device for the length of the run.
        memo: remembers the digests of checkpoint files between starts.
    """

    def __init__(self, patcher: Any, memo: WeightsMemo | None = None) -> None:
        self._patcher = patcher
        self._memo = memo
        self.unet: torch.nn.Module = patcher.model.diffusion_model
        self.architecture = ComfyUNet.of(patcher.model)
        self._digest: str | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self._patcher.load_device)

    @property
    def precision(self) -> Precision:
        model = self._patcher.model
        return precision_of(model.manual_cast_dtype or model.get_dtype())

    def weights_digest(self) -> str:
        if self._digest is None:
            self._digest = unet_digest(self._patcher, self._memo)
        return self._digest

    def weights(self, precision: Precision) -> Mapping[str, torch.Tensor]:
        names = self.architecture.weight_names
        found = current_weights(self.unet, names, dtype_of(precision), self.device)
        return {PREFIX + name: tensor for name, tensor in found.items()}

    def eager(self, inputs: Tensors) -> Tensors:
        return {"out": self.unet(**cast_inputs(inputs, dtype_of(self.precision)), transformer_options={})}

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        names = self.architecture.weight_names
        weights = current_weights(self.unet, names, dtype_of(self.precision), self.device)
        wide = cast_inputs(inputs, torch.float32)
        out = torch.func.functional_call(self.architecture.caster(), weights, (), {**wide, "transformer_options": {}})
        return {"out": out}
