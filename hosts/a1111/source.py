"""AUTOMATIC1111's UNet as a `ModelSource` of the runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...core.dtypes import dtype_of, precision_of
from ...core.errors import UnsupportedModel
from ...core.protocols import BoundWeights, Tensors
from ...core.spec import Precision
from ...engine_cache import digest_tensors
from ..architecture import Remembered, cast_inputs, cast_weights
from ..fp32_reference import fill_while_computing
from .unet import LdmUNet, call

_digests: Remembered[str] = Remembered()


class LdmUNetSource:
    """The UNet of `shared.sd_model` during one call of it.

    Args:
        config: see `LdmUNet.of`.
        device: that the WebUI computes on.

    Raises:
        UnsupportedModel: engines cannot stand for this model, or its weights are elsewhere.
    """

    def __init__(self, unet: torch.nn.Module, config: Callable[[], Mapping[str, Any]], device: torch.device) -> None:
        self.unet = unet
        self.device = device
        self.architecture = LdmUNet.of(unet, config)
        _apply_loras(unet)
        self._weights = {name: tensor.detach() for name, tensor in unet.state_dict(keep_vars=True).items()}
        if any(tensor.device != device for tensor in self._weights.values()):
            raise UnsupportedModel("--lowvram keeps the model's weights in RAM; your model runs without an engine")
        if missing := sorted(self.architecture.weight_names - set(self._weights)):
            raise UnsupportedModel(f"The model holds no weight {missing[0]!r} ({len(missing)} are missing)")

    @property
    def precision(self) -> Precision:
        return precision_of(next(tensor.dtype for tensor in self._weights.values() if tensor.is_floating_point()))

    @property
    def is_patched(self) -> bool:
        """Whether a LoRA changes its weights."""
        return any(getattr(layer, "network_current_names", ()) for layer in self.unet.modules())

    def weights_digest(self) -> str:
        return _digests.get(self.unet, _checkpoint(), self._digest)

    def bind(self, precision: Precision) -> BoundWeights:
        wanted = {name: self._weights[name] for name in self.architecture.weight_names}
        return cast_weights(wanted, dtype_of(precision))

    def eager(self, inputs: Tensors) -> Tensors:
        with plain_calls():
            return {"out": call(self.unet, cast_inputs(inputs, dtype_of(self.precision)))}

    def reference(self, inputs: Tensors) -> Tensors:
        """In fp32 without an fp32 copy of the model: each layer's weights are cast while it computes."""
        wide = self.architecture.new_meta_module()
        fill_while_computing(wide, self._weights)
        with plain_calls():
            return {"out": call(wide, cast_inputs(inputs, torch.float32))}

    def _digest(self) -> str:
        """Of the weights without LoRA, which the WebUI keeps beside each layer that one changed."""
        found = dict(self._weights)
        for name, layer in self.unet.named_modules():
            kept = getattr(layer, "network_weights_backup", None)
            if isinstance(kept, torch.Tensor):
                found[f"{name}.weight"] = kept
        return digest_tensors(found)


def _checkpoint() -> str:
    """That the weights are of: the WebUI loads the next one into the same layers."""
    from modules import shared

    return str(getattr(shared.sd_model, "sd_model_checkpoint", ""))


@contextmanager
def plain_calls() -> Iterator[None]:
    """Meanwhile UNets compute: the WebUI leads each call of one to what is chosen in its setting, which is ours."""
    from modules import sd_unet

    ours, sd_unet.current_unet = sd_unet.current_unet, None
    try:
        yield
    finally:
        sd_unet.current_unet = ours


def _apply_loras(unet: torch.nn.Module) -> None:
    """The WebUI writes a LoRA into a layer when that computes, which with an engine it never does.

    Raises:
        UnsupportedModel: its LoRAs are not written into weights.
    """
    networks: Any = sys.modules.get("networks")
    if networks is None or not hasattr(networks, "network_apply_weights"):
        return
    from modules import shared

    if getattr(shared.opts, "lora_functional", False):
        raise UnsupportedModel(
            "LoRAs are computed beside the model ('use old method'); your model runs without an engine"
        )
    for layer in unet.modules():
        if getattr(layer, "network_layer_name", None) is not None:
            networks.network_apply_weights(layer)
