"""A live diffusers UNet as a `ModelSource` of the runtime."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from ...core.dtypes import dtype_of, precision_of
from ...core.errors import UnsupportedModel
from ...core.protocols import BoundWeights, Tensors
from ...core.spec import Precision
from ...engine_cache import digest_tensors
from ..architecture import cast_inputs, cast_weights
from ..fp32_reference import fill_layer_while_computing
from .fallback_reasons import why_not_these_layers
from .unet import DiffusersUNet, call


class DiffusersUNetSource:
    """A UNet2DConditionModel and the weights that it holds now.

    Raises:
        UnsupportedModel: engines cannot stand for this UNet, e.g. since LoRA layers were added to it.
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.unet = unet
        self.architecture = DiffusersUNet.of(unet)
        if reason := why_not_these_layers(unet, self.architecture.meta_module):
            raise UnsupportedModel(reason)
        self._seen = _identity(unet)
        self._digest: str | None = None

    @property
    def is_current(self) -> bool:
        """Whether the UNet still has the layers and tensors that this source was made from; values are not read."""
        return self._seen == _identity(self.unet)

    @property
    def device(self) -> torch.device:
        return self.unet.device

    @property
    def precision(self) -> Precision:
        return precision_of(self.unet.dtype)

    @property
    def is_patched(self) -> bool:
        """Never: LoRA layers are refused above, and a LoRA that was fused is part of the weights in the digest."""
        return False

    def weights_digest(self) -> str:
        if self._digest is None:
            self._digest = digest_tensors(self._tensors())
        return self._digest

    def bind(self, precision: Precision) -> BoundWeights:
        """The UNet's own parameters; copies only where the engine computes in another dtype."""
        return cast_weights(self._tensors(), dtype_of(precision))

    def eager(self, inputs: Tensors) -> Tensors:
        return call(self.unet, cast_inputs(inputs, self.unet.dtype))

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        return call(_fp32_reference(self.architecture, self.unet), cast_inputs(inputs, torch.float32))

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = [*self.unet.named_parameters(), *self.unet.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}


def _identity(unet: UNet2DConditionModel) -> tuple[Any, ...]:
    layers = tuple(type(layer) for layer in unet.modules())
    tensors = tuple(
        (tensor.data_ptr(), tensor.dtype, tensor.device, 0 if tensor.is_inference() else tensor._version)
        for tensor in [*unet.parameters(), *unet.buffers()]
    )
    return layers, tensors


def _fp32_reference(architecture: DiffusersUNet, unet: UNet2DConditionModel) -> torch.nn.Module:
    """The UNet in fp32, whose layers hold weights only while they compute."""
    wide = architecture.new_meta_module()
    for name, layer in wide.named_modules():
        live = unet.get_submodule(name)
        if live._parameters:
            fill_layer_while_computing(layer, functools.partial(_own_weights, live))
    return wide


def _own_weights(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters(recurse=False))
