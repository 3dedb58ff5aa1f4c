"""Which weight of the model each initializer of a graph is, and how it has to be laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class WeightSource:
    """How one initializer comes of a weight of the model.

    Attributes:
        name: in the model's state dict.
        permutation: axes of the weight in the order that the graph wants; None leaves them.
        padded: the shape that zeros at the end of each axis give it at last; None adds none.
    """

    name: str
    permutation: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None

    def transposed(self, permutation: tuple[int, ...]) -> WeightSource:
        """As the graph wants it after a further transposition. Pad last: a padded weight is not transposed again."""
        assert self.padded is None
        before = self.permutation or tuple(range(len(permutation)))
        return replace(self, permutation=tuple(before[axis] for axis in permutation))

    def laid_out(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` as the graph wants it, contiguous; itself where nothing has to be moved."""
        if self.permutation is not None:
            weight = weight.permute(self.permutation)
        if self.padded is None or tuple(weight.shape) == self.padded:
            return weight.contiguous()
        room = weight.new_zeros(self.padded)
        room[tuple(map(slice, weight.shape))] = weight
        return room

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "permutation": self.permutation, "padded": self.padded}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WeightSource:
        return cls(data["name"], _axes(data["permutation"]), _axes(data["padded"]))


WeightMap = dict[str, WeightSource]
"""Initializer name -> where it comes from. Initializers that are missing here are constants of the model's code."""


def _axes(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(map(int, values))
