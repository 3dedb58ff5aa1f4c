"""The common part of the Accelerate nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

HIDDEN = [io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo]
"""What these nodes ask of ComfyUI."""


def fingerprint(node: type[io.ComfyNode]) -> str:
    """What ComfyUI asks before it takes an Accelerate node's last output again; see `engines_that_came`."""
    from ...hosts.comfy.node_state.watched_nodes import engines_that_came

    return engines_that_came(str(node.hidden.unique_id))


def accelerated(
    node: type[io.ComfyNode], accelerate: Callable[..., Any], subject: Any, **choices: Any
) -> io.NodeOutput:
    """The output of an Accelerate node.

    Args:
        node: that runs.
        accelerate: given `subject`, a module with the user's choices, and who hears of its runs.
        choices: by the names of `Settings.of_text`.

    Raises:
        ValueError: a choice that is not offered.
    """
    from ...hosts.comfy.dry_run.build_prompt import is_dry_run
    from ...hosts.comfy.node_state.watched_nodes import run_ended, watch
    from ...hosts.comfy.process.saved_pictures import record_run
    from ...hosts.comfy.process.shared_provider import provider
    from ...runtime.module import AcceleratedModule
    from ...runtime.settings.model_settings import Settings

    hidden = node.hidden
    module = AcceleratedModule(provider(), Settings.of_text(**choices), by_hand=is_dry_run(hidden.prompt))
    watch(module, hidden.unique_id, hidden.extra_pnginfo)
    node_id = str(hidden.unique_id)

    def after_run(what: dict[str, Any]) -> None:
        record_run(what, node_id)
        run_ended(module, node_id)

    return io.NodeOutput(accelerate(subject, module, after_run))
