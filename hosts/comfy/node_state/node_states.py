"""What the nodes on the page have to say of themselves: one short line each."""

from __future__ import annotations

import textwrap
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....core.formatting import say_times
from ....core.spec import Precision, Role
from ....engine_cache import Entry
from ....runtime.building.build_queue import ENDED, BuildQueue, Ticket, TicketState
from ....runtime.checking.step_times import BLOCKS_NOT_USED, SO_NOT_USED, timed_by
from ....runtime.module import AcceleratedModule
from ....runtime.planning.build_estimate import say_roughly
from ....runtime.planning.plan import say_sizes
from ....runtime.reporting.build_info import fraction_of, seconds_left
from ....runtime.reporting.status import LastRun, Standing
from ....runtime.settings.model_settings import SWITCHED_OFF, BackendChoice, BuildPolicy
from .ways_out import way_out

TEXT_LENGTH = 72
_KEPT = 256
_BACKENDS = {"tensorrt": "TensorRT"}
_IDLE = "waits until ComfyUI is idle"
_CHANGED = "settings changed, the next run asks for another engine"


class NodeAddress(NamedTuple):
    """Where a node stands: its workflow's id, where the page sends one, and its own."""

    workflow: str | None
    node: str

    def to_json(self) -> dict[str, str | None]:
        return {"node": self.node, "workflow": self.workflow}


@dataclass(frozen=True)
class NodeState:
    """See docs/web-api.md, *state*."""

    kind: str
    text: str
    tip: str = ""
    digest: str | None = None
    fraction: float | None = None
    left_s: float | None = None
    engine_ms: float | None = None
    eager_ms: float | None = None
    timed_by: str | None = None
    mend: str | None = None
    blocks_built: int | None = None
    blocks_wanted: int | None = None
    last_run_calls: int | None = None
    last_run_eager_calls: int | None = None
    without_graphs: bool = False


class NodeRegistry:
    """The modules that nodes of the page made last. They hold no tensors, so they may outlive what ComfyUI keeps."""

    def __init__(self) -> None:
        self._modules: OrderedDict[NodeAddress, AcceleratedModule] = OrderedDict()
        self._lock = threading.Lock()

    def register(self, place: NodeAddress, module: AcceleratedModule) -> None:
        """`module` takes the place of an earlier one."""
        with self._lock:
            self._modules.pop(place, None)
            self._modules[place] = module
            while len(self._modules) > _KEPT:
                self._modules.popitem(last=False)

    def modules(self) -> dict[NodeAddress, AcceleratedModule]:
        with self._lock:
            return dict(self._modules)

    def waiting_for(self, digest: str) -> list[NodeAddress]:
        """Nodes that asked for the build of an engine."""
        return [place for place, module in self.modules().items() if is_awaited(module, digest)]

    def is_used(self, digest: str) -> bool:
        """Whether a node computes by an engine, which was compared for it."""
        used = (module.status.standing.engine for module in self.modules().values())
        return any(use is not None and use.digest == digest for use in used)

    def to_json(self) -> list[dict[str, Any]]:
        """All states, as the page gets them."""
        return [_to_json(place, module) for place, module in self.modules().items()]


REGISTRY = NodeRegistry()


def is_awaited(module: AcceleratedModule, digest: str) -> bool:
    """Whether the build of an engine, of the whole model or of its blocks, was asked for."""
    of_blocks = (ticket.plan.key.digest for ticket in module.status.block_builds())
    return digest in module.status.wanted or digest in of_blocks


def state_of(module: AcceleratedModule) -> NodeState:
    """What a node shows, its text shortened to fit on it."""
    found = _state_of(module)
    text, tip = textwrap.shorten(found.text, TEXT_LENGTH, placeholder="…"), found.tip or found.text
    return replace(found, text=text, tip=tip, mend=way_out(module, found.kind, tip))


def _to_json(place: NodeAddress, module: AcceleratedModule) -> dict[str, Any]:
    status = module.status
    calls = {"engine_calls": status.engine_calls + status.block_calls, "eager_calls": status.eager_calls}
    seconds = module.build_seconds
    build = {"build_s": None if seconds is None else round(seconds, 1)}
    return {**place.to_json(), **vars(state_of(module)), **calls, **build}


