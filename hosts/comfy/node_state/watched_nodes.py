"""What nodes make is known to the page from the moment that they run."""

from __future__ import annotations

import functools
from typing import Any

from ....runtime.module import AcceleratedModule
from ..process.running_prompts import running_prompts, workflow_of
from ..process.server_events import send
from ..process.shared_provider import provider
from .announcer import Announcer
from .node_states import REGISTRY, NodeAddress

_WANTED: set[str] = set()
"""Digests of all engines that nodes of this process have asked for."""


@functools.lru_cache(maxsize=1)
def announcer() -> Announcer:
    """The one announcer of this process, for its one provider."""
    return Announcer(provider(), send)


def changed() -> None:
    """Something ran: what nodes say may be another."""
    announcer().wake()


def engines_that_came() -> str:
    """Another text once an engine is there that a node lacked when it ran: then it is to run again, on the engine."""
    store = provider().store
    return ",".join(sorted(digest for digest in _WANTED if store.lookup(digest) is not None))


def _hear(module: AcceleratedModule) -> None:
    _WANTED.update(module.status.wanted)
    announcer().wake()


def watch(module: AcceleratedModule, node: Any, extra_pnginfo: Any) -> None:
    """Let the page know what `module` does.

    Args:
        node: id of the node that made it.
        extra_pnginfo: as ComfyUI hands it to nodes.
    """
    place = NodeAddress(workflow_of(extra_pnginfo), str(node))
    module.status.on_change = functools.partial(_hear, module)
    module.status.on_run = functools.partial(_take_place, module, place)
    REGISTRY.register(place, module)
    announcer().wake()


def _take_place(module: AcceleratedModule, made_at: NodeAddress) -> None:
    """A run begins, perhaps in another prompt than the one that `module` was made in: ComfyUI keeps what nodes make,
    and a dry run, or a copy of the workflow, has nodes of the same ids."""
    prompts = [prompt for prompt in running_prompts() if made_at.node in prompt.nodes]
    for place in [NodeAddress(prompt.workflow, made_at.node) for prompt in prompts] or [made_at]:
        REGISTRY.register(place, module)
    announcer().wake()
