"""Linear layers of one input joined into one: reduces launch overhead and memory traffic.

These are query, key and value of an attention, keys and values of all attentions over the text, and what all blocks
make of the time's embedding. The joined weights are copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from .derived_weights import DerivedWeight
from .graph import Graph, argument, aten, shape_of

_FEW = 512

_OF_ONE_INPUT = (aten.silu.default, aten.gelu.default, aten.reshape.default, aten.to.dtype)
"""What several layers do to one input, each for itself."""


def join_linears(graph: Graph, most_bytes: int) -> None:
    """Join linear layers that share an input, those first that save most time for their size.

    Args:
        most_bytes: the most memory that all copies of weights may take.
    """
    _compute_once(graph)
    for group in sorted(_groups(graph), key=lambda group: group.bytes / group.gain):
        if group.bytes <= most_bytes:
            most_bytes -= group.bytes
            _join(graph, group)


def _compute_once(graph: Graph) -> None:
    known: dict[object, Node] = {}
    for node in graph.calls(*_OF_ONE_INPUT):
        if graph.is_written(node):
            continue
        same = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.module.graph.erase_node(node)


@dataclass(frozen=True)
class _Group:
    nodes: tuple[Node, ...]
    bytes: int

    @property
    def gain(self) -> float:
        """In launches saved. Layers of few samples, as a text or a time has, are nothing but launch; of the others a
        part of the time is computing, which stays."""
        x = self.nodes[0].args[0]
        assert isinstance(x, Node)
        samples = x.meta["val"].numel() // shape_of(x)[-1]
        return (len(self.nodes) - 1) * (1.0 if samples <= _FEW else 0.5)


def _groups(graph: Graph) -> Iterator[_Group]:
    found: dict[tuple[Node, bool], list[Node]] = {}
    for node in graph.calls(aten.linear.default):
        bias, weight = argument(node, 2, "bias"), graph.weight(node.args[1])
        is_ours = weight is not None and weight.ndim == 2 and (bias is None or graph.weight(bias) is not None)
        if is_ours and not graph.is_written(node):
            assert isinstance(node.args[0], Node)
            found.setdefault((node.args[0], bias is None), []).append(node)
    for nodes in found.values():
        if len(nodes) > 1:
            weights = [graph.weight(node.args[1]) for node in nodes]
            yield _Group(tuple(nodes), sum(weight.nbytes for weight in weights if weight is not None))


def _join(graph: Graph, group: _Group) -> None:
    first = group.nodes[0]
    sizes = [shape_of(node)[-1] for node in group.nodes]
    with graph.module.graph.inserting_before(first):
        weight = _stacked(graph, [node.args[1] for node in group.nodes])
        biases = [argument(node, 2, "bias") for node in group.nodes]
        bias = None if biases[0] is None else _stacked(graph, biases)
        whole = graph.module.graph.call_function(aten.linear.default, (first.args[0], weight, bias))
        x = first.meta["val"]
        whole.meta["val"] = x.new_empty((*x.shape[:-1], sum(sizes)), device="meta")
        parts = []
        for index, size in enumerate(sizes):
            start = sum(sizes[:index])
            parts.append(graph.module.graph.call_function(aten.slice.Tensor, (whole, -1, start, start + size)))
            parts[-1].meta["val"] = group.nodes[index].meta["val"]
    for node, part in zip(group.nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.module.graph.erase_node(node)


def _stacked(graph: Graph, nodes: list[object]) -> Node:
    tensors = [graph.weight(node) for node in nodes]
    rows = sum(len(tensor) for tensor in tensors if tensor is not None)
    example = tensors[0]
    assert isinstance(example, torch.Tensor)
    names = tuple(str(node.target) for node in nodes if isinstance(node, Node))
    return graph.derive(DerivedWeight(names), (rows, *example.shape[1:]), example.dtype)
