"""Which sizes a block's package takes: each axis is one size, or grows with symbols that the compiler left open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import UnsupportedModel

Size = int | Mapping[str, int]
"""One size; or a sum of symbols, each times a number, and of the number under the empty name."""

_CONSTANT = ""

Polynomial = Mapping[str, float]
"""Symbols that are multiplied, sorted, with a space between them → what they are taken times; the constant likewise
under the empty name."""


@dataclass(frozen=True)
class Sizes:
    """The shapes of a program's inputs.

    Attributes:
        shapes: of each input, axis by axis.
        ranges: symbol → the smallest and the largest size that it may stand for.
        elements: how many elements the largest tensors have that the program computes; none where no axis is open.
    """

    shapes: tuple[tuple[Size, ...], ...]
    ranges: Mapping[str, tuple[int, int]]
    elements: tuple[Polynomial, ...] = ()

    def accept(self, shapes: Sequence[Sequence[int]], ones_too: bool = False) -> bool:
        """Whether inputs of these shapes may be given to the program.

        Args:
            ones_too: an axis that is open from two on may have size one, too. The program does not broadcast it then,
                which the traced code might.
        """
        return self._symbols(shapes, ones_too) is not None

    def takes_others_for_equal(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether axes of one symbol have different sizes in these shapes, of as many axes."""
        found: dict[str, set[int]] = {}
        for wanted, sizes in zip(self.shapes, shapes, strict=False):
            for size, other in zip(wanted, sizes, strict=False):
                if not isinstance(size, int) and [*size.values()] == [1]:
                    found.setdefault(next(iter(size)), set()).add(other)
        return any(len(each) > 1 for each in found.values())

    def most_elements(self, shapes: Sequence[Sequence[int]]) -> float:
        """Of any tensor that the program computes from inputs of these shapes, which it accepts; 0 for one size."""
        known = self._symbols(shapes, ones_too=True) or {}
        return max((_value(polynomial, known) for polynomial in self.elements), default=0)

    def _symbols(self, shapes: Sequence[Sequence[int]], ones_too: bool) -> Mapping[str, int] | None:
        """What each symbol stands for in inputs of these shapes; None where they are not accepted."""
        known: dict[str, int] = {}
        pairs = [*zip(self.shapes, shapes, strict=True)] if len(shapes) == len(self.shapes) else []
        if len(pairs) != len(self.shapes) or any(len(wanted) != len(found) for wanted, found in pairs):
            return None
        axes = [pair for wanted, found in pairs for pair in zip(wanted, found, strict=True)]
        # Those of one symbol say what it stands for; sums are held against that afterwards.
        axes.sort(key=lambda pair: 0 if isinstance(pair[0], int) else len(pair[0]))
        are_right = all(_fits(wanted, found, known) for wanted, found in axes) and all(
            symbol in known and (1 if ones_too and smallest == 2 else smallest) <= known[symbol] <= largest
            for symbol, (smallest, largest) in self.ranges.items()
        )
        return known if are_right else None

    @property
    def are_open(self) -> bool:
        """Whether more than one set of shapes is accepted."""
        return any(not isinstance(size, int) for shape in self.shapes for size in shape)

    def to_json(self) -> dict[str, Any]:
        return {"shapes": self.shapes, "ranges": dict(self.ranges), "elements": [*map(dict, self.elements)]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sizes:
        ranges = {symbol: (int(low), int(high)) for symbol, (low, high) in data["ranges"].items()}
        return cls(tuple(map(tuple, data["shapes"])), ranges, tuple(data["elements"]))

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor]) -> Sizes:
        """Those of a traced program.

        Args:
            inputs: as the program's placeholders have them.

        Raises:
            UnsupportedModel: a size is no sum of symbols; or it is not known how the size of a tensor depends on them.
        """
        shapes = tuple(tuple(_size_of(size) for size in tensor.shape) for tensor in inputs)
        used = {symbol for shape in shapes for size in shape if not isinstance(size, int) for symbol in size}
        ranges = {
            str(symbol): (max(0, _bound(span.lower)), _bound(span.upper))
            for symbol, span in program.range_constraints.items()
        }
        symbols = used - {_CONSTANT}
        elements = _largest_of(program, symbols) if symbols else ()
        return cls(shapes, {symbol: ranges.get(symbol, (2, _LARGEST)) for symbol in symbols}, elements)


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


def _largest_of(program: torch.export.ExportedProgram, symbols: AbstractSet[str]) -> tuple[Polynomial, ...]:
    """Of how many elements its tensors are; those that never have the most left out."""
    made = (node.meta.get("val") for node in program.graph.nodes)
    tensors = (each for found in made for each in (found if isinstance(found, (tuple, list)) else (found,)))
    largest: list[Polynomial] = []
    for polynomial in {_polynomial(each.numel()) for each in tensors if isinstance(each, torch.Tensor)}:
        wanted = dict(polynomial)
        if unknown := {symbol for names in wanted for symbol in names.split()} - symbols:
            raise UnsupportedModel(f"a tensor of the block grows with {min(unknown)}, which none of its inputs tells")
        if not any(_is_no_larger(wanted, other) for other in largest):
            largest = [other for other in largest if not _is_no_larger(other, wanted)] + [wanted]
    return tuple(largest)


def _polynomial(count: Any) -> tuple[tuple[str, float], ...]:
    """A number of elements; where it is rounded down, as behind a stride, it is taken as if it were not."""
    if isinstance(count, int):
        return ((_CONSTANT, float(count)),)
    import sympy
    from torch.utils._sympy.functions import CleanDiv, FloorDiv

    rounded = count.node.expr
    expression = rounded.replace(lambda part: isinstance(part, (FloorDiv, CleanDiv)), _divided)
    if not expression.free_symbols:
        return ((_CONSTANT, float(expression)),)
    try:
        found = sympy.Poly(expression, *sorted(expression.free_symbols, key=str))
    except sympy.PolynomialError as error:
        raise UnsupportedModel(f"a tensor of the block has {rounded} elements, which is no polynomial") from error
    terms = (
        (" ".join(str(symbol) for symbol, power in zip(found.gens, powers, strict=True) for _ in range(power)), times)
        for powers, times in found.terms()
    )
    return tuple(sorted((names, float(times)) for names, times in terms))


def _divided(part: Any) -> Any:
    return part.args[0] / part.args[1]


def _is_no_larger(one: Polynomial, other: Polynomial) -> bool:
    """Whether it is so whatever its symbols stand for."""
    return all(one.get(names, 0) <= other.get(names, 0) for names in {*one, *other})


def _value(polynomial: Polynomial, known: Mapping[str, int]) -> float:
    return sum(times * math.prod(known[symbol] for symbol in names.split()) for names, times in polynomial.items())


def _bound(value: Any) -> int:
    try:
        return min(int(value), _LARGEST)
    except (OverflowError, TypeError, ValueError):  # infinite
        return _LARGEST
