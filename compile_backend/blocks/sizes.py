"""Which sizes a block's package takes: each axis is one size, or grows with symbols that the compiler left open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import UnsupportedModel

Size = int | Mapping[str, int]
"""One size; or a sum of symbols, each times a number, and of the number under the empty name."""

_CONSTANT = ""


@dataclass(frozen=True)
class Sizes:
    """The shapes of a program's inputs.

    Attributes:
        shapes: of each input, axis by axis.
        ranges: symbol → the smallest and the largest size that it may stand for.
    """

    shapes: tuple[tuple[Size, ...], ...]
    ranges: Mapping[str, tuple[int, int]]

    def accept(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether inputs of these shapes may be given to the program."""
        known: dict[str, int] = {}
        pairs = [*zip(self.shapes, shapes, strict=True)] if len(shapes) == len(self.shapes) else []
        if len(pairs) != len(self.shapes) or any(len(wanted) != len(found) for wanted, found in pairs):
            return False
        axes = [pair for wanted, found in pairs for pair in zip(wanted, found, strict=True)]
        # Those of one symbol say what it stands for; sums are held against that afterwards.
        axes.sort(key=lambda pair: 0 if isinstance(pair[0], int) else len(pair[0]))
        return all(_fits(wanted, found, known) for wanted, found in axes) and all(
            symbol in known and smallest <= known[symbol] <= largest
            for symbol, (smallest, largest) in self.ranges.items()
        )

    def tokens(self, shapes: Sequence[Sequence[int]]) -> int:
        """The most tokens, or pixels, of all samples together that any input of these shapes has: what its samples and
        open axes hold. An axis as long as another one, as in a mask of tokens by tokens, names the same tokens again.
        """
        return max((self._tokens(*pair) for pair in zip(self.shapes, shapes, strict=True)), default=1)

    @staticmethod
    def _tokens(wanted: tuple[Size, ...], found: Sequence[int]) -> int:
        axes = [(size, length) for size, length in zip(wanted, found, strict=True) if not isinstance(size, int)]
        if not axes:
            return 1
        samples = found[0] if isinstance(wanted[0], int) else 1
        return samples * math.prod({tuple(size.items()): length for size, length in axes}.values())

    @property
    def are_open(self) -> bool:
        """Whether more than one set of shapes is accepted."""
        return any(not isinstance(size, int) for shape in self.shapes for size in shape)

    def to_json(self) -> dict[str, Any]:
        return {"shapes": self.shapes, "ranges": dict(self.ranges)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sizes:
        ranges = {symbol: (int(low), int(high)) for symbol, (low, high) in data["ranges"].items()}
        return cls(tuple(map(tuple, data["shapes"])), ranges)

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]) -> Sizes:
        """Those of a traced program.

        Args:
            inputs: as the program's placeholders have them.

        Raises:
            UnsupportedModel: a size is no sum of symbols.
        """
        shapes = tuple(tuple(_size_of(size) for size in tensor.shape) for tensor in inputs)
        used = {symbol for shape in shapes for size in shape if not isinstance(size, int) for symbol in size}
        ranges = {
            str(symbol): (max(0, _bound(span.lower)), _bound(span.upper))
            for symbol, span in program.range_constraints.items()
        }
        return cls(shapes, {symbol: ranges.get(symbol, (2, _LARGEST)) for symbol in used - {_CONSTANT}})


_LARGEST = (1 << 31) - 1


def _fits(wanted: Size, found: int, known: dict[str, int]) -> bool:
    if isinstance(wanted, int):
        return wanted == found
    unknown = [symbol for symbol in wanted if symbol != _CONSTANT and symbol not in known]
    rest = found - wanted.get(_CONSTANT, 0)
    rest -= sum(times * known[symbol] for symbol, times in wanted.items() if symbol in known)
    if not unknown:
        return rest == 0
    if len(unknown) > 1 or rest % wanted[unknown[0]]:
        return False
    known[unknown[0]] = rest // wanted[unknown[0]]
    return True


def _size_of(size: Any) -> Size:
    if isinstance(size, int):
        return size
    import sympy

    expression = sympy.expand(size.node.expr)
    if expression.is_Integer:
        return int(expression)
    found: dict[str, int] = {}
    for term, times in expression.as_coefficients_dict().items():
        if not (times.is_Integer and (term.is_Symbol or term == 1)):
            raise UnsupportedModel(f"a size of the block is {expression}, which is no sum of sizes")
        found[_CONSTANT if term == 1 else str(term)] = int(times)
    return found


def _bound(value: Any) -> int:
    try:
        return min(int(value), _LARGEST)
    except (OverflowError, TypeError, ValueError):  # infinite
        return _LARGEST
