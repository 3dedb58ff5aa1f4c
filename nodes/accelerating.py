"""What the Accelerate nodes do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io


def accelerated(
    node: type[io.ComfyNode], accelerate: Callable[..., Any], subject: Any, **choices: Any
) -> io.NodeOutput:
    """
    Args:
        node: that runs.
        accelerate: given `subject`, a module with the user's choices, and who hears of its runs.
        choices: by the names of `Settings.of_text`.

    Raises:
        ValueError: a choice that is not offered.
    """
    from ..hosts.comfy.host import provider
    from ..hosts.comfy.pictures import record_run
    from ..runtime.module import AcceleratedModule
    from ..runtime.settings import Settings

    module = AcceleratedModule(provider(), Settings.of_text(**choices))
    node_id = str(node.hidden.unique_id)
    return io.NodeOutput(accelerate(subject, module, lambda what: record_run(what, node_id)))
