"""Pads matrix products whose inner axis is not aligned for tensor cores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .graph import Operation, lay_out, producer

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

MULTIPLE = 8
"""Elements: the alignment that half-precision tensor cores want of a product's length."""

Pads = dict[tuple[str, int, int], "gs.Tensor"]


def pad_matmul_k(operation: Operation) -> int:
    """Zeros lengthen the products with a weight whose inner axis is no multiple of 8.

    The activation goes through a Pad, once for all its readers; the weight's entry says the new shape.

    Returns:
        How many weights were padded.
    """
    pads: Pads = {}
    return sum(_pad(operation, tensor, pads) for tensor in list(operation.graph.tensors().values()))


def _pad(operation: Operation, weight: gs.Tensor, pads: Pads) -> bool:
    readers = [reader for reader in weight.outputs if reader.op in ("MatMul", "Gemm")]
    if not operation.is_weight(weight) or not readers or len(readers) != len(weight.outputs) or len(weight.shape) != 2:
        return False
    inner = {_inner_axis(reader, weight) for reader in readers}
    axis = inner.pop()
    if inner or axis is None or any(reader.inputs[0].shape is None for reader in readers):
        return False
    missing = -weight.shape[axis] % MULTIPLE
    if not missing:
        return False
    shape = list(weight.shape)
    shape[axis] += missing
    for reader in readers:
        reader.inputs[0] = _padded(operation, reader, shape[axis], missing, pads)
    lay_out(weight, shape)
    operation.weights[weight.name] = replace(operation.weights[weight.name], padded=tuple(shape))
    return True


def _inner_axis(reader: gs.Node, weight: gs.Tensor) -> int | None:
    """Of the two axes of a product's right side, the one summed over; None where the weight is no right side alone."""
    if [read is weight for read in reader.inputs].count(True) != 1 or reader.inputs[1] is not weight:
        return None
    return int(reader.attrs.get("transB", 0))


def _padded(operation: Operation, reader: gs.Node, length: int, missing: int, pads: Pads) -> gs.Tensor:
    data = reader.inputs[0]
    axis = 0 if reader.attrs.get("transA", 0) else len(data.shape) - 1
    if (data.name, axis, missing) not in pads:
        shape = [length if other == axis else size for other, size in enumerate(data.shape)]
        zeros = np.zeros(2 * len(shape), np.int64)
        zeros[len(shape) + axis] = missing
        output = operation.variable(f"{data.name}_padded", data, shape)
        amounts = operation.constant(f"{data.name}_padding", zeros)
        operation.add("Pad", [data, amounts], [output], before=_after(operation, producer(data)), mode="constant")
        pads[data.name, axis, missing] = output
    return pads[data.name, axis, missing]


def _after(operation: Operation, node: gs.Node | None) -> gs.Node | None:
    """The node behind another one."""
    return None if node is None else operation.graph.nodes[operation.place(node) + 1]
