"""A tiny model whose layers dequantise their weights at each call, as packs do that load GGUF."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.ops
import comfy.sd
import torch

from slipstream.benchmarks.model_files.gguf_file import BLOCK_SIZE, in_q8_0

from . import tiny


class Quantised(torch.Tensor):
    """Bytes that stand for numbers of another shape, as GGUF's type Q8_0 has them.

    Attributes:
        shape: of the numbers.
        tensor_type: has the type's name.
        patches: functions that change the numbers.
    """

    wanted: torch.Size
    tensor_type: Any
    patches: list[Any]

    @classmethod
    def of(cls, weight: torch.Tensor, name: str) -> Quantised:
        return cls._noted(in_q8_0(weight), weight.shape, name)

    @classmethod
    def plain(cls, tensor: torch.Tensor, name: str) -> Quantised:
        """One that holds the numbers themselves."""
        return cls._noted(tensor.clone(), tensor.shape, name)

    @classmethod
    def _noted(cls, stored: torch.Tensor, shape: torch.Size, name: str) -> Quantised:
        found = stored.as_subclass(cls)
        found.wanted, found.tensor_type, found.patches = shape, SimpleNamespace(name=name), []
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
        found.tensor_type = getattr(self, "tensor_type", None)
        return found

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        blocks = self.as_subclass(torch.Tensor).view(len(self), -1, BLOCK_SIZE + 2)
        weight = blocks[:, :, :2].contiguous().view(torch.float16) * blocks[:, :, 2:].contiguous().view(torch.int8)
        weight = weight.flatten(1).to(dtype)
        for patch in self.patches:
            weight = patch(weight)
        return weight


def numbers_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_stored = isinstance(weight, Quantised) and not weight.is_floating_point()
    return weight.dequantised(dtype) if is_stored else weight.as_subclass(torch.Tensor).to(dtype)  # type: ignore[attr-defined]


class GGMLLayer(torch.nn.Module):
    """
    Attributes:
        casts: how often it made its weights.
        takes_bias_dtype: as the method of some packs does not.
    """

    comfy_cast_weights = True
    casts = 0
    takes_bias_dtype = True

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
        if bias_dtype is not None and not self.takes_bias_dtype:
            raise TypeError("got an unexpected keyword argument 'bias_dtype'")
        self.casts += 1
        dtype, device = dtype or input.dtype, device or input.device
        weight, bias = self.weight.to(device), self.bias
        weight = numbers_of(weight, dtype)
        return weight, None if bias is None else bias.to(device, bias_dtype or dtype)

    def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, Quantised):
            return super().forward_comfy_cast_weights(input)  # type: ignore[misc, no-any-return]
        return torch.nn.functional.linear(input, *self.cast_bias_weight(input))


class Operations(comfy.ops.manual_cast):  # type: ignore[misc]
    class Linear(GGMLLayer, comfy.ops.manual_cast.Linear):  # type: ignore[misc]
        pass


def model(kind: str = "Q8_0") -> Any:
    """Return a `ModelPatcher` of SD3 whose blocks' linear layers are stored so.

    Args:
        kind: name that the type goes by; programs know "Q8_0".
    """
    state = tiny.transformer("sd3").model.diffusion_model.state_dict()
    stored = {
        name: Quantised.of(tensor, kind) if _is_stored(name, tensor) else tensor.clone()
        for name, tensor in state.items()
    }
    found = comfy.sd.load_diffusion_model_state_dict(stored, model_options={"custom_operations": Operations})
    assert any(isinstance(tensor, Quantised) for tensor in found.model.diffusion_model.parameters())
    return found


def _is_stored(name: str, tensor: torch.Tensor) -> bool:
    return "joint_blocks" in name and tensor.ndim == 2 and tensor.shape[1] % BLOCK_SIZE == 0


def change(patcher: Any, is_changed: bool = True) -> None:
    """Change the weights of all attentions, as such a pack applies LoRAs, or have them as they were."""
    for name, tensor in patcher.model.diffusion_model.named_parameters():
        if name.endswith("qkv.weight"):
            tensor.patches = [lambda weight: 0.5 * weight] if is_changed else []
