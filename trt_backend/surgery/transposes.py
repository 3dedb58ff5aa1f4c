"""Folds Transposes into the layout of weights, into Gemms and into other Transposes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .graph import Operation, dims, lay_out, only_reader, permutation, written_by
from .shapes import is_shape, target_shape

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs


def fold_transposes(operation: Operation) -> int:
    """Weights are stored as their readers want them, and Gemms transpose for themselves.

    A weight is laid out anew only where every reader is an equal Transpose, and nothing was padded yet.
    Reshape, Transpose, Reshape around the last two axes, the exporter's way to transpose keys, becomes one Transpose.

    Returns:
        How many weights, Gemms and groups of Reshape, Transpose, Reshape changed.
    """
    changed = sum(_lay_out(operation, tensor) for tensor in list(operation.graph.tensors().values()))
    changed += sum(_take_over(node) for node in operation.nodes("Gemm"))
    changed += sum(_straighten(operation, node) for node in operation.nodes("Transpose"))
    operation.graph.cleanup()
    return changed


def _lay_out(operation: Operation, weight: gs.Tensor) -> bool:
    if not operation.is_weight(weight) or operation.weights[weight.name].padded is not None:
        return False
    readers = list(weight.outputs)
    orders = {permutation(reader) for reader in readers if reader.op == "Transpose"}
    if (
        any(reader.op != "Transpose" or operation.is_output(reader.outputs[0]) for reader in readers)
        or len(orders) != 1
    ):
        return False
    (order,) = orders
    assert order is not None  # the rank of a weight is known
    lay_out(weight, [weight.shape[axis] for axis in order])
    operation.weights[weight.name] = operation.weights[weight.name].transposed(order)
    for reader in readers:
        operation.bypass(reader, weight)
    return True


def _take_over(gemm: gs.Node) -> bool:
    changed = False
    for index, attribute in ((0, "transA"), (1, "transB")):
        transpose = written_by(gemm.inputs[index], "Transpose")
        if transpose is not None and permutation(transpose, 2) == (1, 0):
            gemm.inputs[index] = transpose.inputs[0]
            gemm.attrs[attribute] = 1 - gemm.attrs.get(attribute, 0)
            changed = True
    return changed


def _straighten(operation: Operation, transpose: gs.Node) -> bool:
    """[..., m, n] -> [batch, m, n] -> [batch, n, m] -> [..., n, m] is one Transpose."""
    first = written_by(transpose.inputs[0], "Reshape")
    last = only_reader(transpose.outputs[0], "Reshape")
    if (
        first is None
        or last is None
        or permutation(transpose) != (0, 2, 1)
        or operation.is_output(transpose.outputs[0])
    ):
        return False
    shape, flat = dims(first.inputs[0]), target_shape(operation, first)
    if shape is None or flat is None or len(shape) < 3 or flat[1:] != shape[-2:]:
        return False
    if not is_shape(target_shape(operation, last), [*shape[:-2], shape[-1], shape[-2]]):
        return False
    rank = len(shape)
    operation.replace(last, "Transpose", [first.inputs[0]], perm=[*range(rank - 2), rank - 1, rank - 2])
    return True
