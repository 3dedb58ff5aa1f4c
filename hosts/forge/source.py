"""A live UNet of the Forge family as a `ModelSource` of the runtime."""

from __future__ import annotations

from typing import Any

import torch

from ...core.dtypes import dtype_of, precision_of
from ...core.errors import UnsupportedModel
from ...core.protocols import BoundWeights, Tensors
from ...core.spec import Precision
from ...engine_cache import digest_tensors
from ..architecture import PREFIX, Remembered, cast_inputs
from ..fp32_reference import fill_while_computing
from .families import family_of
from .unet import ForgeUNet, call
from .weights import Weights, current_weights

_digests: Remembered[str] = Remembered()


class ForgeUNetSource:
    """The UNet of a `UnetPatcher` during one sampling run.

    Copies of weights that an engine needs live as long as this: between runs the host has all of its memory.

    Args:
        patcher: `forge_objects.unet`, loaded on its device for the length of the run.

    Raises:
        UnsupportedModel: engines cannot stand for this model.
    """

    def __init__(self, patcher: Any) -> None:
        family = family_of(patcher)
        if family is None:
            raise UnsupportedModel(f"{type(patcher).__name__} is of no WebUI that Slipstream knows")
        self.patcher = patcher
        self.family = family
        self.unet: torch.nn.Module = patcher.model.diffusion_model
        self.architecture = ForgeUNet.of(family, patcher.model)
        self._applied = family.applied(patcher)
        self._copies: dict[torch.dtype, Weights] = {}

    @property
    def device(self) -> torch.device:
        return torch.device(self.patcher.load_device)

    @property
    def precision(self) -> Precision:
        return precision_of(self.family.dtype(self.patcher.model))

    @property
    def is_patched(self) -> bool:
        """Whether a LoRA changes its weights."""
        return bool(self.family.loras(self.patcher))

    @property
    def is_current(self) -> bool:
        """Whether the loaded weights are still those that this run began with."""
        return self._applied == self.family.applied(self.patcher)

    def weights_digest(self) -> str:
        return _digests.get(self.unet, None, self._digest)

    def bind(self, precision: Precision) -> BoundWeights:
        return BoundWeights({PREFIX + name: tensor for name, tensor in self._current(dtype_of(precision)).items()})

    def eager(self, inputs: Tensors) -> Tensors:
        return {"out": call(self.unet, cast_inputs(inputs, dtype_of(self.precision)))}

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        wide = self.architecture.new_meta_module()
        fill_while_computing(wide, self._current(dtype_of(self.precision)))
        return {"out": call(wide, cast_inputs(inputs, torch.float32))}

    def _digest(self) -> str:
        """Of the weights without LoRA."""
        prefix = "diffusion_model."
        before = self.family.originals(self.patcher)
        named = [*self.unet.named_parameters(), *self.unet.named_buffers()]
        return digest_tensors({name: before.get(prefix + name, tensor).detach() for name, tensor in named})

    def _current(self, dtype: torch.dtype) -> Weights:
        if dtype not in self._copies:
            names = self.architecture.weight_names
            self._copies[dtype] = current_weights(self.family, self.unet, names, dtype, self.device)
        return self._copies[dtype]
