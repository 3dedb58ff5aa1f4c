"""Large linear layers in eight bits (Q/DQ), for TensorRT 10.9 and newer.

TensorRT wants the scale of what it quantises as a constant, which usually takes calibration with pictures of each
checkpoint. Here the numbers of a row are divided by the row's largest before they reach it, so that one constant fits
every model: the way of torchao's dynamic recipes, and of compiled engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.eight_bits import FP8, LARGEST, LEAST_SCALE, gains
from ..weight_map import UNIT, Part
from .graph import Operation, dims, element_type, lay_out, named_weight

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

_FLOAT, _HALF, _BF16, _INT8, _FP8, _BOOL = 1, 10, 16, 3, 17, 9
"""As ONNX numbers dtypes."""

Known = dict[str, "tuple[gs.Tensor, gs.Tensor]"]
"""What was quantised already, by name, since several products may read it."""


def quantise_products(operation: Operation, eight_bits: torch.dtype) -> int:
    """Products of features with a weight that is read nowhere else become products of numbers in eight bits.

    Args:
        eight_bits: float8_e4m3fn or int8.

    Returns:
        How many did.
    """
    known: Known = {}
    wanted = [node for node in operation.nodes("MatMul") if _gains(operation, node)]
    for node in wanted:
        _quantise(operation, node, eight_bits, known)
    return len(wanted)


def _gains(operation: Operation, node: gs.Node) -> bool:
    x, weight = node.inputs
    shape = dims(x)
    if not operation.is_weight(weight) or len(weight.shape) != 2 or len(weight.outputs) != 1 or not shape:
        return False
    if element_type(x) not in (_FLOAT, _HALF, _BF16) or node.outputs[0].shape is None:
        return False
    sizes = [size for size in shape[:-1] if isinstance(size, int)]
    samples = prod(sizes) if len(sizes) == len(shape) - 1 else None
    if samples is None and any(given is x for given in operation.graph.inputs):
        return False  # text as the host gives it: a few samples, however many
    # Already padded weights would have to be padded again; those whose sizes gain never are.
    return operation.weights[weight.name].padded is None and gains(samples, *weight.shape)


def _quantise(operation: Operation, node: gs.Node, eight_bits: torch.dtype, known: Known) -> None:
    """x W as ((x / s) (W / t)) s t, with the largest number of each row for s, and of each of W's columns for t."""
    x, weight = node.inputs
    make = _Maker(operation, node, eight_bits)
    if x.name not in known:
        known[x.name] = make.rows_in_eight_bits(x)
    small, by = known[x.name]
    scale = named_weight(operation, f"{weight.name}_scale", weight, weight.shape[1:], np.float32)
    source = operation.weights[weight.name]
    operation.weights[scale.name] = source.in_eight_bits(eight_bits, Part.SCALE)
    operation.weights[weight.name] = source.in_eight_bits(eight_bits)
    lay_out(weight, weight.shape, make.eight_bits)
    kind, shape = _kind(x), node.outputs[0].shape
    product = make.node("MatMul", kind, shape, small, make.dequantised(weight, kind))
    scaled = make.node("Mul", _FLOAT, shape, make.cast(product, _FLOAT), by)
    operation.replace(node, "Cast", [make.node("Mul", _FLOAT, shape, scaled, scale)], to=kind)


class _Maker:
    """Puts nodes in front of another."""

    def __init__(self, operation: Operation, before: gs.Node, eight_bits: torch.dtype) -> None:
        self._operation = operation
        self._before = before
        self._unit, self._largest = UNIT[eight_bits], LARGEST[eight_bits]
        self.eight_bits = _FP8 if eight_bits == FP8 else _INT8

    def rows_in_eight_bits(self, x: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor]:
        """x [..., columns] rounded to eight bits, none larger than 1, and by what it has to be multiplied, [..., 1]."""
        kind, shape, each = _kind(x), x.shape, [*x.shape[:-1], 1]
        axes = self._operation.constant("last_axis", np.array([-1], np.int64))
        largest = self.node("ReduceMax", kind, each, self._size(x), axes)
        by = self.node("Mul", _FLOAT, each, self.cast(largest, _FLOAT), self._number(1 / (self._largest * self._unit)))
        by = self.node("Max", _FLOAT, each, by, self._number(LEAST_SCALE / self._unit))
        divided = self.cast(self.node("Div", _FLOAT, shape, self.cast(x, _FLOAT), by), kind)
        small = self.node("QuantizeLinear", self.eight_bits, shape, divided, *self._unit_and_zero(kind))
        return self.dequantised(small, kind), by

    def _size(self, x: gs.Tensor) -> gs.Tensor:
        """|x|, and infinity for what is no number: a maximum overlooks that, and rounded it would look like one."""
        kind = _kind(x)
        is_none, infinity = self.node("IsNaN", _BOOL, x.shape, x), self._operation.number("infinity", inf, kind)
        return self.node("Where", kind, x.shape, is_none, infinity, self.node("Abs", kind, x.shape, x))

    def dequantised(self, small: gs.Tensor, kind: int) -> gs.Tensor:
        """What numbers in eight bits count."""
        return self.node("DequantizeLinear", kind, small.shape, small, *self._unit_and_zero(kind))

    def cast(self, x: gs.Tensor, kind: int) -> gs.Tensor:
        return x if _kind(x) == kind else self.node("Cast", kind, x.shape, x, to=kind)

    def node(self, op: str, kind: int, shape: Sequence[Any], *inputs: gs.Tensor, **attributes: Any) -> gs.Tensor:
        """
        Args:
            kind, shape: of what it gives.
        """
        import onnx_graphsurgeon as gs

        made = gs.Variable(self._operation.fresh(f"eight_bits_{op}"), kind, list(shape))
        self._operation.add(op, list(inputs), [made], before=self._before, **attributes)
        return made

    def _unit_and_zero(self, kind: int) -> tuple[gs.Tensor, gs.Tensor]:
        made = self._operation.number
        return made("unit", self._unit, kind), made("zero", 0, self.eight_bits)

    def _number(self, value: float) -> gs.Tensor:
        return self._operation.number("number", value, _FLOAT)


def _kind(x: gs.Tensor) -> int:
    found = element_type(x)
    assert found is not None
    return found
