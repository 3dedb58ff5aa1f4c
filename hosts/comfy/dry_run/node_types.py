"""What the nodes that ComfyUI has loaded make and do."""

from __future__ import annotations

from typing import Any

from .prompt_links import NodeKind


def loaded_kinds() -> dict[str, NodeKind]:
    """Each class of node that ComfyUI has, by name; a list of choices among its outputs counts as COMBO."""
    import nodes

    return {name: _kind(found) for name, found in nodes.NODE_CLASS_MAPPINGS.items()}


def _kind(found: Any) -> NodeKind:
    makes = tuple(map(_word, _read(found, "RETURN_TYPES") or ()))
    return NodeKind(makes, bool(_read(found, "OUTPUT_NODE")), bool(_read(found, "API_NODE")))


def _read(found: Any, name: str) -> Any:
    try:
        return getattr(found, name, None)
    except Exception:  # whatever another pack's class raises: it has no part in ours
        return None


def _word(kind: Any) -> str:
    return "COMBO" if isinstance(kind, (list, tuple)) else str(kind)
