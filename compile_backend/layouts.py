"""How tensors lie in memory: what compiled kernels take for granted, and weights laid out as they want them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.dtypes import dtype_name, dtype_named
from .derived import DerivedWeight

_MANY_CHANNELS = 32


@dataclass(frozen=True)
class TensorLayout:
    """What a compiled kernel takes for granted about one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def __str__(self) -> str:
        return f"{list(self.shape)} {dtype_name(self.dtype)}, strides {list(self.stride)}"

    def to_json(self) -> dict[str, Any]:
        return {"shape": self.shape, "stride": self.stride, "dtype": dtype_name(self.dtype)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorLayout:
        return cls(tuple(data["shape"]), tuple(data["stride"]), dtype_named(data["dtype"]))


def use_channels_last(module: torch.nn.Module) -> None:
    """Lay the weights of a module without numbers out as [N, H, W, C] in memory, in place.

    Tensor cores want convolutions so; weights that come in another layout would be rearranged in every call.
    """
    for parameter in module.parameters():
        if parameter.ndim == 4:
            _, channels, height, width = parameter.shape
            strides = (channels * height * width, 1, width * channels, channels)
            parameter.data = parameter.as_strided(parameter.shape, strides, parameter.storage_offset())


def as_features(tensor: torch.Tensor) -> torch.Tensor:
    """An input as convolutions hand it from one to the next, where it is what one of them gave: features of a network's
    midst, unlike pictures and latents, have many channels."""
    if tensor.ndim == 4 and tensor.shape[1] >= _MANY_CHANNELS:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def laid_out(tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor:
    """`tensor` in the strides that compiled code takes for granted, copied only where that moves a number."""
    if (view := _as_it_lies(tensor, wanted)) is not None:
        return view
    return _empty(tensor.device, wanted).copy_(tensor)


@dataclass(eq=False)
class _Copy:
    """
    Attributes:
        bytes: of the tensor, which are asked for often.
        holders: engines' weights that it stands for.
    """

    tensor: torch.Tensor
    bytes: int
    holders: int = 0


class LaidOutWeights:
    """Copies of weights in another layout than the host's, and what is made of several.

    They are kept between runs, so that they stay where they are; engines of several resolutions share one copy of a
    weight.
    """

    _shared: WeakValueDictionary[tuple[Any, ...], _Copy] = WeakValueDictionary()

    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}

    @property
    def bytes(self) -> int:
        """This engine's share: the shares of all engines are what there is."""
        return sum(copy.bytes // copy.holders for copy in self._copies.values())

    def of(self, name: str, tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor:
        """`tensor` as it is now, in the layout `wanted`."""
        if (view := _as_it_lies(tensor, wanted)) is not None:
            if name in self._copies:
                self._let_go(name)
            return view
        copy = self._copy(name, (tensor,), wanted, tensor.device)
        return copy.copy_(tensor)  # always: a LoRA may have changed the numbers where they lie

    def made(
        self,
        name: str,
        weight: DerivedWeight,
        sources: Sequence[torch.Tensor],
        wanted: TensorLayout,
        device: torch.device,
    ) -> torch.Tensor:
        """What `weight` is made of its sources as they are now."""
        return weight.write(self._copy(name, sources, wanted, device, (weight.form, weight.eight_bits)), sources)

    def _copy(
        self,
        name: str,
        sources: Sequence[torch.Tensor],
        wanted: TensorLayout,
        device: torch.device,
        what: Hashable = None,
    ) -> torch.Tensor:
        """Where a copy is to be written: the same place each time, for as long as the sources lie where they do."""
        place = (what, wanted, device, *map(_place_of, sources))
        copy = self._shared.get(place)
        if self._copies.get(name) is not copy:
            self._let_go(name)  # before its successor needs room
        if copy is None:
            with torch.inference_mode(False):  # copies outlive a host's inference mode
                tensor = _empty(device, wanted)
                copy = self._shared[place] = _Copy(tensor, tensor.nbytes)
        if name not in self._copies:
            self._copies[name] = copy
            copy.holders += 1
        return copy.tensor

    def clear(self) -> None:
        for name in list(self._copies):
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        if (copy := self._copies.pop(name, None)) is not None:
            copy.holders -= 1


def _as_it_lies(tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor | None:
    if tensor.stride() == wanted.stride:
        return tensor
    if 1 not in wanted.shape:
        return None
    if all(size == 1 or a == b for size, a, b in zip(wanted.shape, tensor.stride(), wanted.stride, strict=True)):
        # Strides of axes of size 1 mean nothing, but torch.compile would compile again for others.
        return tensor.as_strided(wanted.shape, wanted.stride)
    return None


def _empty(device: torch.device, wanted: TensorLayout) -> torch.Tensor:
    return torch.empty_strided(wanted.shape, wanted.stride, dtype=wanted.dtype, device=device)


def _place_of(tensor: torch.Tensor) -> Hashable:
    """Equal for a tensor of the same memory; no other storage equals it, even at the same address."""
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
