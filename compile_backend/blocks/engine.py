"""A loaded package of a kind of block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...core.errors import UnsupportedModel
from .program import BlockSignature, as_laid_out

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

Inputs = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape and dtype of each input."""

Ones = frozenset[tuple[int, int]]
"""Axes of size one: the number of the input, and the axis."""

_INDEX_LIMIT = 1 << 31


def ones_of(inputs: Inputs) -> Ones:
    """Return which axes of the inputs have size one."""
    shapes = (shape for shape, _ in inputs)
    return frozenset((number, axis) for number, shape in enumerate(shapes) for axis, n in enumerate(shape) if n == 1)


class BlockEngine:
    """Computes any block of its kind; it holds no weights.

    Attributes:
        weights: name, shape and dtype of those that a call hands over, in their order.
    """

    def __init__(self, signature: BlockSignature, run: Run) -> None:
        self._signature = signature
        self._run = run
        self._lock = threading.RLock()
        self._is_called = False
        self._accepted: dict[tuple[Inputs, bool], bool] = {}
        self.weights = signature.weights

    def accepts(self, inputs: Inputs, ones_too: bool = False) -> bool:
        """Whether inputs of these shapes and dtypes may be given to it.

        Args:
            ones_too: see `Sizes.accept`; whether the block takes such inputs alike, the caller has to compare.
        """
        known = self._accepted.get((inputs, ones_too))
        if known is None:
            shapes = [shape for shape, _ in inputs]
            known = tuple(dtype for _, dtype in inputs) == self._signature.dtypes
            known = known and self._signature.sizes.accept(shapes, ones_too) and self._has_short_indices(shapes)
            self._accepted[inputs, ones_too] = known
        return known

    def takes_others_for_equal(self, inputs: Inputs) -> bool:
        """Whether sizes are to be equal in its inputs that are not in these."""
        return self._signature.sizes.takes_others_for_equal([shape for shape, _ in inputs])

    def _has_short_indices(self, shapes: Sequence[torch.Size]) -> bool:
        """Whether what it computes can be indexed in 32 bits, as kernels for open sizes do."""
        return self._signature.sizes.most_elements(shapes) < _INDEX_LIMIT

    def __call__(self, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Any:
        """What the block returns; its tensors are fresh, but for inputs that it hands on.

        Raises:
            UnsupportedModel: it is called by what computes its own attention.
        """
        return self.returned(self.compute(inputs, weights), inputs)

    def compute(self, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The fresh tensors among what the block returns, in their order.

        Raises:
            UnsupportedModel: it is called by what computes its own attention.
        """
        given = [*map(as_laid_out, inputs), *weights]
        with self._lock:  # the package knows one caller at a time
            if self._is_called:
                raise UnsupportedModel("the block is called in the midst of its own attention")
            self._is_called = True
            try:
                return self._run(given)
            finally:
                self._is_called = False

    def returned(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        """What the block returns.

        Args:
            results: of `compute`, for these inputs.
        """
        if self._signature.outputs is None:
            return results[0]
        left = iter(results)
        returned = [_returned(each, inputs, left) for each in self._signature.outputs]
        return returned if self._signature.is_list else tuple(returned)


def _returned(output: bool | int, inputs: Sequence[torch.Tensor], left: Iterator[torch.Tensor]) -> torch.Tensor | None:
    """One entry of what a block returns, see `BlockSignature.outputs`."""
    if isinstance(output, bool):
        return next(left) if output else None
    return inputs[output]
