"""Removes nodes without effect, and `allowzero` of Reshapes, which no model needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .graph import Operation, dims, permutation, written_by
from .shapes import elements, is_shape, target_shape

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

MAY_BE_IDLE = ("Reshape", "Transpose", "Expand")


def remove_idle(operation: Operation) -> int:
    """Nodes go that give what they are given, that nobody reads, or whose work the next one does again.

    Returns:
        How many went or read something else now.
    """
    before = len(operation.graph.nodes)
    joined = sum(_join(operation, node) for node in operation.nodes("Reshape", "Transpose"))
    for node in operation.nodes(*MAY_BE_IDLE):
        if _is_idle(operation, node):
            operation.bypass(node, node.inputs[0])
    operation.graph.cleanup()
    return joined + before - len(operation.graph.nodes)


def _is_idle(operation: Operation, node: gs.Node) -> bool:
    data = node.inputs[0]
    if node.op == "Transpose":
        order = permutation(node)
        return order is not None and order == tuple(range(len(order)))
    if node.op == "Reshape" and is_shape(target_shape(operation, node), dims(data)):
        return True
    # Only known sizes: one name may stand for different sizes here and in the exporter.
    shape = _known_sizes(data)
    if shape is None:
        return False
    is_told = node.op == "Expand" and shape == elements(operation, node.inputs[1])
    return is_told or shape == _known_sizes(node.outputs[0])


def _known_sizes(tensor: gs.Tensor) -> list[int] | None:
    shape = dims(tensor)
    return None if shape is None or any(isinstance(size, str) for size in shape) else [int(size) for size in shape]


def _join(operation: Operation, node: gs.Node) -> bool:
    """Let the second of two Reshapes or Transposes do the work of both."""
    first = written_by(node.inputs[0], node.op)
    if first is None:
        return False
    if node.op == "Transpose":
        inner = permutation(first)
        outer = None if inner is None else permutation(node, len(inner))
        if inner is None or outer is None:
            return False
        node.attrs["perm"] = [inner[axis] for axis in outer]
    else:
        told = elements(operation, node.inputs[1])
        # A zero stands for a size of the tensor that would no longer be read.
        if told is None or (0 in told and not node.attrs.get("allowzero", 0)):
            return False
    node.inputs[0] = first.inputs[0]
    return True


def forget_empty_sizes(operation: Operation) -> int:
    """Reshape takes a 0 in its shape for "as it was", not for a size of 0, which no tensor of a model has.

    With sizes that might be 0 TensorRT cannot compute a -1 beside an open axis.

    Returns:
        How many Reshapes said otherwise.
    """
    changed = 0
    for node in operation.nodes("Reshape"):
        shape = operation.value(node.inputs[1])
        if node.attrs.get("allowzero") and (shape is None or 0 not in shape):
            del node.attrs["allowzero"]
            changed += 1
    return changed
