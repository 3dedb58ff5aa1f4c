"""The passes, in their order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...core.shapes import Shape
from .attention import mark_attention_decomposable, recover_attention
from .cleanup import forget_empty_sizes, remove_idle
from .constants import fold_sizes, simplified
from .eight_bits import quantise_products
from .graph import Dim, Operation, dims
from .normalization import recover_group_norm, recover_layer_norm
from .opset import raise_opset
from .padding import pad_matmul_k
from .shapes import settle_shapes
from .transposes import fold_transposes
from .weight_map import WeightMap

if TYPE_CHECKING:
    import onnx
    import torch

Pass = Callable[[Operation], int]

REPEATED: tuple[Pass, ...] = (
    fold_sizes,
    forget_empty_sizes,
    remove_idle,
    recover_group_norm,
    recover_layer_norm,
    fold_transposes,
    recover_attention,
)
"""Each of these makes work for others: they run until none finds any."""
LAST: tuple[Pass, ...] = (pad_matmul_k, mark_attention_decomposable)
ROUNDS = 8
"""At most: two or three are enough for every model tried, and a graph that is not done is still right."""
PASSES = tuple(run.__name__ for run in (*REPEATED, *LAST))
"""The names of all passes, in their order. The last makes a graph that TensorRT alone reads."""


@dataclass(frozen=True)
class PassReport:
    """What a pass did, in all its rounds: the number of nodes, or weights, that it changed."""

    name: str
    changed: int


def operate(
    model: onnx.ModelProto,
    weights: WeightMap,
    *,
    opset: int,
    only: Container[str] | None = None,
    eight_bits: torch.dtype | None = None,
    tuned: Mapping[str, Shape] = MappingProxyType({}),
) -> tuple[onnx.ModelProto, list[PassReport]]:
    """Run the passes on a copy of the graph; returns it with a report for each pass, in the order they first ran.

    Args:
        model: as exported, its weights references to external data or not; their values are never looked at.
            Initializers that `weights` lacks are constants, and are computed with. Left as it is.
        weights: changed in place: an entry says the new layout of a weight whose initializer's shape changed, and
            those go whose initializers went. A padded weight's reference starts at offset 0 of its file and is longer
            than it was: the caller makes the file long enough.
        opset: the graph's, or a later one: it is declared to be of that opset then.
        only: names of the passes to run; None runs all.
        eight_bits: float8_e4m3fn or int8, for the products that gain by it; None leaves all as they are.
        tuned: the inputs' shapes at which they gain, for those that are open.

    Raises:
        UnsupportedModel: an operator means something else in `opset`.
    """
    import onnx

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    raise_opset(copied, opset)
    counts: dict[str, int] = {}
    with _quiet():
        operation = _begin(copied, weights, opset)
        for _ in range(ROUNDS):
            if not _run(REPEATED, operation, counts, only):
                break
            operation = _begin(_finished(operation), weights, opset)
        if eight_bits is not None:
            sizes = _sizes(_finished(operation), weights, opset, tuned)
            counts[quantise_products.__name__] = quantise_products(operation, eight_bits, sizes)
        _run(LAST, operation, counts, only)
        finished = _finished(operation)
    _forget_missing(finished, weights)
    return finished, [PassReport(name, changed) for name, changed in counts.items()]


def _run(passes: tuple[Pass, ...], operation: Operation, counts: dict[str, int], only: Container[str] | None) -> int:
    total = 0
    for run in passes:
        name = run.__name__
        if only is None or name in only:
            changed = run(operation)
            counts[name] = counts.get(name, 0) + changed
            total += changed
    return total


def _begin(model: onnx.ModelProto, weights: WeightMap, opset: int) -> Operation:
    """The graph with every constant and shape that can be known."""
    import onnx_graphsurgeon as gs

    model = simplified(model, weights)
    for _ in range(ROUNDS):
        operation = Operation(gs.import_onnx(_inferred(model)), weights, opset)
        if not settle_shapes(operation):
            break
        model = _finished(operation)
    return operation


def _sizes(
    model: onnx.ModelProto, weights: WeightMap, opset: int, tuned: Mapping[str, Shape]
) -> dict[str, Sequence[Dim]]:
    """The sizes of all tensors of known rank, for inputs of these shapes; changes the model."""
    del model.graph.value_info[:]  # they hold names of sizes that are known now
    for tensor in model.graph.input:
        for dim, size in zip(tensor.type.tensor_type.shape.dim, tuned.get(tensor.name, ()), strict=False):
            dim.dim_value = size
    # Sizes may be products of others.
    known, _ = operate(model, dict(weights), opset=opset, only=(fold_sizes.__name__,))
    tensors = _begin(known, dict(weights), opset).graph.tensors()
    return {name: sizes for name, tensor in tensors.items() if (sizes := dims(tensor)) is not None}


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with the shapes that ONNX can infer.

    It has no inference for GroupNormalization, and knows nothing of all that follows one. The nearest operator that it
    can infer stands in meanwhile.
    """
    import onnx

    stands_in = {node.output[0] for node in model.graph.node if node.op_type == "GroupNormalization"}
    _rename(model, stands_in, "InstanceNormalization")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    _rename(inferred, stands_in, "GroupNormalization")
    return inferred


def _rename(model: onnx.ModelProto, outputs: set[str], kind: str) -> None:
    for node in model.graph.node:
        if node.output[0] in outputs:
            node.op_type = kind


def _finished(operation: Operation) -> onnx.ModelProto:
    import onnx_graphsurgeon as gs

    exported: onnx.ModelProto = gs.export_onnx(operation.graph.cleanup())
    return exported


def _forget_missing(model: onnx.ModelProto, weights: WeightMap) -> None:
    there = {tensor.name for tensor in model.graph.initializer}
    for name in [name for name in weights if name not in there]:
        del weights[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that NumPy lacks a dtype, which does not affect the passes."""
    from onnx_graphsurgeon.logger import G_LOGGER

    before = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.ERROR
    try:
        yield
    finally:
        G_LOGGER.severity = before
