"""Workflows as the page saves them, turned into prompts for ComfyUI's API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .graph import Graph

NOTES = ("Note", "MarkdownNote")
KINDS = ("required", "optional")
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
# Behind a seed the page puts a widget of its own, whether the node asks for it or not.
SEEDS = ("seed", "noise_seed")
AFTER_A_RUN = ("fixed", "increment", "decrement", "randomize")
_AFTER_A_RUN = "after a run: "

Json = dict[str, Any]


class BadWorkflow(Exception):
    """A workflow that the page could not show as it was meant."""


def nodes_of(workflow: Json) -> list[Json]:
    """The nodes that compute."""
    return [node for node in workflow["nodes"] if node["type"] not in NOTES]


def to_graph(workflow: Json, object_info: Json) -> Graph:
    """The prompt that the page would queue for a workflow; node ids stay.

    Args:
        object_info: what the server says of all its nodes.

    Raises:
        BadWorkflow: an unknown node, a node that does not take part, or widgets other than the node's.
    """
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    graph = Graph()
    for node in nodes_of(workflow):
        info = _info(node, object_info)
        linked = {slot["name"]: sources[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        inputs = {**widget_values(node, info), **linked}
        graph.prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return graph


def widget_values(node: Json, info: Json) -> Json:
    """A node's widgets by name; optional ones, which come last, may be missing.

    Raises:
        BadWorkflow: too few or too many values, or one that the widget does not take.
    """
    values, widgets = list(node.get("widgets_values", [])), _widgets(info)
    if not len(_widgets(info, ("required",))) <= len(values) <= len(widgets):
        raise BadWorkflow(f"{_name(node)} has {len(values)} values for the widgets {', '.join(widgets)}")
    for (name, takes), value in zip(widgets.items(), values, strict=False):
        if not takes(value):
            raise BadWorkflow(f"{_name(node)}: {name} cannot be {value!r}")
    found = dict(zip(widgets, values, strict=False))
    return {name: value for name, value in found.items() if not name.startswith(_AFTER_A_RUN)}


def _widgets(info: Json, kinds: Sequence[str] = KINDS) -> dict[str, Callable[[Any], bool]]:
    """A node's widgets in the page's order, and which values each takes."""
    widgets: dict[str, Callable[[Any], bool]] = {}
    for name, (kind, *options) in _inputs(info, kinds).items():
        settings = options[0] if options else {}
        if not _is_widget(kind) or settings.get("forceInput"):
            continue
        widgets[name] = functools.partial(_takes, kind, settings)
        if settings.get("control_after_generate") or (kind == "INT" and name in SEEDS):
            widgets[_AFTER_A_RUN + name] = AFTER_A_RUN.__contains__
    return widgets


def _takes(kind: Any, settings: Json, value: Any) -> bool:
    if isinstance(kind, list) or kind == "COMBO":
        return value in (kind if isinstance(kind, list) else settings["options"])
    if kind in ("INT", "FLOAT"):
        types = int if kind == "INT" else (int, float)
        return isinstance(value, types) and settings.get("min", value) <= value <= settings.get("max", value)
    return isinstance(value, bool if kind == "BOOLEAN" else str)


def _inputs(info: Json, kinds: Sequence[str]) -> Json:
    order = info["input_order"]
    return {name: info["input"][kind][name] for kind in kinds for name in order.get(kind, [])}


def _is_widget(kind: Any) -> bool:
    return isinstance(kind, list) or kind in WIDGETS


def _info(node: Json, object_info: Json) -> Json:
    if node["type"] not in object_info:
        raise BadWorkflow(f"{_name(node)} is no node of this ComfyUI")
    if node["mode"] != 0:
        raise BadWorkflow(f"{_name(node)} is muted or bypassed")
    return dict(object_info[node["type"]])


def _name(node: Json) -> str:
    return f"node {node['id']} ({node['type']})"
