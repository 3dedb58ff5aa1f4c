"""Fuses decomposed normalizations to ONNX's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .graph import Operation, dims, element_type, given, only_reader, written_by
from .shapes import is_shape, target_shape

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

GROUP_NORM_OPSET = 21  # 18's scales a group, not a channel
LAYER_NORM_OPSET = 17


def recover_group_norm(operation: Operation) -> int:
    """Reshape, InstanceNormalization, Reshape, Mul, Add become a GroupNormalization. Returns how many did."""
    if operation.opset < GROUP_NORM_OPSET:
        return 0
    changed = sum(_group_norm(operation, node) for node in operation.nodes("InstanceNormalization"))
    operation.graph.cleanup()
    return changed


def _group_norm(operation: Operation, norm: gs.Node) -> bool:
    split = written_by(norm.inputs[0], "Reshape")
    joined = only_reader(norm.outputs[0], "Reshape")
    groups = _plain_groups(operation, norm)
    if split is None or joined is None or groups is None:
        return False
    data = split.inputs[0]
    shape = dims(data)
    if shape is None or len(shape) < 3 or not is_shape(target_shape(operation, joined), shape):
        return False
    told = target_shape(operation, split)
    if told is None or len(told) != 3 or told[:2] != [shape[0], groups]:
        return False
    found = _scale_and_shift(operation, joined.outputs[0], shape[1], len(shape))
    if found is None:
        return False
    last, scale, shift = found
    epsilon = norm.attrs.get("epsilon", 1e-5)
    operation.replace(last, "GroupNormalization", [data, scale, shift], num_groups=groups, epsilon=epsilon)
    return True


def _plain_groups(operation: Operation, norm: gs.Node) -> int | None:
    """How many groups a normalization has that neither scales nor shifts."""
    ones, zeros = (operation.value(tensor) for tensor in norm.inputs[1:3])
    if ones is None or zeros is None or (ones != 1).any() or (zeros != 0).any():
        return None
    return int(ones.size)


def _scale_and_shift(
    operation: Operation, tensor: gs.Tensor, channels: int | str, rank: int
) -> tuple[gs.Node, gs.Tensor, gs.Tensor] | None:
    """The Add that ends tensor * scale + shift, and both as they are per channel."""
    scaled = only_reader(tensor, "Mul")
    shifted = None if scaled is None else only_reader(scaled.outputs[0], "Add")
    if scaled is None or shifted is None or any(map(operation.is_output, (tensor, scaled.outputs[0]))):
        return None
    scale = _per_channel(operation, _other(scaled, tensor), channels, rank)
    shift = _per_channel(operation, _other(shifted, scaled.outputs[0]), channels, rank)
    return None if scale is None or shift is None else (shifted, scale, shift)


def _per_channel(operation: Operation, tensor: gs.Tensor, channels: int | str, rank: int) -> gs.Tensor | None:
    """The [channels] that were made [channels, 1, 1, …] in `tensor`."""
    node = written_by(tensor, "Unsqueeze", "Reshape")
    shape = dims(tensor)
    if node is None or shape is None or shape[-rank + 1 :] != [channels, *[1] * (rank - 2)]:
        return None
    if len(shape) > rank or (len(shape) == rank and shape[0] != 1):
        return None
    return node.inputs[0] if dims(node.inputs[0]) == [channels] else None


def recover_layer_norm(operation: Operation) -> int:
    """(x - mean) / sqrt(variance + epsilon) * scale + shift over the last axis becomes a LayerNormalization.

    The shift may be missing; the scale may not. Returns how many did.
    """
    if operation.opset < LAYER_NORM_OPSET:
        return 0
    changed = sum(_layer_norm(operation, node) for node in operation.nodes("Div", "Mul"))
    operation.graph.cleanup()
    return changed


def _layer_norm(operation: Operation, divided: gs.Node) -> bool:
    for centred, deviation in _quotients(operation, divided):
        data = _centred(operation, centred)
        squared = None if data is None else _variance(operation, deviation, data)
        if data is not None and squared is not None and not operation.is_output(divided.outputs[0]):
            return _replace_layer_norm(operation, divided, data, squared)
    return False


def _replace_layer_norm(operation: Operation, divided: gs.Node, data: gs.Tensor, epsilon: float) -> bool:
    scaled = only_reader(divided.outputs[0], "Mul")
    scale = None if scaled is None else _vector(_other(scaled, divided.outputs[0]), data)
    if scaled is None or scale is None:
        return False
    shifted = only_reader(scaled.outputs[0], "Add")
    shift = None if shifted is None else _vector(_other(shifted, scaled.outputs[0]), data)
    last, inputs = scaled, [data, scale]
    if shifted is not None and shift is not None and not operation.is_output(scaled.outputs[0]):
        last, inputs = shifted, [data, scale, shift]
    operation.replace(last, "LayerNormalization", inputs, axis=-1, epsilon=epsilon)
    return True


def _quotients(operation: Operation, node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """What may be divided by the root of what, however it is written."""
    if node.op == "Div":
        pairs = [(node.inputs[0], node.inputs[1])]
    else:
        inverted = [written_by(factor, "Reciprocal") for factor in node.inputs]
        pairs = [(node.inputs[1 - i], inverse.inputs[0]) for i, inverse in enumerate(inverted) if inverse is not None]
    found = []
    for dividend, divisor in pairs:
        root = written_by(divisor, "Sqrt", "Pow")
        if root is not None and (root.op == "Sqrt" or operation.scalar(root.inputs[1]) == 0.5):
            found.append((dividend, root.inputs[0]))
    return found


def _centred(operation: Operation, tensor: gs.Tensor) -> gs.Tensor | None:
    """The x in x - mean(x)."""
    difference = written_by(tensor, "Sub")
    if difference is None:
        return None
    data, mean = difference.inputs
    return data if _is_mean(operation, mean, data) else None


def _variance(operation: Operation, tensor: gs.Tensor, data: gs.Tensor) -> float | None:
    """The epsilon in variance(data) + epsilon."""
    total = written_by(tensor, "Add")
    for variance, constant in () if total is None else (total.inputs, reversed(total.inputs)):
        epsilon = operation.scalar(constant)
        squares = None if epsilon is None else _mean_of(operation, variance)
        square = None if squares is None else written_by(squares, "Pow", "Mul")
        if square is None or squares is None or not _is_mean(operation, variance, squares):
            continue
        twice = square.inputs[0] is square.inputs[1] if square.op == "Mul" else operation.scalar(square.inputs[1]) == 2
        if twice and _centred(operation, square.inputs[0]) is data:
            return epsilon
    return None


def _is_mean(operation: Operation, tensor: gs.Tensor, data: gs.Tensor) -> bool:
    """Whether `tensor` is the mean of `data` over its last axis, which it keeps."""
    shape = dims(data)
    kept = None if shape is None else [*shape[:-1], 1]
    return kept is not None and dims(tensor) == kept and _mean_of(operation, tensor) is data


def _mean_of(operation: Operation, tensor: gs.Tensor) -> gs.Tensor | None:
    """What `tensor` is the mean of over the last axis, whatever its shape."""
    divided = written_by(tensor, "Div")
    if divided is None:
        return _reduced(operation, tensor, "ReduceMean")
    data = _reduced(operation, divided.inputs[0], "ReduceSum")
    shape = None if data is None else dims(data)
    return data if shape is not None and operation.scalar(divided.inputs[1]) == shape[-1] else None


def _reduced(operation: Operation, tensor: gs.Tensor, kind: str) -> gs.Tensor | None:
    unflattened = written_by(tensor, "Reshape", "Unsqueeze")
    node = written_by(tensor if unflattened is None else unflattened.inputs[0], kind)
    if node is None:
        return None
    told = given(node, 1)
    axes = node.attrs.get("axes") if told is None else operation.integers(told)
    shape = dims(node.inputs[0])
    last = axes is not None and shape is not None and list(axes) in ([-1], [len(shape) - 1])
    return node.inputs[0] if last else None


def _vector(tensor: gs.Tensor, data: gs.Tensor) -> gs.Tensor | None:
    """`tensor`, if it is a vector of the data's dtype along the data's last axis."""
    shape = dims(data)
    fits = shape is not None and dims(tensor) == shape[-1:] and element_type(tensor) == element_type(data)
    return tensor if fits else None


def _other(node: gs.Node, tensor: gs.Tensor) -> gs.Tensor:
    """The other of a node's two inputs."""
    return node.inputs[1] if node.inputs[0] is tensor else node.inputs[0]
