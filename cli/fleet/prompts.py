"""Workflows, as ComfyUI's page saves them or as its API takes them, turned into prompts for the API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CommandError

Json = dict[str, Any]

_OURS = (
    "SlipstreamAccelerateModel",
    "SlipstreamAccelerateControlNet",
    "SlipstreamAccelerateVAE",
    "SlipstreamAccelerateTextEncoder",
    "SlipstreamBuildEngine",
)
_NOTES = ("Note", "MarkdownNote")
_MUTED, _BYPASSED = 2, 4
_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
_SEEDS = ("seed", "noise_seed")
_AFTER_A_RUN = ("fixed", "increment", "decrement", "randomize")
"""Values of the widget that the page puts behind a seed."""


def our_nodes(prompt: Mapping[str, Any]) -> list[str]:
    """Ids of the nodes that have engines built."""
    return [name for name, node in prompt.items() if node["class_type"] in _OURS]


def prompt_of(data: Any, object_info: Mapping[str, Any]) -> Json:
    """The prompt of a workflow file.

    Args:
        data: what the file holds.
        object_info: what ComfyUI says of all its nodes.

    Raises:
        CommandError: it is no workflow, or uses what only the page can turn into a prompt.
    """
    if isinstance(data, dict) and isinstance(data.get("prompt"), dict):
        data = data["prompt"]
    if isinstance(data, dict) and data and all(_is_prompt_node(node) for node in data.values()):
        return data
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list) or not isinstance(data.get("links"), list):
        raise CommandError("The file is no workflow: save it in ComfyUI by Save, or by Export (API)")
    try:
        return _Page(data, object_info).prompt()
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise CommandError(
            f"The workflow cannot be read ({type(error).__name__}: {error}); save it in ComfyUI by Export (API)"
        ) from error


def _is_prompt_node(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)


class _Page:
    """A workflow as the page saves it."""

    def __init__(self, data: Json, object_info: Mapping[str, Any]) -> None:
        self._nodes = {node["id"]: node for node in data["nodes"]}
        self._sources = {link[0]: (link[1], link[2], link[5]) for link in map(_link, data["links"])}
        self._info = object_info

    def prompt(self) -> Json:
        return {str(node["id"]): self._prompt_node(node) for node in self._nodes.values() if self._takes_part(node)}

    def _takes_part(self, node: Json) -> bool:
        passes = node["type"] in (*_NOTES, "Reroute", "PrimitiveNode")
        return not passes and node.get("mode", 0) not in (_MUTED, _BYPASSED)

    def _prompt_node(self, node: Json) -> Json:
        if node["type"] not in self._info:
            raise CommandError(
                f"This ComfyUI has no node {node['type']} (node {node['id']}): install its pack, or where it is a "
                "subgraph, save the workflow by Export (API)"
            )
        inputs = dict(self._widget_values(node))
        for slot in node.get("inputs") or ():
            if slot.get("link") is not None:
                inputs.pop(slot["name"], None)
                found = self._source(slot["link"])
                if found is not None:
                    inputs[slot["name"]] = found
        return {"class_type": node["type"], "inputs": inputs}

    def _source(self, link: int) -> Any:
        """What a link brings: a node's result, a value, or None where its node does not take part."""
        name, slot, kind = self._sources[link]
        node = self._nodes[name]
        if node["type"] == "PrimitiveNode":
            return node["widgets_values"][0]
        if node["type"] == "Reroute" or node.get("mode", 0) == _BYPASSED:
            alike = [each for each in node.get("inputs") or () if node["type"] == "Reroute" or each["type"] == kind]
            linked = next((each["link"] for each in alike if each.get("link") is not None), None)
            return None if linked is None else self._source(linked)
        return None if node.get("mode", 0) == _MUTED else [str(name), slot]

    def _widget_values(self, node: Json) -> Iterator[tuple[str, Any]]:
        values = node.get("widgets_values") or []
        if isinstance(values, dict):
            yield from values.items()
            return
        left = list(values)
        for name, kind, options in self._inputs(node["type"]):
            if not (isinstance(kind, list) or kind in _WIDGETS) or options.get("forceInput") or not left:
                continue
            yield name, left.pop(0)
            has_more = options.get("control_after_generate") or (kind == "INT" and name in _SEEDS)
            if has_more and left and left[0] in _AFTER_A_RUN:
                left.pop(0)

    def _inputs(self, kind: str) -> Iterator[tuple[str, Any, Json]]:
        info = self._info[kind]
        for group in ("required", "optional"):
            for name in info.get("input_order", {}).get(group, info["input"].get(group, {})):
                kind_of_input, *options = info["input"][group][name]
                yield name, kind_of_input, options[0] if options and isinstance(options[0], dict) else {}


def _link(link: Any) -> list[Any]:
    if isinstance(link, dict):  # as newer pages may save it
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        return [link[name] for name in names]
    return list(link)
