"""What nodes make is known to the page from the moment that they run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from ....runtime.module import AcceleratedModule
from ..process.running_prompts import running_prompts, workflow_of
from ..process.server_events import send
from ..process.shared_provider import provider
from .announcer import Announcer
from .node_states import REGISTRY, NodeAddress


@dataclass
class _Engines:
    """Digests of engines that runs behind a node went without.

    Attributes:
        missed: that are not there yet.
        came: that came since. They stay in this set, since a node runs again whenever what it says of them changes.
    """

    missed: set[str] = field(default_factory=set)
    came: set[str] = field(default_factory=set)


_engines: dict[str, _Engines] = {}
"""By the node's id, whichever workflow it is in: ComfyUI tells no more before a node runs."""


@functools.lru_cache(maxsize=1)
def announcer() -> Announcer:
    """The one announcer of this process, for its one provider."""
    return Announcer(provider(), send)


def engines_that_came(node: str) -> str:
    """Another text once an engine is there that runs behind a node went without: it is to run again then, on the
    engine.
    """
    known = _engines.get(node)
    if known is None:
        return ""
    came = {digest for digest in [*known.missed] if provider().store.trusted(digest) is not None}
    known.missed -= came
    known.came |= came
    return ",".join(sorted(known.came))


def run_ended(module: AcceleratedModule, node: str) -> None:
    """Remember which engines the run went without, and let the page know."""
    wanted = {*module.status.last_run.wanted.values()}
    if missed := {digest for digest in wanted if provider().store.trusted(digest) is None}:
        _engines.setdefault(node, _Engines()).missed |= missed
    announcer().wake()


def watch(module: AcceleratedModule, node: Any, extra_pnginfo: Any) -> None:
    """Let the page know what `module` does.

    Args:
        node: id of the node that made it.
        extra_pnginfo: as ComfyUI hands it to nodes.
    """
    place = NodeAddress(workflow_of(extra_pnginfo), str(node))
    module.status.on_change = announcer().wake
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
