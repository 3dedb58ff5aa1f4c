"""The same graph, declared in another opset."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import UnsupportedModel

if TYPE_CHECKING:
    import onnx

TENSORRT_8_OPSET = 17
IR_OF_OPSET_17 = 8
READ_BY_TENSORRT_8 = frozenset(
    """Add Cast Concat Conv Cos Div Erf Gemm InstanceNormalization LayerNormalization MatMul Mul Pad Relu Reshape Resize
    Sigmoid Sin Slice Softmax Split Sub Tanh Transpose Unsqueeze""".split()
)
"""What UNets, ControlNets and VAEs of one size are made of. It misreads some of the others without a word."""
_SINCE_18 = {"num_outputs", "antialias", "keep_aspect_ratio_policy"}
CHANGED_MEANING = {"AveragePool", "DFT", "GridSample", "GroupNormalization", "Resize"}
"""Operators whose later versions, 19 to 23, mean something else; those of others only add dtypes and options."""


def declared_opset(model: onnx.ModelProto) -> int:
    """The opset of ONNX's own operators."""
    return next(int(opset.version) for opset in model.opset_import if opset.domain in ("", "ai.onnx"))


def raise_opset(model: onnx.ModelProto, opset: int) -> None:
    """Declare a graph of opset 18 or later to be of a later one, in place; one that is of `opset` stays.

    Raises:
        UnsupportedModel: an operator means something else there, or the graph is of a later opset already.
    """
    declared = declared_opset(model)
    if declared == opset:
        return
    if not TENSORRT_8_OPSET < declared < opset:
        raise UnsupportedModel(
            f"A graph of opset {declared} cannot be prepared for opset {opset}; export it at opset 18 to {opset}"
        )
    for node in model.graph.node:
        ours = node.domain in ("", "ai.onnx")
        if ours and _since(node.op_type, declared) != _since(node.op_type, opset) and _changes(node):
            raise UnsupportedModel(
                f"{node.op_type} ({node.name}) of opset {declared} means something else in opset {opset}; "
                f"export the model at opset {opset}"
            )
    _declare(model, opset)


def _changes(node: onnx.NodeProto) -> bool:
    if node.op_type != "Resize":
        return node.op_type in CHANGED_MEANING
    # 19 mended antialiasing and a policy for aspect ratios; nearest neighbours stayed as they were.
    return (
        bool(_attribute(node, "antialias", 0)) or _attribute(node, "keep_aspect_ratio_policy", b"stretch") != b"stretch"
    )


def lower_to_opset_17(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph of opset 18, declared as one of opset 17, for TensorRT 8.6.

    Returns:
        A copy; weights stay references to external data.

    Raises:
        UnsupportedModel: an operator was not tried there, or has no equal in opset 17.
    """
    import onnx

    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    constants = {"", *(tensor.name for tensor in lowered.graph.initializer)}
    shapes = {
        info.name: info.type.tensor_type.shape.SerializeToString(deterministic=True) for info in model.graph.value_info
    }
    for node in lowered.graph.node:
        if why := _why_not_lowered(node, constants, shapes):
            raise UnsupportedModel(
                f"TensorRT 8.6 cannot read {node.op_type} ({node.name}), which {why}; "
                "use TensorRT 10, or choose backend compiled"
            )
        while node.input and not node.input[-1]:  # it counts inputs to learn which are given
            del node.input[-1]
        kept = [held for held in node.attribute if held.name not in _SINCE_18]
        del node.attribute[:]
        node.attribute.extend(kept)
    _declare(lowered, TENSORRT_8_OPSET)
    lowered.ir_version = min(lowered.ir_version, IR_OF_OPSET_17)
    return lowered


def _why_not_lowered(node: onnx.NodeProto, constants: Container[str], shapes: Mapping[str, bytes]) -> str | None:
    """Why a node of opset 18 cannot be one of 17, for TensorRT 8.6; None where it can."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in READ_BY_TENSORRT_8:
        return "was not tried there"
    parts = [shapes.get(name) for name in node.output] if len(node.input) < 2 or not node.input[1] else []
    if node.op_type == "Split" and (None in parts or len(set(parts)) > 1):
        return "is told no sizes, and does not split evenly"
    if node.op_type == "Slice" and not all(name in constants for name in node.input[1:]):
        return "has bounds that are only known when it runs"
    if node.op_type == "Pad" and len(node.input) > 3 and node.input[3]:
        return "names axes"
    if node.op_type == "Resize" and (_changes(node) or _attribute(node, "axes", None) is not None):
        return "antialiases, keeps the aspect ratio or names axes"
    return None


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    import onnx

    return next((onnx.helper.get_attribute_value(held) for held in node.attribute if held.name == name), default)


def _since(kind: str, opset: int) -> int:
    import onnx

    return int(onnx.defs.get_schema(kind, opset, "").since_version)


def _declare(model: onnx.ModelProto, opset: int) -> None:
    for declared in model.opset_import:
        if declared.domain in ("", "ai.onnx"):
            declared.version = opset
