"""Constant folding: what onnxscript computes, and sizes that only the graph's other shapes tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import LARGEST_CONSTANT, Operation, element_type, reroute
from .shapes import SHAPE_NODES, elements
from .weight_map import WeightMap

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs
    import onnx_ir

KEPT = {"QuantizeLinear", "DequantizeLinear", "Dropout"}
"""Never computed in advance: a quantized constant is dequantized by the engine, where it can be fused."""
_MOST_ELEMENTS = LARGEST_CONSTANT // 8


def simplified(model: onnx.ModelProto, weights: WeightMap) -> onnx.ModelProto:
    """A graph whose constants are computed, with Splits for sequences, and of equal nodes one, by onnxscript.

    Weights count as unknown: no value of one is read.
    """
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript import optimizer

    def may_fold(node: onnx_ir.Node) -> bool | None:
        reads_weight = any(value is not None and value.name in weights for value in node.inputs)
        return False if reads_weight or node.op_type in KEPT else None

    made = onnx_ir.serde.deserialize_model(model)
    limits = {"input_size_limit": _MOST_ELEMENTS, "output_size_limit": _MOST_ELEMENTS}
    optimizer.fold_constants(made, onnx_shape_inference=True, should_fold=may_fold, **limits)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(made)
    _merge_constants(made, weights)
    common.CommonSubexpressionEliminationPass()(made)
    optimizer.remove_unused_nodes(made)
    return onnx_ir.serde.serialize_model(made)


def _merge_constants(model: onnx_ir.Model, weights: WeightMap) -> None:
    """Of equal constants the first is read by all, so that nodes which read them are equal, too."""
    import onnx_ir

    first: dict[tuple[Any, ...], onnx_ir.Value] = {}
    for value in list(model.graph.initializers.values()):
        held = value.const_value
        if held is None or value.name in weights or isinstance(held, onnx_ir.ExternalTensor):
            continue
        if held.size <= _MOST_ELEMENTS and not value.is_graph_output():
            kept = first.setdefault((held.dtype, tuple(held.shape.numpy()), held.tobytes()), value)
            value.replace_all_uses_with(kept)


def fold_sizes(operation: Operation) -> int:
    """Nodes that give nothing but known sizes become constants. Returns how many did.

    What a graph's own output is written by stays: an initializer would be no output.
    """
    changed = 0
    for node in list(operation.nodes(*SHAPE_NODES)):
        output = node.outputs[0]
        sizes = None if operation.is_output(output) or output.shape is None else elements(operation, output)
        if sizes is not None and all(isinstance(size, int) for size in sizes):
            _store(node, sizes)
            changed += 1
    operation.graph.cleanup()
    return changed


def _store(node: gs.Node, sizes: list[int | str]) -> None:
    import onnx
    import onnx_graphsurgeon as gs

    output, kind = node.outputs[0], element_type(node.outputs[0])
    dtype = None if kind is None else onnx.helper.tensor_dtype_to_np_dtype(kind)
    node.outputs.clear()
    node.inputs.clear()
    reroute(output, gs.Constant(output.name, np.array(sizes, dtype).reshape([len(sizes)] * len(output.shape))))
