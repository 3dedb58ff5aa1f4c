"""Memory layouts: the strides that compiled kernels assume, and copies of weights that have them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.dtypes import dtype_name, dtype_named
from .rewrites.derived_weights import DerivedWeight

MANY_CHANNELS = 32

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TensorLayout:
    """The shape, strides and dtype that a compiled kernel assumes of one tensor."""

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
    """Lay out the 4-D weights of a placeholder module as channels last ([N, H, W, C] in memory), in place.

    Convolutions on tensor cores need it; weights in another layout would be rearranged in every call.
    """
    for parameter in module.parameters():
        if parameter.ndim == 4:
            _, channels, height, width = parameter.shape
            strides = (channels * height * width, 1, width * channels, channels)
            parameter.data = parameter.as_strided(parameter.shape, strides, parameter.storage_offset())


def as_features(tensor: torch.Tensor) -> torch.Tensor:
    """An input in channels last where it has so many channels that it comes from a convolution, as ControlNet residuals
    do; pictures and latents stay as they are."""
    if tensor.ndim == 4 and tensor.shape[1] >= MANY_CHANNELS:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def laid_out(tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor:
    """`tensor` with the strides that compiled code assumes; a copy only where elements have to move."""
    if (view := _as_it_lies(tensor, wanted)) is not None:
        return view
    return _empty(tensor.device, wanted).copy_(tensor)


@dataclass(eq=False)
class _Copy:
    """A copy of a weight in another layout, shared by engines.

    Attributes:
        bytes: size of the tensor, cached since it is often read.
        place: what it is shared by: how it is computed, its layout, and where its sources lie.
        holders: how many weights of engines share it.
    """

    tensor: torch.Tensor
    bytes: int
    place: tuple[Any, ...]
    holders: int = 0


@dataclass(frozen=True)
class _Held:
    """A copy that one engine uses.

    Attributes:
        sources: names of the host's weights that it is computed from.
        memory: their storages.
        weight: how it is computed; None for a copy of equal value.
    """

    copy: _Copy
    sources: tuple[str, ...]
    memory: tuple[StorageWeakRef, ...]
    weight: DerivedWeight | None

    @property
    def is_plain(self) -> bool:
        """Whether it holds the sources' own values."""
        return self.weight is None or self.weight.is_plain

    def parts(self, weights: Weights) -> Iterator[tuple[torch.Tensor, str]]:
        """The slices of the copy, each with the name of the weight that belongs there."""
        start = 0
        for name in self.sources:
            end = start + len(weights[name])
            yield self.copy.tensor[start:end], name
            start = end


class LaidOutWeights:
    """Copies of the host's weights in another layout, and weights derived from several.

    They are kept between runs, so that their addresses stay valid; engines of several resolutions share one copy of a
    weight. Since a LoRA may change weights in place, `write` fills all copies before each run.
    """

    _shared: WeakValueDictionary[tuple[Any, ...], _Copy] = WeakValueDictionary()

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._pairs: list[tuple[list[torch.Tensor], list[str]]] = []

    @property
    def bytes(self) -> int:
        """This engine's share: the shares of all engines are what there is."""
        return sum(held.copy.bytes // held.copy.holders for held in self._held.values())

    @property
    def are_sources_alive(self) -> bool:
        """Whether the storages that were copied still exist; another one may have the same address by now."""
        return not any(memory.expired() for held in self._held.values() for memory in held.memory)

    def copies(self, name: str) -> bool:
        """Whether a weight is a copy, not the host's own memory."""
        return name in self._held

    def of(self, name: str, tensor: torch.Tensor, wanted: TensorLayout) -> torch.Tensor:
        """`tensor` in the layout `wanted`; a copy is filled by `write`."""
        if (view := _as_it_lies(tensor, wanted)) is not None:
            self._let_go(name)
            return view
        return self._copy(name, (name,), (tensor,), wanted, tensor.device)

    def made(
        self,
        name: str,
        weight: DerivedWeight,
        sources: Sequence[torch.Tensor],
        wanted: TensorLayout,
        device: torch.device,
    ) -> torch.Tensor:
        """The tensor for a derived weight; `write` fills it.

        Raises:
            ValueError: the sources do not fill it.
        """
        into = self._copy(name, weight.sources, sources, wanted, device, weight)
        weight.check(into, sources)
        return into

    def write(self, weights: Weights) -> None:
        """Fill all copies with the current weights, whose addresses have not changed since `of` and `made`."""
        if not self._pairs:
            self._pairs = self._paired(weights)
        with torch.no_grad():
            for parts, names in self._pairs:
                torch._foreach_copy_(parts, [weights[name] for name in names])
            for held in self._held.values():
                if held.weight is not None and not held.is_plain:
                    held.weight.write(held.copy.tensor, [weights[name] for name in held.sources])

    def _paired(self, weights: Weights) -> list[tuple[list[torch.Tensor], list[str]]]:
        """Slices of copies and the names of their weights; those of equal strides are copied together."""
        equal: tuple[list[torch.Tensor], list[str]] = [], []
        others: tuple[list[torch.Tensor], list[str]] = [], []
        with torch.inference_mode(False):
            for held in self._held.values():
                for part, name in held.parts(weights) if held.is_plain else ():
                    source = weights[name]
                    parts, names = equal if part.stride() == source.stride() and part.is_contiguous() else others
                    parts.append(part)
                    names.append(name)
        return [pair for pair in (equal, others) if pair[0]]

    def _copy(
        self,
        name: str,
        names: tuple[str, ...],
        sources: Sequence[torch.Tensor],
        wanted: TensorLayout,
        device: torch.device,
        weight: DerivedWeight | None = None,
    ) -> torch.Tensor:
        """The tensor to copy into: the same one as long as no other engine shares it, so that its address stays when
        the host puts other weights into the place of the old ones, as for a LoRA."""
        what = None if weight is None else (weight.form, weight.eight_bits)
        places = [_place_of(source) for source in sources]
        place = (what, wanted, device, *places)
        copy, own = self._shared.get(place), self._stands_for(name)
        if copy is not None and own is copy:
            return copy.tensor
        if copy is None and own is not None and own.holders == 1 and own.place[1:3] == place[1:3]:
            self._shared.pop(own.place, None)
            own.place, copy = place, own
            self._shared[place] = copy
        self._let_go(name)  # before its successor needs room
        own = None
        if copy is None:
            with torch.inference_mode(False):  # copies outlive a host's inference mode
                tensor = _empty(device, wanted)
                copy = self._shared[place] = _Copy(tensor, tensor.nbytes, place)
        self._held[name] = _Held(copy, names, tuple(memory for memory, *_ in places), weight)
        self._pairs = []
        copy.holders += 1
        return copy.tensor

    def _stands_for(self, name: str) -> _Copy | None:
        held = self._held.get(name)
        return None if held is None else held.copy

    def clear(self) -> None:
        for name in list(self._held):
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        if (held := self._held.pop(name, None)) is not None:
            held.copy.holders -= 1
            self._pairs = []


_PLACE: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.stride,
    *(operator.attrgetter(name) for name in ("shape", "dtype", "device")),
)


def places_of(tensors: Collection[torch.Tensor]) -> Hashable:
    """Equal for tensors of the same addresses and layouts; the storage may have been replaced since."""
    return tuple(tuple(map(look, tensors)) for look in _PLACE)  # hundreds of tensors before each picture


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


def _place_of(tensor: torch.Tensor) -> tuple[StorageWeakRef, Hashable]:
    """Equal for tensors of one storage and layout; another storage differs, even at the same address."""
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
