"""Sizes of 0."""

from __future__ import annotations

from .graph import Operation


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
