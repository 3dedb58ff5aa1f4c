"""Symbolic shape arithmetic, for dynamic sizes that only have a name."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from .graph import Dim, Operation, dims, element_type, given, producer

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

SHAPE_NODES = ("Shape", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Reshape", "Identity", "Cast")
COUNTED = ("Add", "Div", "Mul", "Sub")
"""Arithmetic on sizes: its results are sizes again, and have no other name than the tensor's."""
INT64 = 7


def elements(operation: Operation, tensor: gs.Tensor) -> list[Dim] | None:
    """What stands in a tensor of integers of at most one axis; None where that cannot be followed."""
    known = operation.integers(tensor)
    if known is not None:
        return list(known)
    node = producer(tensor)
    if (
        node is not None
        and node.op in COUNTED
        and element_type(tensor) == INT64
        and list(tensor.shape or ()) in ([], [1])
    ):
        return [f"value of {tensor.name}"]
    if node is None or node.op not in SHAPE_NODES:
        return None
    if node.op == "Shape":
        sizes = dims(node.inputs[0])
        return None if sizes is None else sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))]
    if node.op == "Concat":
        parts = [elements(operation, part) for part in node.inputs]
        return None if None in parts else [size for part in parts if part is not None for size in part]
    if not _is_flat(tensor) or not _is_flat(node.inputs[0]) or node.attrs.get("to", INT64) != INT64:
        return None
    source = elements(operation, node.inputs[0])
    if source is None or node.op not in ("Gather", "Slice"):
        return source
    return _gathered(operation, node, source) if node.op == "Gather" else _sliced(operation, node, source)


def _is_flat(tensor: gs.Tensor) -> bool:
    return tensor.shape is not None and len(tensor.shape) <= 1


def _gathered(operation: Operation, node: gs.Node, source: list[Dim]) -> list[Dim] | None:
    positions = operation.integers(node.inputs[1])
    return None if positions is None else [source[position] for position in positions]


def _sliced(operation: Operation, node: gs.Node, source: list[Dim]) -> list[Dim] | None:
    bounds = [operation.integers(tensor) for tensor in node.inputs[1:3]]
    step_given = given(node, 4)
    steps = [1] if step_given is None else operation.integers(step_given)
    if steps is None or any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    (start,), (end,) = (bound for bound in bounds if bound is not None)
    # Slice's "to the very beginning" is no valid end of a Python slice that runs backwards.
    return source[start : end : steps[0]] if steps[0] > 0 else None


def target_shape(operation: Operation, reshape: gs.Node) -> list[Dim] | None:
    """What a Reshape is told to make, its zeros replaced by the sizes that they stand for; it may hold one -1."""
    told = elements(operation, reshape.inputs[1])
    if told is None or 0 not in told or reshape.attrs.get("allowzero", 0):
        return told
    source = dims(reshape.inputs[0])
    if source is None or any(size == 0 and axis >= len(source) for axis, size in enumerate(told)):
        return None
    return [source[axis] if size == 0 else size for axis, size in enumerate(told)]


def is_shape(told: list[Dim] | None, shape: list[Dim] | None) -> bool:
    """Whether a Reshape to `told` of a tensor with as many elements as `shape` gives `shape`."""
    if told is None or shape is None or len(told) != len(shape):
        return False
    return told.count(-1) <= 1 and all(size in (-1, wanted) for size, wanted in zip(told, shape, strict=True))


def settle_shapes(operation: Operation) -> bool:
    """Write down what Reshapes make, where ONNX's own inference gives up on it. Returns whether that was any news.

    Sizes that have no number get a name, the same one in every tensor of that size. Where there is news, names that
    the inference made up are forgotten: it finds better ones next time.
    """
    news = False
    for node in operation.nodes("Reshape"):
        told, output = target_shape(operation, node), node.outputs[0]
        if told is None or node.inputs[0].dtype is None:
            continue
        settled = _without_rest(told, dims(node.inputs[0]))
        known = [None] * len(settled) if output.shape is None else list(output.shape)
        better = [_better(old, new) for old, new in zip(known, settled, strict=True)]
        if output.shape is None or better != known:
            output.dtype, output.shape = node.inputs[0].dtype, better
            news = True
    for tensor in operation.graph.tensors().values() if news else ():
        if tensor.shape is not None and any(map(_is_made_up, tensor.shape)):
            tensor.shape = [None if _is_made_up(size) else size for size in tensor.shape]
    return news


def _better(old: Dim | None, new: Dim | None) -> Dim | None:
    if new is None or _is_made_up(new) or isinstance(old, int):
        return old
    return new if isinstance(new, int) or old is None or _is_made_up(old) else old


def _is_made_up(size: Dim | None) -> bool:
    return isinstance(size, str) and size.startswith("unk__")


def _without_rest(told: list[Dim], source: list[Dim] | None) -> list[Dim | None]:
    """`told` with the size that its -1 stands for, or None in that place."""
    if -1 not in told:
        return list(told)
    rest = None if source is None else _rest([size for size in told if size != -1], source)
    return [rest if size == -1 else size for size in told]


def _rest(told: list[Dim], source: list[Dim]) -> Dim | None:
    """The size that `told` lacks to have as many elements as `source`; None where it is neither known nor named."""
    names = [size for size in source if isinstance(size, str)]
    for size in told:
        if isinstance(size, str):
            if size not in names:
                return None
            names.remove(size)
    given_numbers = prod(size for size in told if isinstance(size, int))
    numbers = prod(size for size in source if isinstance(size, int))
    if not given_numbers or numbers % given_numbers or (names and (len(names) > 1 or numbers != given_numbers)):
        return None
    return names[0] if names else numbers // given_numbers
