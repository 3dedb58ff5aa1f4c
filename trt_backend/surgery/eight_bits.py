"""Large linear layers in eight bits (Q/DQ), for TensorRT 10.9 and newer.

TensorRT needs constant scales, which usually takes calibration with pictures of each checkpoint. Here each row is
divided by its largest magnitude before it is quantised, so that one constant scale fits every model, as in torchao's
dynamic recipes and in compiled engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.eight_bits import FP8, LARGEST, LEAST_SCALE, gains
from .graph import Dim, Operation, element_type, lay_out, named_weight
from .weight_map import UNIT, Part

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

Sizes = Mapping[str, Sequence[Dim]]
"""Tensor name -> its sizes at the shapes that an engine is tuned for, as far as they are known."""

_FLOAT, _HALF, _BF16, _INT8, _FP8, _BOOL = 1, 10, 16, 3, 17, 9
"""ONNX's ids of dtypes."""


def quantise_products(operation: Operation, eight_bits: torch.dtype, sizes: Sizes) -> int:
    """Products of features with a weight that is read nowhere else become products in eight bits.

    Args:
        eight_bits: float8_e4m3fn or int8.

    Returns:
        How many did.
    """
    quantiser = _Quantiser(operation, eight_bits)
    wanted = [node for node in operation.nodes("MatMul") if _gains(operation, node, sizes)]
    for node in wanted:
        quantiser.quantise(node)
    return len(wanted)


def _gains(operation: Operation, node: gs.Node, sizes: Sizes) -> bool:
    x, weight = node.inputs
    if not operation.is_weight(weight) or len(weight.shape) != 2 or len(weight.outputs) != 1:
        return False
    if element_type(x) not in (_FLOAT, _HALF, _BF16) or x.shape is None or node.outputs[0].shape is None:
        return False
    rows = [size for size in sizes.get(x.name, ("unknown",))[:-1] if isinstance(size, int)]
    return len(rows) == len(x.shape) - 1 and gains(prod(rows), *weight.shape)


class _Quantiser:
    """Takes products of one graph, one after the other; what several of them read is quantised once."""

    def __init__(self, operation: Operation, eight_bits: torch.dtype) -> None:
        self._operation = operation
        self._dtype, self._kind = eight_bits, _FP8 if eight_bits == FP8 else _INT8
        self._unit, self._largest = UNIT[eight_bits], LARGEST[eight_bits]
        self._known: dict[str, tuple[gs.Tensor, gs.Tensor]] = {}
        self._scalars: dict[tuple[float, int], gs.Tensor] = {}
        self._last_axis = operation.constant("last_axis", np.array([-1], np.int64))
        self._before: gs.Node | None = None

    def quantise(self, node: gs.Node) -> None:
        """x W as ((x / s) (W / t)) s t, with the largest number of each row for s, and of each of W's columns for t."""
        self._before = node
        x, weight = node.inputs
        if x.name not in self._known:
            self._known[x.name] = self._rows_in_eight_bits(x)
        small, by = self._known[x.name]
        scale = self._weight_in_eight_bits(weight)
        kind, shape = _kind(x), node.outputs[0].shape
        product = self._node("MatMul", kind, shape, small, self._dequantised(weight, kind))
        scaled = self._node("Mul", _FLOAT, shape, self._cast(product, _FLOAT), by)
        if kind == _FLOAT:
            self._operation.replace(node, "Mul", [scaled, scale])
        else:
            self._operation.replace(node, "Cast", [self._node("Mul", _FLOAT, shape, scaled, scale)], to=kind)

    def _weight_in_eight_bits(self, weight: gs.Constant) -> gs.Tensor:
        """Returns the scale of each of its columns, a weight as well."""
        weights, source = self._operation.weights, self._operation.weights[weight.name]
        scale = named_weight(self._operation, f"{weight.name}_scale", weight, weight.shape[1:], _FLOAT)
        weights[scale.name] = source.in_eight_bits(self._dtype, Part.SCALE)
        weights[weight.name] = source.in_eight_bits(self._dtype)
        lay_out(weight, weight.shape, self._kind)
        return scale

    def _rows_in_eight_bits(self, x: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor]:
        """x [..., columns] rounded to eight bits, none larger than 1, and by what it has to be multiplied, [..., 1]."""
        kind, shape, each = _kind(x), x.shape, [*x.shape[:-1], 1]
        largest = self._node("ReduceMax", kind, each, self._size(x), self._last_axis)
        of_largest = self._scalar(1 / (self._largest * self._unit), _FLOAT)
        by = self._node("Mul", _FLOAT, each, self._cast(largest, _FLOAT), of_largest)
        by = self._node("Max", _FLOAT, each, by, self._scalar(LEAST_SCALE / self._unit, _FLOAT))
        # In fp32 up to here: rounding to half precision first would round twice.
        divided = self._node("Div", _FLOAT, shape, self._cast(x, _FLOAT), by)
        small = self._node("QuantizeLinear", self._kind, shape, divided, *self._unit_and_zero(_FLOAT))
        return self._dequantised(small, kind), by

    def _size(self, x: gs.Tensor) -> gs.Tensor:
        """|x|, with infinity for NaN, which ReduceMax would ignore and rounding would hide."""
        kind = _kind(x)
        is_none = self._node("IsNaN", _BOOL, x.shape, x)
        return self._node("Where", kind, x.shape, is_none, self._scalar(inf, kind), self._node("Abs", kind, x.shape, x))

    def _dequantised(self, small: gs.Tensor, kind: int) -> gs.Tensor:
        """The values of a tensor in eight bits, in the dtype `kind`."""
        return self._node("DequantizeLinear", kind, small.shape, small, *self._unit_and_zero(kind))

    def _cast(self, x: gs.Tensor, kind: int) -> gs.Tensor:
        return x if _kind(x) == kind else self._node("Cast", kind, x.shape, x, to=kind)

    def _unit_and_zero(self, kind: int) -> tuple[gs.Tensor, gs.Tensor]:
        return self._scalar(self._unit, kind), self._scalar(0, self._kind)

    def _scalar(self, value: float, kind: int) -> gs.Tensor:
        if (value, kind) not in self._scalars:
            self._scalars[value, kind] = self._operation.number("number", value, kind)
        return self._scalars[value, kind]

    def _node(self, op: str, kind: int, shape: Sequence[Any], *inputs: gs.Tensor, **attributes: Any) -> gs.Tensor:
        """Insert a node; returns its output.

        Args:
            kind, shape: of what it gives.
        """
        import onnx_graphsurgeon as gs

        made = gs.Variable(self._operation.fresh(f"eight_bits_{op}"), kind, list(shape))
        self._operation.add(op, list(inputs), [made], before=self._before, **attributes)
        return made


def _kind(x: gs.Tensor) -> int:
    found = element_type(x)
    assert found is not None
    return found
