"""Constant folding, and merging of duplicate constants and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import LARGEST_CONSTANT, Operation, element_type, reroute
from .shapes import SHAPE_NODES, elements

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
KEPT = {*RANDOM, "QuantizeLinear", "DequantizeLinear", "Dropout"}
"""Never computed in advance: a quantized constant is dequantized by the engine, where it can be fused."""

Array = np.ndarray[Any, Any]


def fold_constants(operation: Operation) -> int:
    """Nodes that read nothing but small constants become constants, and so do known sizes. Returns how many did.

    Constant nodes among them. What a graph's own output is written by stays: an initializer would be no output.
    """
    changed = 0
    for node in list(operation.graph.nodes):
        if node.op in KEPT or any(map(operation.is_output, node.outputs)) or _has_graph(node):
            continue
        values = _values(operation, node)
        if values is not None:
            _store(node, values)
            changed += 1
    operation.graph.cleanup()
    return changed


def _values(operation: Operation, node: gs.Node) -> list[Array] | None:
    """What the node writes; None where it is unknown, or too large to be kept."""
    if node.op == "Constant":
        held = operation.value(node.outputs[0])
        return None if held is None else [held]
    if node.op in SHAPE_NODES:
        followed = elements(operation, node.outputs[0])
        rank = node.outputs[0].shape
        if followed is not None and rank is not None and all(isinstance(size, int) for size in followed):
            return [np.array(followed, _numpy_dtype(node.outputs[0])).reshape([len(followed)] * len(rank))]
    read = [None if tensor.is_empty() else operation.value(tensor) for tensor in node.inputs]
    if node.op == "CastLike" and read[0] is not None and element_type(node.inputs[1]) is not None:
        return [read[0].astype(_numpy_dtype(node.inputs[1]))]
    if not read or any(
        value is None and not tensor.is_empty() for value, tensor in zip(read, node.inputs, strict=True)
    ):
        return None
    return _computed(operation, node, {tensor.name: value for tensor, value in zip(node.inputs, read, strict=True)})


def _computed(operation: Operation, node: gs.Node, feeds: dict[str, Array | None]) -> list[Array] | None:
    from onnx.reference import ReferenceEvaluator
    from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

    if node.domain or _is_large(operation, node):
        return None
    try:
        # The reference knows ONNX's meaning of every operator; what it cannot do stays in the graph.
        evaluator = ReferenceEvaluator(OnnxExporter.export_node(node), opsets={"": operation.opset})
        results = evaluator.run(None, {name: value for name, value in feeds.items() if name})
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    if not all(isinstance(result, np.ndarray | np.generic) for result in results):
        return None
    arrays = [np.asarray(result, _numpy_dtype(out)) for result, out in zip(results, node.outputs, strict=True)]
    return arrays if sum(array.nbytes for array in arrays) <= LARGEST_CONSTANT else None


def _is_large(operation: Operation, node: gs.Node) -> bool:
    """Whether a node that blows up its input would make too much of it."""
    if node.op not in ("Expand", "ConstantOfShape", "Tile"):
        return False
    told = operation.value(node.inputs[0 if node.op == "ConstantOfShape" else 1])
    return told is None or float(np.prod(told.astype(np.float64))) > LARGEST_CONSTANT / 8


def _numpy_dtype(tensor: gs.Tensor) -> np.dtype[Any] | None:
    import onnx

    kind = element_type(tensor)
    return None if kind is None else onnx.helper.tensor_dtype_to_np_dtype(kind)


def _store(node: gs.Node, values: list[Array]) -> None:
    import onnx_graphsurgeon as gs

    outputs = list(node.outputs)
    node.outputs.clear()
    node.inputs.clear()
    for output, value in zip(outputs, values, strict=True):
        reroute(output, gs.Constant(output.name, value))


def merge_duplicates(operation: Operation) -> int:
    """Of equal constants, and of equal nodes on equal inputs, the first does the work. Returns how many went."""
    return _merge_constants(operation) + _merge_nodes(operation)


def _merge_constants(operation: Operation) -> int:
    import onnx_graphsurgeon as gs

    first: dict[Any, gs.Tensor] = {}
    changed = 0
    for tensor in list(operation.graph.tensors().values()):
        value = operation.value(tensor) if isinstance(tensor, gs.Constant) else None
        if value is None or operation.is_output(tensor):
            continue
        kept = first.setdefault((value.dtype.str, value.dtype.name, value.shape, value.tobytes()), tensor)
        if kept is not tensor:
            reroute(tensor, kept)
            changed += 1
    return changed


def _merge_nodes(operation: Operation) -> int:
    first: dict[Any, gs.Node] = {}
    changed = 0
    for node in list(operation.graph.nodes):
        if node.op in RANDOM or _has_graph(node):
            continue
        kept = first.setdefault(_identity(node), node)
        if kept is node or any(map(operation.is_output, node.outputs)):
            continue
        for old, new in zip(node.outputs, kept.outputs, strict=True):
            reroute(old, new)
        node.outputs.clear()
        node.inputs.clear()
        changed += 1
    operation.graph.cleanup()
    return changed


def _identity(node: gs.Node) -> tuple[Any, ...]:
    from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

    attributes = OnnxExporter.export_attributes(dict(sorted(node.attrs.items())))
    said = tuple(attribute.SerializeToString(deterministic=True) for attribute in attributes)
    written = tuple(not output.is_empty() for output in node.outputs)
    return (node.op, node.domain, said, tuple(tensor.name for tensor in node.inputs), written)


def _has_graph(node: gs.Node) -> bool:
    import onnx_graphsurgeon as gs

    return any(isinstance(value, gs.Graph) for value in node.attrs.values())
