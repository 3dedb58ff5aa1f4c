"""Rewrites operators of opset 17 that TensorRT 8.6 does not support, or misreads.

Its parser silently ignores attributes that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import fresh_name

if TYPE_CHECKING:
    import onnx

NOT_READ = frozenset(
    """Bernoulli BitShift BlackmanWindow Compress ConcatFromSequence ConvInteger DFT Det DynamicQuantizeLinear
    HammingWindow HannWindow Hardmax MatMulInteger MaxRoiPool MaxUnpool MelWeightMatrix Multinomial
    NegativeLogLikelihoodLoss Optional OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul STFT SequenceAt
    SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SoftmaxCrossEntropyLoss
    SplitToSequence StringNormalizer TfIdfVectorizer Unique""".split()
)
"""Operators of opset 17 that it has nothing for, besides CastLike."""
COORDINATES = (b"half_pixel", b"pytorch_half_pixel", b"tf_half_pixel_for_nn", b"asymmetric", b"align_corners")
LATE_AXES = "has axes that are only known when it runs"


class Lowering:
    """A graph whose nodes are rewritten in their order, and what was known of its tensors before.

    Attributes:
        nodes: those that are done; what a node needs in front of it goes here.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        import onnx

        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self.nodes: list[onnx.NodeProto] = []
        self._graph = model.graph
        self._types = {info.name: info.type.tensor_type for info in (*graph.value_info, *graph.input, *graph.output)}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and (tensor := _tensor_of(node)) is not None:
                self._constants[node.output[0]] = tensor
        self._names = {*self._constants, *self._types, *(name for node in model.graph.node for name in node.output)}
        self._made: dict[tuple[int, ...], str] = {}

    def sizes(self, name: str) -> list[int | None] | None:
        """A tensor's sizes, None for each dynamic one; None where the rank is unknown."""
        if name in self._constants:
            return list(self._constants[name].dims)
        held = self._types.get(name)
        if held is None or not held.HasField("shape"):
            return None
        return [size.dim_value if size.HasField("dim_value") else None for size in held.shape.dim]

    def element_type(self, name: str) -> int | None:
        """ONNX's id of a tensor's dtype; None where it is unknown."""
        if name in self._constants:
            return int(self._constants[name].data_type)
        return int(self._types[name].elem_type) or None if name in self._types else None

    def integers(self, name: str) -> list[int] | None:
        """The integers in a constant; None where they are only known when the graph runs."""
        import onnx

        tensor = self._constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return [int(value) for value in onnx.numpy_helper.to_array(tensor).reshape(-1)]

    def constant(self, values: Sequence[int]) -> str:
        """The name of an int64 initializer of one axis that holds these; one for all who ask for the same."""
        import onnx

        key = tuple(values)
        if key not in self._made:
            self._made[key] = fresh_name("_".join(["slipstream", *map(str, key)]), self._names)
            self._graph.initializer.append(onnx.numpy_helper.from_array(np.array(key, np.int64), self._made[key]))
        return self._made[key]

    def add(self, kind: str, inputs: list[str], name: str) -> str:
        """A new node in front of the one that is being rewritten; returns the name of its output."""
        import onnx

        output = fresh_name(name, self._names)
        self.nodes.append(onnx.helper.make_node(kind, inputs, [output], f"slipstream_{output}"))
        return output

    def finish(self) -> None:
        """The graph has the rewritten nodes from here on."""
        del self._graph.node[:]
        self._graph.node.extend(self.nodes)


Rewrite = Callable[[Lowering, "onnx.NodeProto"], str | None]
"""Rewrites a node in place; says why it cannot."""


