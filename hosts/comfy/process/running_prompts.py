"""The prompts that ComfyUI's server is working on: as good as always one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .server_events import server_of_process


class RunningPrompt(NamedTuple):
    """
    Attributes:
        nodes: by their ids, as they were queued.
        info: what is saved with pictures; may be a copy.
    """

    nodes: Mapping[str, Any]
    info: Mapping[str, Any]

    @property
    def workflow(self) -> str | None:
        return workflow_of(self.info)


def running_prompts() -> list[RunningPrompt]:
    """None outside ComfyUI's server."""
    running = server.prompt_queue.currently_running if (server := server_of_process()) is not None else {}
    return [RunningPrompt(item[2], item[3].get("extra_pnginfo") or {}) for item in list(running.values())]


def workflow_of(extra_pnginfo: Any) -> str | None:
    """The id of the workflow on the page; programs that queue prompts send none.

    Args:
        extra_pnginfo: as ComfyUI hands it to nodes.
    """
    workflow = extra_pnginfo.get("workflow") if isinstance(extra_pnginfo, Mapping) else None
    found = workflow.get("id") if isinstance(workflow, Mapping) else None
    return str(found) if found else None
