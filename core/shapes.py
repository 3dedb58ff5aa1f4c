"""Shapes an engine is built for: a range per axis, a profile per set of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

UNET_AXES: Mapping[str, tuple[str | None, ...]] = {
    "x": ("batch", None, "height", "width"),
    "timesteps": ("batch",),
    "context": ("batch", "tokens", None),
    "y": ("batch", None),
}
"""The meaning of each axis of a UNet's inputs; None for an axis whose size never varies."""


@dataclass(frozen=True)
class ShapeRange:
    """Sizes one axis may take; `opt` is the size that the engine is tuned for. Static is min = max."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 < self.min <= self.opt <= self.max:
            raise ValueError(f"A shape range needs 0 < min <= opt <= max, got {self.min}, {self.opt}, {self.max}")

    @classmethod
    def exactly(cls, size: int) -> ShapeRange:
        return cls(size, size, size)

    @property
    def is_static(self) -> bool:
        return self.min == self.max

    def accepts(self, size: int) -> bool:
        return self.min <= size <= self.max

    def __str__(self) -> str:
        return str(self.opt) if self.is_static else f"{self.min}..{self.max}"


@dataclass(frozen=True)
class ShapeProfile:
    """Input name -> one `ShapeRange` per axis."""

    inputs: Mapping[str, tuple[ShapeRange, ...]]

    def __post_init__(self) -> None:
        ordered = {name: tuple(self.inputs[name]) for name in sorted(self.inputs)}
        object.__setattr__(self, "inputs", MappingProxyType(ordered))

    def __hash__(self) -> int:
        return hash(tuple(self.inputs.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self.inputs),)  # a mappingproxy does not pickle

    @classmethod
    def static(cls, shapes: Shapes) -> ShapeProfile:
        return cls({name: tuple(map(ShapeRange.exactly, shape)) for name, shape in shapes.items()})

    @property
    def is_static(self) -> bool:
        return all(axis.is_static for axes in self.inputs.values() for axis in axes)

    @property
    def opt(self) -> dict[str, Shape]:
        """The shapes that the engine is tuned for."""
        return {name: tuple(axis.opt for axis in axes) for name, axes in self.inputs.items()}

    def corners(self) -> list[dict[str, Shape]]:
        """The smallest, tuned and largest shapes, each once."""
        picks = [
            {name: tuple(getattr(axis, end) for axis in axes) for name, axes in self.inputs.items()}
            for end in ("opt", "min", "max")
        ]
        return [pick for index, pick in enumerate(picks) if pick not in picks[:index]]

    def why_not(self, shapes: Shapes) -> str | None:
        """The first reason why `shapes` do not fit, in words; None when they do."""
        if set(shapes) != set(self.inputs):
            return f"inputs are {sorted(shapes)}, the engine takes {list(self.inputs)}"
        for name, axes in self.inputs.items():
            shape = shapes[name]
            if len(shape) != len(axes):
                return f"{name} has {len(shape)} axes, the engine takes {len(axes)}"
            if not all(axis.accepts(size) for axis, size in zip(axes, shape, strict=True)):
                return f"{name} is {_times(shape)}, the engine takes {_times(axes)}"
        return None

    def accepts(self, shapes: Shapes) -> bool:
        return self.why_not(shapes) is None

    def distance(self, shapes: Shapes) -> float:
        """How far `shapes` lie from the tuned ones: the sum over axes of |size / opt - 1|; infinite if not accepted."""
        if not self.accepts(shapes):
            return float("inf")
        return sum(
            abs(size / axis.opt - 1.0)
            for name, axes in self.inputs.items()
            for axis, size in zip(axes, shapes[name], strict=True)
        )

    def to_json(self) -> dict[str, list[list[int]]]:
        return {name: [[axis.min, axis.opt, axis.max] for axis in axes] for name, axes in self.inputs.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShapeProfile:
        return cls({name: tuple(ShapeRange(*map(int, axis)) for axis in axes) for name, axes in data.items()})

    @classmethod
    def from_factors(cls, data: Mapping[str, Any]) -> ShapeProfile:
        """Read a profile from the factors of an `EngineKey`."""
        return cls({name: tuple(ShapeRange(**axis) for axis in axes) for name, axes in data["inputs"].items()})

    def __str__(self) -> str:
        return ", ".join(f"{name} {_times(axes)}" for name, axes in self.inputs.items())


def profile_for(profiles: Sequence[ShapeProfile], shapes: Shapes) -> int | None:
    """The index of the profile that is tuned nearest to `shapes`; None where no profile accepts them."""
    distances = [profile.distance(shapes) for profile in profiles]
    nearest = min(distances, default=math.inf)
    return distances.index(nearest) if math.isfinite(nearest) else None


def _times(sizes: tuple[Any, ...]) -> str:
    return "×".join(map(str, sizes)) or "scalar"
