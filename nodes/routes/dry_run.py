"""The route that turns a workflow into a test run, which builds a node's engines."""

from __future__ import annotations

import uuid
from typing import Any

from aiohttp import web

from .guard import Answer, Route, changes
from .rules import Refused

_BYTES = 16 * 1024 * 1024
"""Workflows may carry pictures inside."""


@changes("prompt", "node", most_bytes=_BYTES)
def dry_run(request: web.Request, fields: dict[str, Any]) -> Answer:
    from ...hosts.comfy.dry_run.build_prompt import dry_run_of
    from ...hosts.comfy.dry_run.node_types import loaded_kinds

    prompt, node = _checked(fields.get("prompt")), fields.get("node")
    if not isinstance(node, str):
        raise Refused("bad_request", 'node must be the id of a node, as text, such as "4".')
    try:
        made = dry_run_of(prompt, node, loaded_kinds(), uuid.uuid4().hex)
        _check_not_off(prompt[node])
    except ValueError as error:
        raise Refused("bad_request", f"{error}.") from None
    return {"prompt": made.prompt, "targets": made.targets, "estimate_s": _estimate(prompt[node])}


def _checked(prompt: Any) -> dict[str, dict[str, Any]]:
    """The prompt, once its structure is checked.

    Raises:
        Refused: no prompt as ComfyUI's API takes it.
    """
    if not isinstance(prompt, dict) or not all(map(_is_node, prompt.values())):
        raise Refused("bad_request", "prompt must map ids to nodes with class_type and inputs, as ComfyUI's API.")
    return prompt


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)


def _check_not_off(node: dict[str, Any]) -> None:
    """Check that acceleration is on for a node.

    Raises:
        ValueError: the node leaves its backend to the settings, and these switch acceleration off.
    """
    from ...hosts.comfy.process.shared_provider import provider
    from ...runtime.settings.model_settings import AUTO, Settings

    chosen = node["inputs"].get("backend", AUTO)
    if not isinstance(chosen, str):
        return  # another node decides, when it runs
    if provider().with_preferences(Settings.of_text(backend=chosen)).is_off:
        raise ValueError(
            "Acceleration is switched off in Slipstream's settings: choose another backend there, or in this node, "
            "then build"
        )


def _estimate(node: dict[str, Any]) -> float | None:
    """Seconds that a build with a node's choices takes on this machine, by earlier ones of the same kind of model; None
    where none was made."""
    from ...hosts.comfy.process.shared_provider import provider
    from ...runtime.planning.build_estimate import ROLES_OF_KIND, typical

    kind = _KINDS.get(node["class_type"], "unet")
    seconds = typical(provider().history, str(node["inputs"].get("optimize", "")), ROLES_OF_KIND[kind])
    return None if seconds is None else round(seconds, 1)


_KINDS = {
    "SlipstreamAccelerateControlNet": "controlnet",
    "SlipstreamAccelerateVAE": "vae",
    "SlipstreamAccelerateTextEncoder": "text_encoder",
}

ROUTES: list[Route] = [("POST", "/dry-run", dry_run)]
