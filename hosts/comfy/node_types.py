"""What the nodes that ComfyUI has loaded make."""

from __future__ import annotations

from typing import Any


def types_of_outputs() -> dict[str, tuple[str, ...]]:
    """Class of node -> types of its outputs; a list of choices counts as COMBO."""
    import nodes

    return {name: tuple(map(_word, _outputs(kind))) for name, kind in nodes.NODE_CLASS_MAPPINGS.items()}


def _outputs(kind: Any) -> tuple[Any, ...]:
    try:
        return tuple(kind.RETURN_TYPES or ())
    except Exception:  # whatever another pack's class raises: it has no part in ours
        return ()


def _word(kind: Any) -> str:
    return "COMBO" if isinstance(kind, (list, tuple)) else str(kind)
