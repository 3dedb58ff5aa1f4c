"""Fuses decomposed attention to ONNX's Attention, with the attributes that TensorRT needs."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose, sqrt
from typing import TYPE_CHECKING

import numpy as np

from .graph import Dim, Operation, dims, element_type, only_reader, written_by

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

ATTENTION_OPSET = 23


@dataclass(frozen=True)
class Scores:
    """softmax(query @ transposed_key * scale + mask): [batch, heads, queries, keys]."""

    query: gs.Tensor
    transposed_key: gs.Tensor
    scale: float
    mask: gs.Tensor | None


def recover_attention(operation: Operation) -> int:
    """MatMul, Softmax, MatMul over [batch, heads, length, size] become an Attention. Returns how many did.

    The scale may stand before the first MatMul, on either side or both, or behind it; a mask is added before Softmax.
    """
    if operation.opset < ATTENTION_OPSET:
        return 0
    changed = sum(_attention(operation, node) for node in operation.nodes("Softmax"))
    operation.graph.cleanup()
    return changed


def _attention(operation: Operation, softmax: gs.Node) -> bool:
    probabilities = softmax.outputs[0]
    weighted = only_reader(probabilities, "MatMul")
    scores = _scores(operation, softmax.inputs[0])
    if weighted is None and scores is not None and _is_finite(operation, scores.mask):
        probabilities, weighted = _past_nan_guard(operation, softmax)
    if scores is None or weighted is None or weighted.inputs[0] is not probabilities:
        return False
    value = weighted.inputs[1]
    shapes = [dims(tensor) for tensor in (softmax.inputs[0], scores.query, scores.transposed_key, value)]
    if not _fits(softmax, shapes) or not _is_mask(scores.mask, shapes[0]):
        return False
    key_shape = shapes[2]
    assert key_shape is not None
    key = operation.variable(
        f"{scores.transposed_key.name}_upright", value, [*key_shape[:2], key_shape[3], key_shape[2]]
    )
    operation.add("Transpose", [scores.transposed_key], [key], before=weighted, perm=[0, 1, 3, 2])
    inputs = [scores.query, key, value, *([] if scores.mask is None else [scores.mask])]
    operation.replace(weighted, "Attention", inputs, scale=_unrounded(scores, value, key_shape[2]))
    return True


def _scores(operation: Operation, tensor: gs.Tensor) -> Scores | None:
    masked = written_by(tensor, "Add")
    for product, mask in [(tensor, None)] if masked is None else [masked.inputs, reversed(masked.inputs)]:
        behind, product = _scaled(operation, product)
        matmul = written_by(product, "MatMul")
        if matmul is not None:
            of_query, query = _scaled(operation, matmul.inputs[0])
            of_key, key = _scaled(operation, matmul.inputs[1])
            return Scores(query, key, behind * of_query * of_key, mask)
    return None


def _scaled(operation: Operation, tensor: gs.Tensor) -> tuple[float, gs.Tensor]:
    """The constant factor of a tensor, 1 where there is none, and the tensor before that multiplication."""
    node = written_by(tensor, "Mul", "Div")
    if node is None:
        return 1.0, tensor
    for data, factor in (node.inputs, reversed(node.inputs)) if node.op == "Mul" else (node.inputs,):
        number = operation.scalar(factor)
        if number and dims(data) == dims(tensor):
            return (number if node.op == "Mul" else 1 / number), data
    return 1.0, tensor


def _past_nan_guard(operation: Operation, softmax: gs.Node) -> tuple[gs.Tensor, gs.Node | None]:
    """The output of Where(IsNaN(p), 0, p), which zeroes fully masked rows, and the MatMul that reads it."""
    probabilities = softmax.outputs[0]
    guards = [reader for reader in probabilities.outputs if reader.op == "Where"]
    if len(guards) != 1 or {reader.op for reader in probabilities.outputs} != {"Where", "IsNaN"}:
        return probabilities, None
    (guard,) = guards
    test = written_by(guard.inputs[0], "IsNaN")
    if test is None or test.inputs[0] is not probabilities or operation.scalar(guard.inputs[1]) != 0:
        return probabilities, None
    return guard.outputs[0], only_reader(guard.outputs[0], "MatMul")


def _is_finite(operation: Operation, mask: gs.Tensor | None) -> bool:
    """Whether a mask is chosen from finite numbers, so that no row of the scores becomes NaN."""
    chosen = None if mask is None else written_by(mask, "Where")
    numbers = [] if chosen is None else [operation.scalar(tensor) for tensor in chosen.inputs[1:]]
    return bool(numbers) and all(number is not None and np.isfinite(number) for number in numbers)


def _fits(softmax: gs.Node, shapes: list[list[Dim] | None]) -> bool:
    """Whether these are scores, query, transposed key and value of one attention over the last axis."""
    if any(shape is None or len(shape) != 4 for shape in shapes) or softmax.attrs.get("axis", -1) not in (-1, 3):
        return False
    scores, query, key, value = (shape for shape in shapes if shape is not None)
    one_batch = scores[:2] == query[:2] == key[:2] == value[:2]
    return one_batch and query[3] == key[2] and key[3] == value[2] == scores[3]


def _is_mask(mask: gs.Tensor | None, scores: list[Dim] | None) -> bool:
    """Whether a mask spreads over the scores as Attention spreads it: its last axis is as long as theirs."""
    if mask is None:
        return True
    shape = dims(mask)
    if shape is None or scores is None or len(shape) not in (2, 4):
        return False
    aligned = zip(shape, scores[-len(shape) :], strict=True)
    return all(size == wanted or (size == 1 and len(shape) - axis > 2) for axis, (size, wanted) in enumerate(aligned))


def _unrounded(scores: Scores, like: gs.Tensor, size: Dim) -> float:
    """The scale; 1/sqrt(size) where it differs from that by the rounding of its parts."""
    import onnx

    kind = element_type(like)
    if isinstance(size, int) and kind is not None:
        usual = 1 / sqrt(size)
        # bfloat16 keeps 8 bits, float16 11 and float32 24; a scale is a product of rounded square roots.
        bits = 8 if kind == onnx.TensorProto.BFLOAT16 else 11 if kind == onnx.TensorProto.FLOAT16 else 24
        if isclose(scores.scale, usual, rel_tol=4 * 2.0**-bits):
            return usual
    return scores.scale


def mark_attention_decomposable(operation: Operation) -> int:
    """Let TensorRT decompose an Attention where it has no fused kernel, and drop attributes that have their defaults.

    Attentions get `TRT_decomposable`, which only TensorRT knows: no other runtime takes the graph behind this pass.
    An explicit `scale` is set where the size of a head is known.

    Returns:
        How many Attentions changed.
    """
    return sum(map(_mark, operation.nodes("Attention")))


def _mark(node: gs.Node) -> bool:
    before = dict(node.attrs)
    for name in ("softcap", "qk_matmul_output_mode"):
        if node.attrs.get(name) == 0:
            del node.attrs[name]
    size = _head_size(node)
    if "scale" not in node.attrs and size is not None:
        node.attrs["scale"] = 1 / sqrt(size)
    node.attrs["TRT_decomposable"] = 1
    return dict(node.attrs) != before


def _head_size(node: gs.Node) -> int | None:
    shape = dims(node.inputs[0])
    if shape is None or not isinstance(shape[-1], int):
        return None
    return shape[-1] if len(shape) == 4 else shape[-1] // int(node.attrs["q_num_heads"])
