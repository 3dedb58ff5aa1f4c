"""The graph that the passes work on: queries, and the few ways to change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .weight_map import WeightMap

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs

LARGEST_CONSTANT = 1 << 20
"""Bytes of the largest constant that passes compute with; their results are stored in the graph."""

Dim = int | str
"""A size, or the name of one: equal names are equal sizes."""


@dataclass
class Operation:
    """A graph, the weights that its initializers stand for, and the opset it is written in.

    The nodes are in topological order, and every change keeps them so.
    """

    graph: gs.Graph
    weights: WeightMap
    opset: int
    _names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = set(self.graph.tensors())

    def nodes(self, *kinds: str) -> Iterator[gs.Node]:
        """The nodes of these kinds that are there now and still have an output."""
        for node in list(self.graph.nodes):
            if node.op in kinds and node.outputs:
                yield node

    def is_weight(self, tensor: gs.Tensor) -> bool:
        return tensor.name in self.weights

    def is_output(self, tensor: gs.Tensor) -> bool:
        return any(output is tensor for output in self.graph.outputs)

    def value(self, tensor: gs.Tensor) -> np.ndarray[Any, Any] | None:
        """The value of a small constant; None for weights, and for what is only known when the model runs."""
        import onnx
        import onnx_graphsurgeon as gs

        if self.is_weight(tensor):
            return None
        if not isinstance(tensor, gs.Constant):
            return None
        held = tensor._values
        if isinstance(held, np.ndarray):
            return held if held.nbytes <= LARGEST_CONSTANT else None
        if held.tensor.data_location == onnx.TensorProto.EXTERNAL or held.nbytes > LARGEST_CONSTANT:
            return None
        loaded: np.ndarray[Any, Any] = tensor.values
        return loaded

    def scalar(self, tensor: gs.Tensor) -> float | None:
        """The value of a constant of one element; None for other tensors."""
        value = self.value(tensor)
        return None if value is None or value.size != 1 else float(value.reshape(()))

    def integers(self, tensor: gs.Tensor) -> list[int] | None:
        """The integers in a constant of at most one axis."""
        value = self.value(tensor)
        if value is None or value.ndim > 1 or value.dtype.kind not in "iu":
            return None
        return [int(element) for element in value.reshape(-1)]

    def fresh(self, name: str) -> str:
        """`name`, with a suffix where a tensor has that name already."""
        number, free = 1, name
        while free in self._names:
            number, free = number + 1, f"{name}_{number}"
        self._names.add(free)
        return free

    def constant(self, name: str, value: np.ndarray[Any, Any]) -> gs.Constant:
        import onnx_graphsurgeon as gs

        return gs.Constant(self.fresh(name), value)

    def number(self, name: str, value: float, kind: int) -> gs.Constant:
        """A scalar constant of the ONNX dtype id `kind`; NumPy lacks some of these dtypes."""
        import onnx
        import onnx_graphsurgeon as gs
        from onnx_graphsurgeon.ir.tensor import LazyValues

        return gs.Constant(self.fresh(name), LazyValues(onnx.helper.make_tensor(name, kind, (), [value])))

    def variable(self, name: str, like: gs.Tensor, shape: Sequence[Dim | None] | None) -> gs.Variable:
        """A new tensor of the dtype of `like`."""
        import onnx_graphsurgeon as gs

        return gs.Variable(self.fresh(name), like.dtype, None if shape is None else list(shape))

    def add(
        self, kind: str, inputs: list[gs.Tensor], outputs: list[gs.Tensor], *, before: gs.Node | None, **attributes: Any
    ) -> gs.Node:
        """A new node in front of another; at the very beginning where there is none."""
        import onnx_graphsurgeon as gs

        node = gs.Node(kind, f"slipstream_{outputs[0].name}", attributes, inputs, outputs)
        self.graph.nodes.insert(0 if before is None else self.place(before), node)
        return node

    def place(self, node: gs.Node) -> int:
        """The position of a node; gs compares nodes by what they do, and the same is often done twice."""
        return next(index for index, other in enumerate(self.graph.nodes) if other is node)

    def replace(self, node: gs.Node, kind: str, inputs: list[gs.Tensor], **attributes: Any) -> gs.Node:
        """A new node that writes what `node` wrote, in its place."""
        outputs = list(node.outputs)
        node.outputs.clear()
        made = self.add(kind, inputs, outputs, before=node, **attributes)
        node.inputs.clear()
        return made

    def bypass(self, node: gs.Node, tensor: gs.Tensor) -> bool:
        """Give the readers of a node's first output `tensor` instead.

        Returns:
            False, and nothing is changed, where the graph's own outputs forbid it.
        """
        output = node.outputs[0]
        if not self.is_output(output):
            node.outputs.clear()
            node.inputs.clear()
            reroute(output, tensor)
            return True
        writer = producer(tensor)
        if writer is None or self.is_output(tensor):
            return False
        # The graph's output keeps its name: whoever wrote the tensor writes the output.
        node.outputs.clear()
        node.inputs.clear()
        writer.outputs[next(i for i, written in enumerate(writer.outputs) if written is tensor)] = output
        reroute(tensor, output)
        return True


def producer(tensor: gs.Tensor) -> gs.Node | None:
    return tensor.inputs[0] if tensor.inputs else None


def written_by(tensor: gs.Tensor, *kinds: str) -> gs.Node | None:
    """The node that writes `tensor`, if it is of one of these kinds."""
    node = producer(tensor)
    return node if node is not None and node.op in kinds else None


def only_reader(tensor: gs.Tensor, *kinds: str) -> gs.Node | None:
    """The node that alone reads `tensor`, if it is of one of these kinds."""
    return tensor.outputs[0] if len(tensor.outputs) == 1 and tensor.outputs[0].op in kinds else None


def given(node: gs.Node, index: int) -> gs.Tensor | None:
    """An optional input."""
    return node.inputs[index] if len(node.inputs) > index and not node.inputs[index].is_empty() else None


def reroute(old: gs.Tensor, new: gs.Tensor) -> None:
    """Every reader of `old` reads `new`."""
    for reader in list(old.outputs):
        for index, read in enumerate(reader.inputs):
            if read is old:
                reader.inputs[index] = new


def dims(tensor: gs.Tensor) -> list[Dim] | None:
    """The sizes of a tensor, unnamed dynamic ones named after it; None where the rank is unknown."""
    if tensor.shape is None:
        return None
    return [f"{tensor.name}[{axis}]" if size is None else size for axis, size in enumerate(tensor.shape)]


def element_type(tensor: gs.Tensor) -> int | None:
    """ONNX's id of the dtype; None where it is unknown."""
    import onnx

    if tensor.dtype is None or isinstance(tensor.dtype, int):
        return tensor.dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))


