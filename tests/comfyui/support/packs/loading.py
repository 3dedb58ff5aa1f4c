"""A pack in this process, loaded by ComfyUI's own loader; its nodes are called as ComfyUI calls them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream.benchmarks.in_server.probe.stand_ins import lend

VARIABLE = "SLIPSTREAM_PACKS"
TOGETHER = "all packs together"
"""In the place of one pack: all that can be loaded, in one ComfyUI."""


CORE = "ComfyUI"
"""In the place of one pack: the nodes that ComfyUI itself brings along."""


def packs_folder() -> Path:
    """The folder that holds one folder a pack, as `custom_nodes` does."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/slipstream/packs").expanduser()


def all_packs() -> list[str]:
    """The names of the packs that are there."""
    folder = packs_folder()
    return sorted(pack.name for pack in folder.iterdir() if pack.is_dir()) if folder.is_dir() else []


def commit_of(pack: Path) -> str:
    """The commit that is checked out, or "unknown" where the folder is no checkout."""
    if not (pack / ".git").exists():
        return "unknown"
    asked = subprocess.run(
        ["git", "-C", str(pack), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


class PackFailed(Exception):
    """A pack, by itself, cannot do what was asked of it in this ComfyUI."""


def load(pack: Path, base: Path, lent: Iterable[str] = ()) -> None:
    """Have ComfyUI load a copy of a pack; `lent` names that it imports and never calls are put where they are missing.

    Raises:
        PackFailed: With the last line of what the loader said.
    """
    nodes = _nodes()
    for name in lent:
        lend(name)
    copied = base / "custom_nodes" / pack.name
    shutil.copytree(pack, copied, ignore=shutil.ignore_patterns(".git"))
    with _Said() as said:
        if not asyncio.run(nodes.load_custom_node(str(copied))):
            raise PackFailed(f"ComfyUI could not import {pack.name}: {said.error}")


def load_core() -> None:
    """Have ComfyUI load its own nodes of `comfy_extras`; those whose libraries this machine lacks stay out.

    Raises:
        PackFailed: with the last line of what the loader said.
    """
    nodes = _nodes()
    extras = Path(nodes.__file__).parent / "comfy_extras"
    with _Said() as said:
        loaded = [
            asyncio.run(nodes.load_custom_node(str(file), module_parent="comfy_extras"))
            for file in sorted(extras.glob("nodes_*.py"))
        ]
    if not any(loaded):
        raise PackFailed(f"ComfyUI could not import its own nodes: {said.error}")


def _nodes() -> Any:
    """ComfyUI's `nodes`, with a server that packs may add routes to."""
    # As ComfyUI's main module does: `nodes` puts a folder first that has a `utils` of its own.
    importlib.import_module("utils.extra_config")
    import server

    if getattr(server.PromptServer, "instance", None) is None:
        server.PromptServer(asyncio.new_event_loop())
    return importlib.import_module("nodes")


class _Said(logging.Handler):
    """Keeps the last line of the last traceback that was logged."""

    error = "no reason given"

    def __enter__(self) -> _Said:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message."""
        if (message := record.getMessage()).startswith("Traceback"):
            self.error = message.strip().rpartition("\n")[2]


def call(node: str, **given: Any) -> Any:
    """Run a node with the defaults of its widgets, and return its first output."""
    return call_all(node, **given)[0]


def call_all(node: str, **given: Any) -> tuple[Any, ...]:
    """Run a node with the defaults of its widgets, and return all of its outputs."""
    import nodes

    kind = nodes.NODE_CLASS_MAPPINGS[node]
    declared = kind.INPUT_TYPES()
    inputs = {
        name: _default(*spec)
        for group in ("required", "optional")
        for name, spec in declared.get(group, {}).items()
        if group == "required" or _is_widget(*spec)
    }
    if hasattr(kind, "PREPARE_CLASS_CLONE"):
        made = kind.PREPARE_CLASS_CLONE(None)
        return tuple(getattr(made, kind.FUNCTION)(**{**inputs, **given}).args)
    found = getattr(kind(), kind.FUNCTION)(**{**inputs, **given})
    return tuple(found["result"] if isinstance(found, dict) else found)


def _is_widget(kind: Any, options: dict[str, Any] | None = None) -> bool:
    """Whether ComfyUI's page shows the input on the node, and so always sends a value."""
    return isinstance(kind, list | tuple) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def _default(kind: Any, options: dict[str, Any] | None = None) -> Any:
    if options and "default" in options:
        return int(options["default"]) if kind == "INT" else options["default"]
    choices = kind if isinstance(kind, list | tuple) else (options or {}).get("options")
    return choices[0] if choices else None
