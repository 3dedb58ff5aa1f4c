"""What nodes make is known to the page from the moment that they run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ...runtime.module import AcceleratedModule
from .announce import Announcer
from .host import provider
from .node_states import REGISTRY, Place
from .page import send


@functools.lru_cache(maxsize=1)
def announcer() -> Announcer:
    """The one announcer of this process, for its one provider."""
    return Announcer(provider(), send)


def changed() -> None:
    """Something ran: what nodes say may be another."""
    announcer().wake()


def watch(module: AcceleratedModule, node: Any, extra_pnginfo: Any) -> None:
    """Let the page know what `module` does.

    Args:
        node: id of the node that made it.
        extra_pnginfo: as ComfyUI hands it to nodes.
    """
    module.status.on_change = announcer().wake
    REGISTRY.register(Place(_workflow_of(extra_pnginfo), str(node)), module)
    announcer().wake()


def _workflow_of(extra_pnginfo: Any) -> str | None:
    """The id of the workflow on the page; programs that queue prompts send none."""
    workflow = extra_pnginfo.get("workflow") if isinstance(extra_pnginfo, Mapping) else None
    found = workflow.get("id") if isinstance(workflow, Mapping) else None
    return str(found) if found else None
