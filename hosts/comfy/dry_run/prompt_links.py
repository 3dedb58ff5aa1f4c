"""How the nodes of a prompt hang together, as ComfyUI's API takes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Prompt = dict[str, dict[str, Any]]
"""Id of each node -> its `class_type` and `inputs`; subgraphs' ids look like "12:3"."""

_ANYTHING = ("*", "COMFY_MATCHTYPE_V3")


@dataclass(frozen=True)
class NodeKind:
    """A class of nodes.

    Attributes:
        makes: types of its outputs.
        is_output: ComfyUI runs it for its own sake, for it saves or shows something.
        is_api: it asks a service for which people pay.
    """

    makes: tuple[str, ...] = ()
    is_output: bool = False
    is_api: bool = False


_UNKNOWN = NodeKind()


@dataclass(frozen=True)
class Slot:
    """An output of a node."""

    node: str
    index: int

    @classmethod
    def of(cls, value: Any) -> Slot | None:
        """Of an input that is linked; None for a plain value."""
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
            return cls(value[0], value[1])
        return None


class Wiring:
    """
    Args:
        kinds: by the names of classes; one that is not in it makes nothing.
    """

    def __init__(self, prompt: Prompt, kinds: Mapping[str, NodeKind]) -> None:
        self.prompt = prompt
        self._kinds = kinds
        self._types: dict[Slot, str] = {}
        self._users: dict[Slot, list[str]] = defaultdict(list)
        self._followers: dict[str, list[str]] = defaultdict(list)
        for name in prompt:
            for slot in self.inputs(name).values():
                self._users[slot].append(name)
                self._followers[slot.node].append(name)

    def class_of(self, node: str) -> str:
        return str(self.prompt[node].get("class_type", ""))

    def kind_of(self, node: str) -> NodeKind:
        return self._kinds.get(self.class_of(node), _UNKNOWN)

    def inputs(self, node: str) -> dict[str, Slot]:
        """The linked inputs of a node, by name."""
        given = self.prompt[node].get("inputs", {})
        return {name: slot for name, value in given.items() if (slot := Slot.of(value)) is not None}

    def users(self, slot: Slot) -> list[str]:
        """Nodes that take an output."""
        return self._users.get(slot, [])

    def makes(self, node: str) -> list[str]:
        """Types of a node's outputs; one that takes on any type has that of the inputs, where these tell."""
        return [self.type_of(Slot(node, place)) for place in range(len(self.kind_of(node).makes))]

    def type_of(self, slot: Slot) -> str:
        """Type of an output; "*" where it takes on any."""
        if slot not in self._types:
            self._types[slot] = "*"  # for a loop of links
            self._types[slot] = self._type_of(slot)
        return self._types[slot]

    def _type_of(self, slot: Slot) -> str:
        if slot.node not in self.prompt:
            return ""
        kinds = self.kind_of(slot.node).makes
        kind = kinds[slot.index] if 0 <= slot.index < len(kinds) else ""
        if kind not in _ANYTHING:
            return kind
        behind = [self.type_of(source) for source in self.inputs(slot.node).values()]
        return "MODEL" if "MODEL" in behind else next((found for found in behind if found), "*")

    def ancestors(self, nodes: Iterable[str]) -> set[str]:
        """These nodes, and all that leads to them."""

        def sources(name: str) -> list[str]:
            return [slot.node for slot in self.inputs(name).values() if slot.node in self.prompt]

        return _reached((name for name in nodes if name in self.prompt), sources)

    def behind(self, nodes: Iterable[str]) -> set[str]:
        """These nodes, and all that they lead to."""
        return _reached(nodes, lambda name: self._followers.get(name, []))


def _reached(nodes: Iterable[str], neighbours: Callable[[str], Iterable[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += neighbours(name)
    return found
