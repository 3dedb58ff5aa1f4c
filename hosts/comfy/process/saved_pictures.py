"""The record of what ran, inside the pictures that ComfyUI saves.

ComfyUI hands the list of running prompts out as copies. So a record is put beside the workflow (`extra_pnginfo`) when a
prompt is queued, where every saving node finds it; its token leads from the copy back to the record.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from typing import Any

from .running_prompts import running_prompts

FIELD = "slipstream"
_TOKEN = "run"
_KEPT = 256

_records: OrderedDict[str, dict[str, Any]] = OrderedDict()


def record_run(what: dict[str, Any], node_id: str) -> None:
    """Add a sampling run to the record of the prompt that is running."""
    for prompt in running_prompts():
        copy = prompt.info.get(FIELD) or {}
        if (record := _records.get(copy.get(_TOKEN, ""))) is not None:
            record.setdefault(node_id, []).append(what)


def add_record(json_data: dict[str, Any]) -> dict[str, Any]:
    """Give a prompt with a node of ours a record; see `server_events.watch_prompts`."""
    nodes = json_data.get("prompt")
    if not isinstance(nodes, dict) or not any(map(_is_ours, nodes.values())):
        return json_data
    extra_data = json_data.setdefault("extra_data", {})
    info = extra_data.get("extra_pnginfo")
    if not isinstance(info, dict):
        info = extra_data["extra_pnginfo"] = {}
    record = info[FIELD] = {_TOKEN: uuid.uuid4().hex}
    _records[record[_TOKEN]] = record
    while len(_records) > _KEPT:
        _records.popitem(last=False)
    return json_data


def _is_ours(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("class_type", "")).startswith("Slipstream")
