"""A traced model whose operations can be replaced by functions written in torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...core.placeholder import views_of_one_buffer
from .derived_weights import DerivedWeight
from .traced_module import tensor_of

aten = torch.ops.aten

_PREFIX = "derived_"


class Graph:
    """A traced model, its derived weights, and the ways in which passes change it.

    Args:
        module: as `torch.export` gives it; weights are attributes under their names in the state dict.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.derived: dict[str, DerivedWeight] = {}
        self._memory = written_memory(module.graph)
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def calls(self, *operators: Any) -> Iterator[Node]:
        """Nodes that call one of `operators`; the graph may be changed meanwhile."""
        for node in list(self.module.graph.nodes):
            if is_call(node, *operators):
                yield node

    def is_written(self, node: Node) -> bool:
        """Whether anything writes into what a node reads or gives, which then is not the same before and after."""
        return any(each in self._memory for each in (node, *node.all_input_nodes))

    def weight(self, node: Any) -> torch.Tensor | None:
        """The placeholder tensor of a node; None where it is no weight of the host's."""
        if not isinstance(node, Node) or node.op != "get_attr" or node.target in self.derived:
            return None
        found = tensor_of(self.module, str(node.target))
        return found if isinstance(found, torch.nn.Parameter) else None

    def replace(self, node: Node, function: Callable[..., torch.Tensor], *args: Any) -> None:
        """Replace a node by a call of `function` with `args`, which may be nodes."""
        with self.module.graph.inserting_before(node):
            new = self.module.graph.call_function(function, args)
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        self.module.graph.erase_node(node)

    def derive(self, weight: DerivedWeight, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        """A node for a weight that is made of the host's; to be used in what is inserted where the graph stands."""
        name = next((name for name, known in self.derived.items() if known == weight), None)
        if name is None:
            name = f"{_PREFIX}{len(self.derived)}"
            self.derived[name] = weight
            self._shapes[name] = shape, dtype
            self.module.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
        node = self.module.graph.get_attr(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def finish(self, device: torch.device) -> GraphModule:
        """The module, with places for derived weights, which take next to no memory."""
        for dtype in {dtype for _, dtype in self._shapes.values()}:
            names = [name for name, described in self._shapes.items() if described[1] == dtype]
            views = views_of_one_buffer([self._shapes[name][0] for name in names], dtype, device)
            for name, view in zip(names, views, strict=True):
                self.module.register_buffer(name, view)
        self.module.graph.eliminate_dead_code()
        self.module.graph.lint()
        self.module.recompile()
        return self.module


def written_memory(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that stand for memory which some operation of the graph writes into, views of it included."""
    owner: dict[Node, Node] = {}
    written: set[Node] = set()
    for node in graph.nodes:
        owner[node] = _owner(node, owner)
        written |= {owner[each] for each in _written_by(node)}
    return {node for node in owner if owner[node] in written}


def _owner(node: Node, owner: dict[Node, Node]) -> Node:
    """The first node whose memory a node's result lies in, by what the operators' schemas say."""
    if is_call(node, operator.getitem):
        source = node.args[0]
        return owner[source] if isinstance(source, Node) else node
    for result in _schema(node).returns if _schema(node) else ():
        for alias, given in _aliased(node):
            if result.alias_info is not None and alias.before_set & result.alias_info.before_set:
                return owner[given]
    return node


def _written_by(node: Node) -> Iterator[Node]:
    yield from (given for alias, given in _aliased(node) if alias.is_write)


def _aliased(node: Node) -> Iterator[tuple[Any, Node]]:
    """Arguments that a call writes into, or gives a view of."""
    schema = _schema(node)
    for place, described in enumerate(schema.arguments if schema else ()):
        given = argument(node, place, described.name)
        if described.alias_info is not None:
            yield from ((described.alias_info, each) for each in _nodes_of(given))


def _nodes_of(given: Any) -> Iterator[Node]:
    for each in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(each, Node):
            yield each


def _schema(node: Node) -> Any:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def is_call(node: Any, *operators: Any) -> bool:
    """Whether an argument is a node that calls one of `operators`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in operators


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def argument(node: Node, index: int, name: str, otherwise: Any = None) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, otherwise)
