"""Large linear layers in eight bits with dynamically quantised inputs: reduces compute and memory traffic.

`core/eight_bits.py` selects the layers.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...core.eight_bits import FP8, gains, quantised, scale_of_rows
from .derived_weights import DerivedWeight, Form
from .graph import Graph, argument, aten, shape_of

_LONG = 2048
_LEAST_PART = 256


def quantise_linears(graph: Graph, eight_bits: torch.dtype) -> int:
    """Quantise the linear layers that gain; returns how many there were."""
    count = 0
    for node in graph.calls(aten.linear.default):
        weight = node.args[1]
        if graph.weight(weight) is not None and _gains(node) and not graph.is_written(node):
            assert isinstance(weight, Node)
            _quantise(graph, node, str(weight.target), eight_bits)
            count += 1
    return count


def _gains(node: Node) -> bool:
    assert isinstance(node.args[0], Node)
    columns, rows = shape_of(node.args[0])[-1], shape_of(node)[-1]
    return gains(node.args[0].meta["val"].numel() // columns, columns, rows)


def _quantise(graph: Graph, node: Node, source: str, eight_bits: torch.dtype) -> None:
    x, bias = node.args[0], argument(node, 2, "bias")
    assert isinstance(x, Node)
    rows, columns = shape_of(node)[-1], shape_of(x)[-1]
    with graph.module.graph.inserting_before(node):
        weight = graph.derive(DerivedWeight((source,), Form.QUANTISED, eight_bits), (rows, columns), eight_bits)
        scale = graph.derive(DerivedWeight((source,), Form.SCALE, eight_bits), (rows, 1), torch.float32)
        one = [graph.derive(DerivedWeight((), Form.ONE), (), torch.float32)] if eight_bits == FP8 else []
    graph.replace(node, fp8_linear if eight_bits == FP8 else int8_linear, x, weight, scale, bias, *one)


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, one: torch.Tensor
) -> torch.Tensor:
    """x [..., columns] in half precision by a weight [rows, columns] in fp8 with a scale for each row [rows, 1].

    Args:
        one: 1 in fp32, on the device.
    """
    return of_product(fp8_product(*in_eight_bits(x, FP8), weight, scale, one), x, bias)


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with a weight in int8."""
    small, by = in_eight_bits(x, torch.int8)
    return of_product(torch._int_mm(small, weight.t()).float() * by * scale.t(), x, bias)


def fp8_product(
    small: torch.Tensor, by: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, one: torch.Tensor
) -> torch.Tensor:
    """The product of `in_eight_bits`' results and a weight of `fp8_linear`: [samples, rows]."""
    # Scaling in the product costs a narrow one a third of its time; afterwards it is part of the next kernel.
    is_wide = weight.shape[0] > weight.shape[1]
    scales = (by, scale.t()) if is_wide else (one, one)
    # Ada's kernels that scale write bf16 alone; what follows is computed in fp32 in either case.
    y = torch._scaled_mm(small, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y if is_wide else y.float() * by * scale.t()


def of_product(y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product y [samples, rows] as a layer of x [..., columns] gives it."""
    y = y.to(x.dtype)
    return (y if bias is None else y + bias).reshape(*x.shape[:-1], y.shape[-1])


def in_eight_bits(x: torch.Tensor, eight_bits: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of x [..., columns], [samples, columns], and the scale of each, [samples, 1]."""
    samples = _at_hand(x.reshape(-1, x.shape[-1]))
    by = _scale(samples, eight_bits)
    return quantised(samples, by, eight_bits), by


def _at_hand(samples: torch.Tensor) -> torch.Tensor:
    """The same [samples, columns]; long rows are materialised first, since a kernel that holds one whole would pad it
    to the next power of two and compute an activation for the padding."""
    if samples.shape[1] <= _LONG:
        return samples
    return samples.contiguous().as_strided(samples.shape, (samples.shape[1], 1))


def _scale(samples: torch.Tensor, eight_bits: torch.dtype) -> torch.Tensor:
    """`scale_of_rows`; of long rows by parts, each found by the kernel that computes it."""
    columns = samples.shape[1]
    part = columns & -columns  # the largest power of two that divides it
    if columns <= _LONG or part < _LEAST_PART:
        return scale_of_rows(samples, eight_bits)
    parts = samples.reshape(len(samples), columns // part, part)
    return scale_of_rows(parts.abs().amax(-1), eight_bits)
