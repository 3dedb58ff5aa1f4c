"""How each initializer of a graph is computed from a weight of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from ...core.dtypes import dtype_name, dtype_named
from ...core.eight_bits import FP8, quantised, scale_of_rows

UNIT = {FP8: 2.0**-9, torch.int8: 2.0**-7}
"""The constant scale of 8-bit values in a graph: a power of two, exact in every dtype, with which no value exceeds 1,
so that sums of some ten thousand products do not overflow in half precision."""


class Part(str, Enum):
    """Which part of a weight in eight bits an initializer holds."""

    WEIGHT = "numbers"
    SCALE = "scale"
    """Of each column of the laid out weight, fp32."""


@dataclass(frozen=True)
class WeightSource:
    """How one initializer is computed from a weight of the model.

    Attributes:
        name: in the model's state dict.
        permutation: axes of the weight in the order that the graph wants; None leaves them.
        padded: the shape that zeros at the end of each axis give it at last; None adds none.
        eight_bits: float8_e4m3fn or int8 where the weight is quantised; else None.
        part: which part of a quantised weight.
    """

    name: str
    permutation: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    eight_bits: torch.dtype | None = None
    part: Part = Part.WEIGHT

    def transposed(self, permutation: tuple[int, ...]) -> WeightSource:
        """As the graph wants it after a further transposition. Pad last: a padded weight is not transposed again."""
        assert self.padded is None and self.eight_bits is None
        before = self.permutation or tuple(range(len(permutation)))
        return replace(self, permutation=tuple(before[axis] for axis in permutation))

    def in_eight_bits(self, dtype: torch.dtype, part: Part = Part.WEIGHT) -> WeightSource:
        """One part of it in eight bits."""
        return replace(self, eight_bits=dtype, part=part)

    def laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` as the graph wants it, contiguous; itself where nothing has to be moved."""
        if self.permutation is not None:
            weight = weight.permute(self.permutation)
        if self.eight_bits is not None:
            return _in_eight_bits(weight, self.eight_bits, self.part)
        if self.padded is None or tuple(weight.shape) == self.padded:
            return weight.contiguous()
        room = weight.new_zeros(self.padded)
        room[tuple(map(slice, weight.shape))] = weight
        return room

    def to_json(self) -> dict[str, Any]:
        data = {"name": self.name, "permutation": self.permutation, "padded": self.padded}
        if self.eight_bits is not None:
            data |= {"eight_bits": dtype_name(self.eight_bits), "part": self.part.value}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WeightSource:
        found = cls(data["name"], _axes(data["permutation"]), _axes(data["padded"]))
        if "eight_bits" not in data:
            return found
        return found.in_eight_bits(dtype_named(data["eight_bits"]), Part(data["part"]))


def _in_eight_bits(weight: torch.Tensor, dtype: torch.dtype, part: Part) -> torch.Tensor:
    """Columns of a weight [columns of x, rows of the model's weight], each with a scale of its own."""
    columns = weight.t()
    scale = scale_of_rows(columns, dtype)
    return scale[:, 0] / UNIT[dtype] if part is Part.SCALE else quantised(columns, scale, dtype).t().contiguous()


WeightMap = dict[str, WeightSource]
"""Initializer name -> where it comes from. Initializers that are missing here are constants of the model's code."""


def _axes(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(map(int, values))
