"""Weights that compiled code reads and the host does not have, computed from the host's at every update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ...core.dtypes import dtype_name, dtype_named
from ...core.eight_bits import FP8, quantised, scale_of_rows


class Form(str, Enum):
    """How a weight is computed from the host's."""

    JOINED = "joined"
    """Concatenated: [rows of all, columns]."""
    QUANTISED = "quantised"
    """Concatenated, in eight bits, each row divided by its scale."""
    SCALE = "scale"
    """The scale of each row, fp32 [rows, 1]."""
    ONE = "one"
    """The constant 1, fp32 []: for operators that need a scale where there is none."""


@dataclass(frozen=True)
class DerivedWeight:
    """A weight that is computed from the host's.

    Attributes:
        sources: names of the host's weights, [rows, columns] or, of biases, [rows].
        eight_bits: the dtype of a quantised weight, float8_e4m3fn or int8; `SCALE` is the scale for it.
    """

    sources: tuple[str, ...]
    form: Form = Form.JOINED
    eight_bits: torch.dtype = FP8

    @property
    def is_plain(self) -> bool:
        """Whether it is the concatenation of the sources' own values."""
        return self.form is Form.JOINED

    def write(self, into: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fill `into` with what the sources are now; returns it.

        Raises:
            ValueError: the sources do not fill it.
        """
        self.check(into, sources)
        if self.form is Form.ONE:
            return into.fill_(1)
        if self.form is Form.JOINED:
            return torch.cat(tuple(sources), out=into)
        start = 0
        for source in sources:
            self._write(into[start : start + len(source)], source)
            start += len(source)
        return into

    def check(self, into: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Check shapes and dtypes before `write`.

        Raises:
            ValueError: the sources do not fill `into`.
        """
        if self.form is Form.ONE:
            return
        columns = sources[0].shape[1:] if self.form is Form.SCALE else into.shape[1:]
        for name, source in zip(self.sources, sources, strict=True):
            is_right = source.dtype == into.dtype if self.form is Form.JOINED else source.is_floating_point()
            if not is_right or source.shape[1:] != columns:
                raise ValueError(
                    f"{name!r} is {list(source.shape)} {dtype_name(source.dtype)}, which the engine cannot use"
                )
        if sum(map(len, sources)) != len(into):
            raise ValueError(f"{self.sources[0]!r} and {len(sources) - 1} more do not have {len(into)} rows together")

    def _write(self, into: torch.Tensor, source: torch.Tensor) -> None:
        scale = scale_of_rows(source, self.eight_bits)
        into.copy_(scale if self.form is Form.SCALE else quantised(source, scale, self.eight_bits))

    def to_json(self) -> dict[str, Any]:
        return {"sources": self.sources, "form": self.form.value, "eight_bits": dtype_name(self.eight_bits)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DerivedWeight:
        return cls(tuple(data["sources"]), Form(data["form"]), dtype_named(data["eight_bits"]))