def _state_of(module: AcceleratedModule) -> NodeState:
    if module.settings.is_off:
        return NodeState("off", "off", SWITCHED_OFF)
    status, queue = module.status, module.provider.queue
    tickets = [ticket for digest in status.wanted if (ticket := queue.find(digest)) is not None]
    running = [ticket for ticket in tickets if ticket.state is TicketState.RUNNING]
    if made := [ticket for ticket in running if not queue.is_held(ticket)]:
        return _of_ticket(made[0], held=False)
    if (found := _of_block_builds(status.block_builds(), module.provider.blocks.queue)) is not None:
        return found  # those of whole models wait for them
    if waiting := running or tickets:
        return _of_ticket(waiting[0], queue.is_held(waiting[0]))
    standing = status.standing
    if standing.blocks:
        whole = None if standing.wanted is None else _of_engine(module, standing.wanted)
        if whole is None:
            return _by_blocks(module, standing)
        return replace(whole, tip=f"{whole.tip or whole.text}\n{standing.blocks}")
    if standing.failed:
        return NodeState("failed", f"failed: {standing.reason}", digest=next(iter(status.wanted), None))
    if (found := _of_mixed_run(module, status.last_run)) is not None:
        return found
    digest = standing.engine.digest if standing.engine else standing.wanted
    if digest is None and not standing.reason:
        digest = next(iter(status.wanted), None)
    if digest is not None and (found := _of_engine(module, digest)) is not None:
        return found
    if standing.engine is not None:
        return NodeState("idle", "its engine was deleted", "The next run asks for the engine again.")
    if standing.reason:
        return _of_reason(module, standing.reason, standing.wanted)
    if standing.note:
        return NodeState("eager", f"eager: {standing.note.removeprefix('eager: ')}")
    return NodeState("idle", "not run yet", "Queue the workflow, or build the engine.")


def _of_block_builds(tickets: list[Ticket], queue: BuildQueue) -> NodeState | None:
    """How far the builds of blocks' engines are; None where none is left."""
    left = [ticket for ticket in tickets if ticket.state not in ENDED]
    if not left:
        return None
    built, wanted = len(tickets) - len(left), len(tickets)
    running = [ticket for ticket in left if ticket.state is TicketState.RUNNING]
    words = f"{built} of {wanted} blocks' engines built"
    if not running or all(map(queue.is_held, left)):
        why = _IDLE if any(map(queue.is_held, left)) else left[0].progress.message
        return NodeState("queued", f"queued: {words}, {why}", blocks_built=built, blocks_wanted=wanted)
    parts = [ticket.progress.fraction or 0.0 for ticket in running]
    tip = "\n".join(f"{ticket.plan}: {ticket.progress.message}" for ticket in running)
    fraction = round((built + sum(parts)) / wanted, 3)
    state = NodeState("building", f"building: {words}", tip, fraction=fraction)
    return replace(state, blocks_built=built, blocks_wanted=wanted)


def _by_blocks(module: AcceleratedModule, standing: Standing) -> NodeState:
    """Engines of blocks made the last call, or a part of it."""
    times, engines = module.provider.step_times, standing.block_engines
    speed = None if times is None or engines is None else times.speed_of_blocks(engines)
    state = NodeState("ready", "blocks", f"{standing.blocks}; {standing.reason}")
    if speed is None or engines is None:
        return state
    return replace(state, engine_ms=speed.engine_ms, eager_ms=speed.eager_ms, timed_by=timed_by(engines))


def _of_ticket(ticket: Ticket, held: bool) -> NodeState:
    digest, label, message = ticket.plan.key.digest, str(ticket.plan), ticket.progress.message
    if ticket.state is not TicketState.RUNNING:
        why = _IDLE if held else message
        return NodeState("queued", f"queued: {why}", f"{label}: {why}", digest)
    if ticket.waits_for_another:
        return NodeState("queued", f"queued: {message}", f"{label}: {message}", digest)
    fraction, left = fraction_of(ticket), seconds_left(ticket)
    words = ["building" + (f" {fraction:.0%}".replace("%", " %") if fraction else "")]
    if held:
        words.append(_IDLE)
    elif left is not None:
        words.append(f"{say_roughly(left)} left" if left > 0 else "done any moment")
    return NodeState("building", " · ".join(words), f"{label}: {message}", digest, fraction, left)


