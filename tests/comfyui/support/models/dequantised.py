"""A tiny model whose layers dequantise their weights at each call, as packs do that load GGUF."""

from __future__ import annotations

from typing import Any

import comfy.ops
import comfy.sd
import torch

from . import tiny


class Quantised(torch.Tensor):
    """Whole numbers that stand for weights of another shape: each row begins with the four bytes of its scale.

    Attributes:
        shape: of the weights.
        patches: functions that change them once they are dequantised.
    """

    wanted: torch.Size
    patches: list[Any]

    @staticmethod
    def of(weight: torch.Tensor) -> Quantised:
        scale = weight.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 127
        rows = torch.cat([scale.view(torch.int8), (weight / scale).round().to(torch.int8)], 1)
        found = rows.as_subclass(Quantised)
        found.wanted, found.patches = weight.shape, []
        return found

    @property
    def shape(self) -> torch.Size:
        return getattr(self, "wanted", None) or self.size()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_notes(super().to(*args, **kwargs))

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_notes(super().clone(*args, **kwargs))

    def detach(self) -> Any:
        return self

    def _with_notes(self, found: Any) -> Any:
        found.wanted, found.patches = self.shape, [*getattr(self, "patches", [])]
        return found

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        rows = self.as_subclass(torch.Tensor)
        weight = (rows[:, 4:].float() * rows[:, :4].contiguous().view(torch.float32)).to(dtype)
        for patch in self.patches:
            weight = patch(weight)
        return weight


class GGMLLayer(torch.nn.Module):
    comfy_cast_weights = True

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state.get(f"{prefix}weight")
        if not isinstance(weight, Quantised):
            super()._load_from_state_dict(state, prefix, *args)
            return
        bias = state.get(f"{prefix}bias")
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.largest = True  # a note to itself

    def cast_bias_weight(
        self, input: Any = None, dtype: Any = None, device: Any = None, bias_dtype: Any = None
    ) -> tuple[Any, Any]:
        dtype, device = dtype or input.dtype, device or input.device
        weight, bias = self.weight.to(device), self.bias
        weight = weight.dequantised(dtype) if isinstance(weight, Quantised) else weight.to(dtype)
        return weight, None if bias is None else bias.to(device, bias_dtype or dtype)

    def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, Quantised):
            return super().forward_comfy_cast_weights(input)  # type: ignore[misc, no-any-return]
        return torch.nn.functional.linear(input, *self.cast_bias_weight(input))


class Operations(comfy.ops.manual_cast):  # type: ignore[misc]
    class Linear(GGMLLayer, comfy.ops.manual_cast.Linear):  # type: ignore[misc]
        pass


def model() -> Any:
    """Return a `ModelPatcher` of SD3 whose blocks' linear layers are stored so."""
    state = tiny.transformer("sd3").model.diffusion_model.state_dict()
    stored = {
        name: Quantised.of(tensor) if "joint_blocks" in name and tensor.ndim == 2 else tensor.clone()
        for name, tensor in state.items()
    }
    found = comfy.sd.load_diffusion_model_state_dict(stored, model_options={"custom_operations": Operations})
    assert any(isinstance(tensor, Quantised) for tensor in found.model.diffusion_model.parameters())
    return found


def with_patch(patcher: Any) -> None:
    """Change the weights of all attentions, as such a pack applies LoRAs."""
    for name, tensor in patcher.model.diffusion_model.named_parameters():
        if name.endswith("qkv.weight"):
            tensor.patches = [lambda weight: 0.5 * weight]
