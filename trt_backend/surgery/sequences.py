"""Replaces ONNX sequences, by which `chunk` is exported, by Split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .graph import Operation, dims, given, reroute

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs


def split_sequences(operation: Operation) -> int:
    """SplitToSequence, read at constant positions alone, becomes a Split. Returns how many did."""
    return sum(_split(operation, node) for node in operation.nodes("SplitToSequence"))


def _split(operation: Operation, node: gs.Node) -> bool:
    sizes = _sizes(operation, node)
    readers = list(node.outputs[0].outputs)
    if sizes is None or operation.is_output(node.outputs[0]):
        return False
    positions = [_position(operation, reader, len(sizes)) for reader in readers]
    repeated = [
        reader for index, reader in enumerate(readers) if reader.outputs and positions[index] in positions[:index]
    ]
    if None in positions or any(operation.is_output(reader.outputs[0]) for reader in repeated):
        return False
    parts: dict[int, gs.Tensor] = {}
    for reader, position in zip(readers, positions, strict=True):
        assert position is not None
        part = reader.outputs[0]
        reader.outputs.clear()
        reader.inputs.clear()
        if position in parts:
            reroute(part, parts[position])
        parts.setdefault(position, part)
    data, name = node.inputs[0], node.outputs[0].name
    outputs = [parts.get(i) or operation.variable(f"{name}_{i}", data, None) for i in range(len(sizes))]
    constant = operation.constant(f"{name}_sizes", np.array(sizes, np.int64))
    operation.add("Split", [data, constant], outputs, before=node, axis=node.attrs.get("axis", 0))
    node.inputs.clear()
    node.outputs.clear()
    return True


def _position(operation: Operation, reader: gs.Node, count: int) -> int | None:
    at = operation.integers(reader.inputs[1]) if reader.op == "SequenceAt" else None
    return at[0] % count if at is not None and -count <= at[0] < count else None


def _sizes(operation: Operation, node: gs.Node) -> list[int] | None:
    """The sizes of the parts; None where they depend on an unknown size, or the parts lose their axis."""
    told = given(node, 1)
    shape = dims(node.inputs[0])
    size = None if shape is None else shape[node.attrs.get("axis", 0)]
    if told is None:
        return [1] * size if isinstance(size, int) and node.attrs.get("keepdims", 1) else None
    value = operation.value(told)
    if value is None:
        return None
    if value.ndim == 1:
        return [int(part) for part in value]
    if not isinstance(size, int):
        return None
    part = int(value)
    return [min(part, size - start) for start in range(0, size, part)]
