"""Gated feed-forward blocks (GEGLU) between two fp8 layers, in a kernel of our own: reduces memory traffic and compute.

The compiler writes the gate's output in half precision, finds the largest value of each row, and reads it again to
quantise it; `geglu_rows` does all that in one kernel.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ...core.eight_bits import FP8
from .eight_bits import fp8_linear, fp8_product, in_eight_bits, of_product
from .graph import Graph, argument, aten, is_call, shape_of
from .row_parts import parts_of


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda"


def fuse_gates(graph: Graph) -> None:
    """Replace GEGLU between two fp8 layers of the graph by the fused kernel."""
    _drop_dropout(graph)
    for narrow in graph.calls(fp8_linear):
        wide = _gated(graph, narrow.args[0])
        if wide is not None and parts_of(shape_of(wide)[-1] // 2):
            graph.replace(narrow, fp8_feed_forward, *wide.args, *narrow.args[1:4])


def fp8_feed_forward(
    x: torch.Tensor,
    wide: torch.Tensor,
    wide_scale: torch.Tensor,
    wide_bias: torch.Tensor,
    one: torch.Tensor,
    narrow: torch.Tensor,
    narrow_scale: torch.Tensor,
    narrow_bias: torch.Tensor | None,
) -> torch.Tensor:
    """`fp8_linear`, GEGLU and `fp8_linear`; see there."""
    from .geglu_rows import geglu_rows

    y = fp8_product(*in_eight_bits(x, FP8), wide, wide_scale, one)
    small, by = geglu_rows(y, wide_bias)
    return of_product(fp8_product(small, by, narrow, narrow_scale, one), x, narrow_bias)


def _drop_dropout(graph: Graph) -> None:
    """Remove dropout, which is off in inference but counts as random and would block the match."""
    for node in graph.calls(aten.dropout.default):
        given = node.args[0]
        if not node.args[2] and isinstance(given, Node):
            node.replace_all_uses_with(given)
            graph.module.graph.erase_node(node)


def _gated(graph: Graph, node: Any) -> Node | None:
    """The fp8 layer of whose output `node` is one half times GELU of the other; None unless it is the only reader."""
    if not _alone(node, aten.mul.Tensor):
        return None
    for half, activated in (node.args, node.args[::-1]):
        if _alone(activated, aten.gelu.default) and activated.kwargs.get("approximate", "none") == "none":
            wide = _halved(half, activated.args[0])
            if wide is not None and _suits(graph, wide):
                return wide
    return None


def _halved(first: Any, second: Any) -> Node | None:
    """The fp8 layer whose result's two halves these are."""
    if not (_alone(first, operator.getitem) and _alone(second, operator.getitem)):
        return None
    chunks = first.args[0]
    halves = second.args[0] is chunks and (first.args[1], second.args[1]) == (0, 1)
    if not halves or not is_call(chunks, aten.chunk.default, aten.split.Tensor) or len(chunks.users) != 2:
        return None
    wide = chunks.args[0]
    along = argument(chunks, 2, "dim", 0)
    is_last = _alone(wide, fp8_linear) and along in (-1, len(shape_of(wide)) - 1)
    return wide if is_last and len(chunks.meta["val"]) == 2 else None


def _suits(graph: Graph, wide: Node) -> bool:
    """Whether its bias is a weight with one element for each column, and its product is already scaled."""
    x, bias = wide.args[0], graph.weight(wide.args[3])
    widens = isinstance(x, Node) and shape_of(wide)[-1] > shape_of(x)[-1]
    return widens and bias is not None and tuple(bias.shape) == shape_of(wide)[-1:]


def _alone(node: Any, *operators: Any) -> bool:
    """Whether it calls one of `operators`, and exactly one node reads its result."""
    return is_call(node, *operators) and len(node.users) == 1
