"""Writes locales/en/nodeDefs.json, the nodes' names and tooltips as ComfyUI's page looks them up.

    python tools/locales.py http://127.0.0.1:8188

Asks a ComfyUI that runs with this pack in `custom_nodes/slipstream`. The texts are those of the nodes themselves;
translations (locales/zh) are written by hand with the same keys.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULE = "custom_nodes.slipstream"
LIVE = ("preset",)
"""Inputs whose tooltip also tells what the user has saved, so that no file may take its place in English."""

Json = dict[str, Any]


def own_nodes(object_info: Json) -> Json:
    """The nodes of this pack, of what `/object_info` answers."""
    return {name: info for name, info in sorted(object_info.items()) if info["python_module"] == MODULE}


def inputs_of(info: Json) -> Json:
    """A node's inputs by name, each with its settings."""
    kinds = (info["input"].get(kind, {}) for kind in ("required", "optional"))
    return {name: (spec[1] if len(spec) > 1 else {}) for kind in kinds for name, spec in kind.items()}


def node_defs(object_info: Json) -> Json:
    """The content of locales/en/nodeDefs.json."""
    return {name: _node(info) for name, info in own_nodes(object_info).items()}


def _node(info: Json) -> Json:
    inputs = {name: _input(name, settings) for name, settings in inputs_of(info).items()}
    outputs = {str(index): _output(info, index) for index in range(len(info["output"]))}
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": inputs,
        "outputs": outputs,
    }


def _input(name: str, settings: Json) -> Json:
    tooltip = settings.get("tooltip")
    return {"name": name} | ({"tooltip": tooltip} if tooltip and name not in LIVE else {})


def _output(info: Json, index: int) -> Json:
    """An output that is called by its type is named by the page itself."""
    name, tooltip = info["output_name"][index], info["output_tooltips"][index]
    return ({"name": name} if name != info["output"][index] else {}) | ({"tooltip": tooltip} if tooltip else {})


def as_text(content: Json) -> str:
    """JSON as it lies in the repository."""
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with urllib.request.urlopen(f"{arguments[0].rstrip('/')}/object_info", timeout=60) as answer:
        found = node_defs(json.load(answer))
    file = ROOT / "locales" / "en" / "nodeDefs.json"
    file.write_text(as_text(found), encoding="utf-8")
    print(f"{len(found)} nodes in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
