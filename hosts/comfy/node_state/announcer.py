"""Tells the page what goes on: builds as they run and end, and what nodes have to say."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ....core.spec import Role
from ....runtime.building.build_queue import ENDED, Ticket, TicketState
from ....runtime.provider import EngineProvider
from ....runtime.reporting.build_info import describe_build
from ..dry_run.prompt_walks import WALKS
from ..process.running_prompts import running_prompts
from .node_states import REGISTRY, NodeAddress, NodeRegistry

log = logging.getLogger(__name__)

BUILDS, NODES, RESULT = "slipstream.builds", "slipstream.nodes", "slipstream.result"
Send = Callable[[str, Mapping[str, Any]], None]

_BUILDING = {*WALKS, "SlipstreamBuildEngine"}
"""Classes of nodes that have engines built."""

_INTERVAL = 0.25
"""Seconds from a change until the page is told: changes come together, and most in a picture's first step, in which the
GPU waits for this process."""

_COMPARING_SECONDS = 10.0
"""How long the news of an engine may wait until it was compared, where somebody waits for that."""


class _Ended(NamedTuple):
    """
    Attributes:
        places: see `concerned`.
        when: by `time.monotonic`.
    """

    ticket: Ticket
    places: list[NodeAddress]
    when: float


class Announcer:
    """Sends what changed, from a thread of its own: nobody who builds or samples waits for the page.

    Args:
        send: given an event's name and data.
    """

    def __init__(self, provider: EngineProvider, send: Send, registry: NodeRegistry = REGISTRY) -> None:
        self._provider, self._send, self._registry = provider, send, registry
        self._woken = threading.Event()
        self._ended: deque[_Ended] = deque()
        self._told: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._builds: list[dict[str, Any]] = []
        self._nodes: dict[tuple[Any, Any], dict[str, Any]] = {}
        for queue in provider.queues:
            queue.listen(self._hear)
        threading.Thread(target=self._work, daemon=True, name="slipstream-announce").start()

    def wake(self) -> None:
        """Look soon for what changed. Quick, from any thread."""
        self._woken.set()

    def _hear(self, ticket: Ticket) -> None:
        if ticket.state in ENDED and ticket not in self._told:
            self._told.add(ticket)
            self._ended.append(_Ended(ticket, concerned(ticket, self._registry), time.monotonic()))
        self.wake()

    def _work(self) -> None:
        while True:
            goes_on = bool(self._builds or self._ended)
            self._woken.wait(_INTERVAL if goes_on else None)
            time.sleep(_INTERVAL)
            self._woken.clear()
            try:
                self._tell()
            except Exception:  # whatever an engine's files or ComfyUI's server raise: the next round may do
                log.debug("Slipstream: the page could not be told", exc_info=True)

    def _tell(self) -> None:
        found = builds(self._provider, self._registry)
        if found != self._builds:
            self._builds = found
            self._send(BUILDS, {"builds": found, "policy": policy()})
        for _ in range(len(self._ended)):
            ended = self._ended.popleft()
            if self._is_to_be_compared(ended.ticket) and time.monotonic() - ended.when < _COMPARING_SECONDS:
                self._ended.append(ended)
            else:
                self._send(RESULT, result(ended.ticket, ended.places, self._provider))
        self._tell_nodes()

    def _tell_nodes(self) -> None:
        now = {(state["workflow"], state["node"]): state for state in self._registry.to_json()}
        changed = [state for place, state in now.items() if state != self._nodes.get(place)]
        self._nodes = now
        if changed:
            self._send(NODES, {"nodes": changed, "saved_ms": saved_ms(self._provider)})

    def _is_to_be_compared(self, ticket: Ticket) -> bool:
        digest = ticket.plan.key.digest
        if ticket.state is not TicketState.DONE or not ticket.urgent or self._registry.is_used(digest):
            return False
        if ticket.plan.spec.role is Role.BLOCK:  # it is compared in the calls of its blocks
            return False
        entry = self._provider.store.lookup(digest)
        if entry is None or self._provider.what_is_wrong(entry) is not None:
            return False
        return not entry.manifest.verifications


def builds(provider: EngineProvider, registry: NodeRegistry = REGISTRY) -> list[dict[str, Any]]:
    """Builds that wait or run, as the page gets them."""
    return [_build(ticket, queue.is_held(ticket), registry) for queue in provider.queues for ticket in queue.pending()]


def saved_ms(provider: EngineProvider) -> int:
    """Milliseconds that engines have saved since this process started; see `StepTimes.saved_ms`."""
    return 0 if provider.step_times is None else max(0, round(provider.step_times.saved_ms))


def policy() -> str:
    """When builds that nobody waits for run: "idle" or "always"."""
    from ..process.shared_provider import preferences

    return preferences().read().background.value


def concerned(ticket: Ticket, registry: NodeRegistry = REGISTRY) -> list[NodeAddress]:
    """The nodes that asked for a build; where a prompt waits for it, all that have engines built in that prompt."""
    asked = registry.waiting_for(ticket.plan.key.digest)
    found = dict.fromkeys(asked)
    for prompt in running_prompts() if ticket.urgent else []:
        kinds = {node: each.get("class_type") for node, each in prompt.nodes.items() if isinstance(each, Mapping)}
        places = [NodeAddress(prompt.workflow, node) for node, kind in kinds.items() if kind in _BUILDING]
        if any(place in asked for place in places):
            found |= dict.fromkeys(places)
    return list(found)


def result(ticket: Ticket, places: list[NodeAddress], provider: EngineProvider) -> dict[str, Any]:
    """How a build ended, as the page gets it: one whose engine was refused when it was compared has failed."""
    digest, label = ticket.plan.key.digest, str(ticket.plan)
    entry = provider.store.lookup(digest) if ticket.state is TicketState.DONE else None
    refusal = provider.what_is_wrong(entry) if entry is not None else None
    error = ticket.error or refusal
    word = {TicketState.DONE: "built", TicketState.CANCELLED: "cancelled"}.get(ticket.state, "failed")
    built = f"Built {label} in {ticket.seconds:.0f} s"
    return {
        "result": word if refusal is None else "failed",
        "id": digest,
        "label": label,
        "role": ticket.plan.spec.role.value,
        "seconds": round(ticket.seconds, 1),
        "message": built if error is None else str(error),
        "nodes": [place.to_json() for place in places],
    }


def _build(ticket: Ticket, held: bool, registry: NodeRegistry) -> dict[str, Any]:
    places = registry.waiting_for(ticket.plan.key.digest)
    return {**describe_build(ticket, held), "nodes": [place.to_json() for place in places]}