def _of_engine(module: AcceleratedModule, digest: str) -> NodeState | None:
    """None where there is no such engine, and nothing is known against it."""
    entry = module.provider.store.lookup(digest)
    if entry is None:
        failure = module.provider.queue.failure(digest)
        return None if failure is None else NodeState("failed", f"failed: {failure}", digest=digest)
    if not _is_asked_for(module, entry):
        return NodeState("idle", _CHANGED, digest=digest)
    if (reason := module.provider.why_retired(entry)) is not None:
        return _of_reason(module, reason, digest)
    return _ready(module, entry, say_sizes(entry.manifest.profiles), entry.manifest.label)


def _of_mixed_run(module: AcceleratedModule, run: LastRun) -> NodeState | None:
    """What to say where an engine made some calls of the last run, and the plain model others; else None."""
    plain = {reason: times for reason, times in run.reasons.items() if not _is_built(module, run.wanted.get(reason))}
    entry = None if run.engine is None else module.provider.store.lookup(run.engine.digest)
    if not plain or entry is None or not _is_asked_for(module, entry) or module.provider.why_retired(entry):
        return None
    eager, calls = sum(plain.values()), run.engine_calls + sum(run.reasons.values())
    words = f"{eager} of {calls} calls ran on your model"
    tip = f"{entry.manifest.label}; in the last run {words}: {'; '.join(plain)}"
    return replace(_ready(module, entry, "", tip), last_run_calls=calls, last_run_eager_calls=eager)


def _is_built(module: AcceleratedModule, digest: str | None) -> bool:
    """Whether the engine that the plain model stood in for is there by now."""
    return digest is not None and module.provider.store.lookup(digest) is not None


def _is_asked_for(module: AcceleratedModule, entry: Entry) -> bool:
    """Whether the next run will ask for such an engine, as far as its settings go."""
    made, now = entry.manifest, module.settings
    if now.backend is not BackendChoice.AUTO and (now.backend is BackendChoice.TENSORRT) != (made.backend in _BACKENDS):
        return False
    quantised = now.quantised_for(Role(made.role))
    if made.quantised != (quantised.value if quantised else None):
        return False
    if isinstance(now.precision, Precision):
        return made.precision == now.precision.value
    host = module.host_precision  # which engines follow, but where it overflows: what a run found out still holds
    is_open = not isinstance(module.asked.precision, Precision)
    return is_open or (host is not None and made.precision == host.value)


def _of_reason(module: AcceleratedModule, reason: str, wanted: str | None) -> NodeState:
    if SO_NOT_USED in reason or BLOCKS_NOT_USED in reason:
        return NodeState("slower", f"slower: {reason}", digest=wanted)
    if wanted is not None and module.settings.policy is BuildPolicy.BACKGROUND:  # it is not being built any more
        return NodeState("idle", "not built: the build was stopped", "The next run asks for the engine again.", wanted)
    return NodeState("eager", f"eager: {reason}", digest=wanted)


def _ready(module: AcceleratedModule, entry: Entry, sizes: str, tip: str) -> NodeState:
    """An engine that is there, with what it gains as far as that is known."""
    manifest, speed = entry.manifest, module.provider.speed_of(entry)
    made = f"{_BACKENDS.get(manifest.backend, 'compiled')} {manifest.precision_name}"
    times = say_times(speed.eager_ms, speed.engine_ms, manifest.timed_by) if speed else ""
    caution = module.provider.canary.caution(entry.digest)
    words, tip = " · ".join(filter(None, (made, sizes, times, "ready"))), f"{tip}. {caution}" if caution else tip
    state = NodeState("ready", words, tip, entry.digest, without_graphs=bool(caution))
    if speed is None:
        return state
    return replace(state, engine_ms=speed.engine_ms, eager_ms=speed.eager_ms, timed_by=manifest.timed_by)