def permutation(node: gs.Node, rank: int | None = None) -> tuple[int, ...] | None:
    """Of a Transpose; None where it is left out and the rank is unknown."""
    if "perm" in node.attrs:
        return tuple(node.attrs["perm"])
    if rank is None:
        shape = dims(node.inputs[0])
        if shape is None:
            return None
        rank = len(shape)
    return tuple(reversed(range(rank)))


def lay_out(weight: gs.Constant, shape: Sequence[int], kind: int | None = None) -> None:
    """Declare a weight's initializer to have another shape, or another dtype.

    A reference to external data keeps its place where the number of bytes stays. Where it changes, the reference
    starts at offset 0 and has the length that the new shape needs: the caller makes the file long enough.
    Data that lies in the graph itself is left as it is, or becomes zeros where the number of bytes changes.

    Args:
        kind: ONNX's id of the dtype; None leaves it.
    """
    from onnx_graphsurgeon.ir.tensor import LazyValues

    weight.values = LazyValues(_declared(weight, shape, kind))


def named_weight(operation: Operation, name: str, beside: gs.Constant, shape: Sequence[int], kind: int) -> gs.Constant:
    """A further initializer of a weight, of the ONNX dtype id `kind`, stored in the same file as `beside`."""
    import onnx_graphsurgeon as gs
    from onnx_graphsurgeon.ir.tensor import LazyValues

    proto = _declared(beside, shape, kind)
    proto.name = operation.fresh(name)
    return gs.Constant(proto.name, LazyValues(proto))


def _declared(weight: gs.Constant, shape: Sequence[int], kind: int | None) -> onnx.TensorProto:
    import onnx

    proto = onnx.TensorProto()
    proto.CopyFrom(weight._values.tensor)
    same = prod(proto.dims) == prod(shape) and kind in (None, proto.data_type)
    del proto.dims[:]
    proto.dims.extend(shape)
    if not same:
        _resize(proto, proto.data_type if kind is None else kind)
    return proto


def _resize(proto: onnx.TensorProto, kind: int) -> None:
    """Make the data, or the reference to it, as long as the shape and the dtype say."""
    import onnx
    from onnx_ir import DataType  # NumPy, and onnx by it, took eight-bit floats and bf16 for fp32 until 1.18

    length = int(prod(proto.dims) * DataType(kind).itemsize)
    before, proto.data_type = proto.data_type, kind
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        location = next(entry.value for entry in proto.external_data if entry.key == "location")
        del proto.external_data[:]
        for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
            proto.external_data.add(key=key, value=value)
        return
    proto.ClearField(onnx.helper.tensor_dtype_to_field(before))
    proto.raw_data = bytes(length)