def make_readable(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """Rewrite a node of opset 17 such that TensorRT 8.6 reads it as ONNX means it.

    Returns:
        Why that cannot be done, or None.
    """
    if node.op_type in NOT_READ:
        return "has no counterpart there"
    while node.input and not node.input[-1]:  # it counts inputs to learn which are given
        del node.input[-1]
    rule = RULES.get(node.op_type)
    return None if rule is None else rule(lowering, node)


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    import onnx

    return next((onnx.helper.get_attribute_value(held) for held in node.attribute if held.name == name), default)


def drop_attributes(node: onnx.NodeProto, *names: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def _become(node: onnx.NodeProto, kind: str, *inputs: str, **attributes: Any) -> None:
    """Turn a node into one of another operator with the same output."""
    import onnx

    node.op_type = kind
    del node.input[:], node.attribute[:]
    node.input.extend(inputs)
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())


def _shape(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """It gives all sizes, whatever `start` and `end` say."""
    start, end = attribute(node, "start", 0), attribute(node, "end", None)
    drop_attributes(node, "start", "end")
    if start == 0 and end is None:
        return None
    sizes = lowering.sizes(node.input[0])
    if sizes is None:
        return "takes some of an unknown number of sizes"
    positions = range(len(sizes))[start:end]
    if not positions:
        return "takes none of the sizes"
    if len(positions) < len(sizes):
        every = lowering.add("Shape", [node.input[0]], f"{node.output[0]}_every")
        _become(node, "Gather", every, lowering.constant(positions), axis=0)
    return None


def _squeeze(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """Without axes it looks for sizes of 1 among those it knows while it reads."""
    if len(node.input) > 1:
        return None if lowering.integers(node.input[1]) is not None else LATE_AXES
    sizes = lowering.sizes(node.input[0])
    if sizes is None or None in sizes:
        return "names no axes, and its sizes are only known when it runs"
    ones = [axis for axis, size in enumerate(sizes) if size == 1]
    if ones:
        node.input.append(lowering.constant(ones))
    else:
        _become(node, "Identity", node.input[0])
    return None


def _unsqueeze(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    return None if lowering.integers(node.input[1]) is not None else LATE_AXES


def _slice(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    if len(node.input) > 3 and lowering.integers(node.input[3]) is None:
        return LATE_AXES if node.input[3] else "has steps and names no axes"
    return None


def _reshape(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """Reshape of a scalar to [-1] names the size 1, which the parser does not infer."""
    if lowering.sizes(node.input[0]) == [] and lowering.integers(node.input[1]) == [-1]:
        node.input[1] = lowering.constant([1])
    return None


def _cast(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """Sizes may pass an Identity; that they may pass a Cast is not said anywhere."""
    if attribute(node, "to", None) == lowering.element_type(node.input[0]):
        _become(node, "Identity", node.input[0])
    return None


def _cast_like(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    kind = lowering.element_type(node.input[1])
    if kind is None:
        return "casts to a type that is only known when it runs"
    _become(node, "Cast", node.input[0], to=kind)
    return None


def _constant(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """It reads `value_int` and `value_ints` as if they were floats, and finds none."""
    tensor = _tensor_of(node)
    if tensor is None:
        return "holds no plain tensor"
    if node.attribute[0].name != "value":
        _become(node, "Constant", value=tensor)
    return None


def _tensor_of(constant: onnx.NodeProto) -> onnx.TensorProto | None:
    """What a Constant node says; None where that is sparse or text."""
    import onnx

    said = constant.attribute[0]
    if said.name == "value":
        held: onnx.TensorProto = said.t
        return held
    dtypes = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    if said.name not in dtypes:
        return None
    value = np.array(onnx.helper.get_attribute_value(said), dtypes[said.name])
    return onnx.numpy_helper.from_array(value, constant.output[0])


def _reduce_sum(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    """It takes no axes at all for none, and does not know that this may mean to reduce nothing."""
    axes = lowering.integers(node.input[1]) if len(node.input) > 1 else []
    if axes is None:
        return LATE_AXES
    if not axes and attribute(node, "noop_with_empty_axes", 0):
        _become(node, "Identity", node.input[0])
    elif not axes:
        del node.input[1:]
    drop_attributes(node, "noop_with_empty_axes")
    return None


def _scatter(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    return None if attribute(node, "reduction", b"none") == b"none" else "computes with what it replaces"


def _resize(lowering: Lowering, node: onnx.NodeProto) -> str | None:
    mode = attribute(node, "coordinate_transformation_mode", b"half_pixel")
    return None if mode in COORDINATES else f"finds its coordinates by {mode.decode()}"


RULES: dict[str, Rewrite] = {
    "Cast": _cast,
    "CastLike": _cast_like,
    "Constant": _constant,
    "ReduceSum": _reduce_sum,
    "Reshape": _reshape,
    "Resize": _resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}
