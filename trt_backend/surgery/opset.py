"""The same graph, declared in another opset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import UnsupportedModel
from .tensorrt_8 import Lowering, Rewrite, attribute, drop_attributes, make_readable

if TYPE_CHECKING:
    import onnx

TENSORRT_8_OPSET = 17
IR_OF_OPSET_17 = 8
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
        bool(attribute(node, "antialias", 0)) or attribute(node, "keep_aspect_ratio_policy", b"stretch") != b"stretch"
    )


def lower_to_opset_17(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph of opset 18, declared and where needed rewritten as one of opset 17, for TensorRT 8.6.

    Returns:
        A copy; weights stay references to external data.

    Raises:
        UnsupportedModel: an operator has no equal in opset 17, or TensorRT 8.6 does not read it.
    """
    import onnx

    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    declared = declared_opset(lowered)
    lowering = Lowering(lowered)
    for node in lowered.graph.node:
        if node.domain in ("", "ai.onnx"):
            _lower(lowering, node, declared)
        lowering.nodes.append(node)
    lowering.finish()
    _drop_unread(lowered)
    _declare(lowered, TENSORRT_8_OPSET)
    lowered.ir_version = min(lowered.ir_version, IR_OF_OPSET_17)
    return lowered


def _lower(lowering: Lowering, node: onnx.NodeProto, declared: int) -> None:
    if _since(node.op_type, declared) > TENSORRT_8_OPSET:
        rewrite = REWRITES.get(node.op_type) if declared == TENSORRT_8_OPSET + 1 else None
        why = "has no equal in opset 17" if rewrite is None else rewrite(lowering, node)
        if why is not None:
            raise UnsupportedModel(
                f"{node.op_type} ({node.name}) of opset {declared} {why}, which is all that TensorRT 8.6 reads; "
                "export the model at opset 18, or use TensorRT 10"
            )
    why = make_readable(lowering, node)
    if why is not None:
        raise UnsupportedModel(
            f"TensorRT 8.6 cannot read {node.op_type} ({node.name}), which {why}; "
            "use TensorRT 10, or choose backend compiled"
        )


def _split(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """Opset 17 divides evenly where it is told no sizes; 18 also unevenly."""
    if len(node.input) < 2 or not node.input[1]:
        sizes = lowering.sizes(node.input[0])
        size = None if sizes is None else sizes[attribute(node, "axis", 0)]
        if size is None or size % len(node.output):
            return "splits an unknown or odd size, which opset 17 cannot"
    drop_attributes(node, "num_outputs")
    return None


def _resize(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    if _changes(node) or attribute(node, "axes", None) is not None:
        return "antialiases, keeps the aspect ratio or names axes, which is not in opset 17"
    drop_attributes(node, "antialias", "keep_aspect_ratio_policy")
    return None


def _pad(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    return "names axes, which is not in opset 17" if len(node.input) > 3 and node.input[3] else None


def _reduce(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """The axes are an input in opset 18, and an attribute before."""
    import onnx

    named = node.input[1] if len(node.input) > 1 else ""
    axes = lowering.integers(named) if named else []
    if axes is None or (not axes and attribute(node, "noop_with_empty_axes", 0)):
        return "has axes that are not known before it runs, or none, which is not in opset 17"
    del node.input[1:]
    drop_attributes(node, "noop_with_empty_axes")
    if axes:
        node.attribute.append(onnx.helper.make_attribute("axes", axes))
    return None


def _scatter(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    return (
        "takes extremes, which is not in opset 17"
        if attribute(node, "reduction", b"none") in (b"min", b"max")
        else None
    )


REWRITES: dict[str, Rewrite] = {
    "Split": _split,
    "Resize": _resize,
    "Pad": _pad,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    **{
        f"Reduce{kind}": _reduce
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
}


def _since(kind: str, opset: int) -> int:
    import onnx

    return int(onnx.defs.get_schema(kind, opset, "").since_version)


def _declare(model: onnx.ModelProto, opset: int) -> None:
    for declared in model.opset_import:
        if declared.domain in ("", "ai.onnx"):
            declared.version = opset


def _drop_unread(model: onnx.ModelProto) -> None:
    """Constants whose readers have become attributes go."""
    read = {name for node in model.graph.node for name in node.input} | {output.name for output in model.graph.output}
    for held in (model.graph.initializer, model.graph.node):
        kept = [
            item for item in held if not (_is_constant(item) and not read & set(getattr(item, "output", [item.name])))
        ]
        if len(kept) < len(held):
            del held[:]
            held.extend(kept)


def _is_constant(item: onnx.NodeProto | onnx.TensorProto) -> bool:
    return getattr(item, "op_type", "Constant") == "Constant"
