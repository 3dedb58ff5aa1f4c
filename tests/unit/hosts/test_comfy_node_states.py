"""The one line that each node shows, and what the page hears of builds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import BuildFailed
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy import announce, node_states
from slipstream.hosts.comfy.announce import Announcer
from slipstream.hosts.comfy.node_states import NodeRegistry, Place, state_of
from slipstream.runtime import build as build_module
from slipstream.runtime import queue as queue_module
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings import BackendChoice, Settings
from slipstream.tests.fakes import (
    BACKGROUND,
    FIRST_USE,
    FakeSource,
    FakeWorker,
    NullBackend,
    make_inputs,
    wait_until,
)

PLACE = Place("w1", "12:3")


class Host:
    idle = True


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorker]:
    made = FakeWorker([NullBackend()])
    monkeypatch.setattr(build_module, "run_build", made)
    monkeypatch.setattr(queue_module, "_IDLE_POLL_SECONDS", 0.02)
    yield made
    made.gate.set()


@pytest.fixture
def provider(tmp_path: Path, worker: FakeWorker, host: Host) -> Iterator[EngineProvider]:
    made = EngineProvider(EngineStore(tmp_path / "engines"), [NullBackend()], lambda: host.idle)
    yield made
    made.queue.cancel_all("the test is over")


@pytest.fixture
def module_of(provider: EngineProvider) -> Callable[..., AcceleratedModule]:
    return lambda settings=BACKGROUND, **more: AcceleratedModule(provider, settings, **more)


def sample(module: AcceleratedModule, veto: str | None = None, size: int = 8) -> None:
    source, inputs = FakeSource(), make_inputs(size)
    with module.run(source) as run:
        run(inputs, lambda: source.eager(inputs), veto)


# ------------------------------------------------------------------------------------------------ one line


def test_before_the_first_run_and_switched_off(module_of: Callable[..., AcceleratedModule]) -> None:
    assert state_of(module_of()).text == "not run yet" and state_of(module_of()).kind == "idle"
    off = state_of(module_of(Settings(backend=BackendChoice.OFF)))
    assert (off.kind, off.text) == ("off", "off")


def test_a_build_in_the_background_from_queued_to_ready(
    module_of: Callable[..., AcceleratedModule], worker: FakeWorker, host: Host
) -> None:
    module, host.idle = module_of(), False
    worker.gate.clear()
    sample(module)
    state = state_of(module)
    assert (state.kind, state.text) == ("queued", "queued: waits until ComfyUI is idle")
    host.idle = True
    wait_until(lambda: state_of(module).kind == "building")
    (ticket,) = module.provider.queue.pending()
    ticket.estimate, ticket.seconds = 100.0, 59.0
    ticket.progress = type(ticket.progress)("compile", 0.43, "compiling 3 operations")
    state = state_of(module)
    assert state.text == "building 43 % · 40 s left" and "compiling 3 operations" in state.tip
    assert (state.fraction, state.left_s) == (0.43, 41.0)
    host.idle = False
    assert state_of(module).text == "building 43 % · waits until ComfyUI is idle"
    host.idle = True
    worker.gate.set()
    wait_until(lambda: state_of(module).kind == "ready")
    state = state_of(module)
    assert state.text == "compiled fp32 · 64×64 · ready" and state.digest == ticket.plan.key.digest
    sample(module)
    assert state_of(module).kind == "ready"


def test_two_builds_wait_for_each_other(module_of: Callable[..., AcceleratedModule], worker: FakeWorker) -> None:
    worker.gate.clear()
    first, second = module_of(), module_of()
    sample(first)
    wait_until(lambda: state_of(first).kind == "building")
    sample(second, size=16)
    assert state_of(second).text == "queued: waits for another build"


def test_a_reason_is_cut_at_a_word_and_told_whole(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of()
    reason = "IP-Adapter patches the attention of this model, which no engine of ours can honour"
    sample(module, veto=reason)
    state = state_of(module)
    assert state.kind == "eager" and state.tip == f"eager: {reason}"
    assert len(state.text) <= 60 and state.text.startswith("eager: IP-Adapter patches the attention of this")
    assert state.text.endswith("…") and reason.startswith(state.text[7:-1])


def test_a_failure_says_so_until_it_is_built(module_of: Callable[..., AcceleratedModule], worker: FakeWorker) -> None:
    worker.error = BuildFailed("no C++ compiler")
    module = module_of(FIRST_USE)
    sample(module)
    state = state_of(module)
    assert state.kind == "failed" and state.text == "failed: no C++ compiler" and state.digest
    worker.error = None
    again = module_of(FIRST_USE, by_hand=True)
    sample(again)
    assert state_of(again).kind == "ready"


def test_an_engine_that_is_there_and_cannot_serve_is_not_ready(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule]
) -> None:
    provider.backends[0].load_error = RuntimeError("of another torch")  # type: ignore[attr-defined]
    module = module_of(FIRST_USE)
    sample(module)
    state = state_of(module)
    assert state.kind == "eager" and "of another torch" in state.tip


def test_a_build_that_was_stopped_is_not_being_built(
    module_of: Callable[..., AcceleratedModule], worker: FakeWorker
) -> None:
    worker.gate.clear()
    module = module_of()
    sample(module)
    module.provider.queue.cancel_all("enough")
    wait_until(lambda: not module.provider.queue.pending())
    assert state_of(module).text == "not built: the build was stopped"


def test_a_deleted_engine_is_not_ready(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of(FIRST_USE)
    sample(module)
    module.provider.pool.clear()
    assert module.provider.store.delete(module.provider.store.list()[0].digest)
    assert state_of(module).text == "its engine was deleted"


# ------------------------------------------------------------------------------------------------ registry


def test_the_last_module_of_a_node_counts_and_the_oldest_are_forgotten(
    module_of: Callable[..., AcceleratedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_states, "_KEPT", 2)
    registry, off = NodeRegistry(), Settings(backend=BackendChoice.OFF)
    for place in (Place(None, "4"), Place("w2", "12:3"), PLACE):
        registry.register(place, module_of())
    registry.register(PLACE, module_of(off))
    states = {(state["workflow"], state["node"]): state for state in registry.to_json()}
    assert set(states) == {("w2", "12:3"), ("w1", "12:3")}
    assert states["w1", "12:3"]["kind"] == "off" and states["w2", "12:3"]["engine_calls"] == 0


# -------------------------------------------------------------------------------------------------- events


class Page:
    """Keeps what it was sent."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any], float]] = []

    def __call__(self, event: str, data: Mapping[str, Any]) -> None:
        self.events.append((event, data, time.monotonic()))

    def of(self, event: str) -> list[Mapping[str, Any]]:
        return [data for name, data, _ in self.events if name == event]


@pytest.fixture
def page(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(announce, "policy", lambda: "idle")
    return Page()


def test_the_page_hears_of_builds_of_nodes_and_of_the_end(
    provider: EngineProvider, page: Page, module_of: Callable[..., AcceleratedModule], worker: FakeWorker
) -> None:
    registry = NodeRegistry()
    Announcer(provider, page, registry)
    module = module_of()
    registry.register(PLACE, module)
    worker.gate.clear()
    sample(module)
    wait_until(lambda: any(not build["held"] for data in page.of("slipstream.builds") for build in data["builds"]))
    build = page.of("slipstream.builds")[-1]["builds"][0]
    assert build["nodes"] == [{"node": "12:3", "workflow": "w1"}] and build["held"] is False
    assert build["role"] == "unet" and len(build["id"]) == 64 and build["label"] == "Tiny 64×64 batch 2"
    worker.gate.set()
    wait_until(lambda: page.of("slipstream.result"))
    (result,) = page.of("slipstream.result")
    assert result["result"] == "built" and result["id"] == build["id"] and result["nodes"] == build["nodes"]
    wait_until(lambda: page.of("slipstream.nodes")[-1]["nodes"][0]["kind"] == "ready")
    assert page.of("slipstream.builds")[-1]["builds"] == []


def test_many_reports_make_few_events_and_no_end_is_lost(
    provider: EngineProvider, page: Page, module_of: Callable[..., AcceleratedModule]
) -> None:
    Announcer(provider, page, NodeRegistry())
    module = module_of()
    for size in (8, 16, 24, 32):
        sample(module, size=size)
    wait_until(lambda: len(page.of("slipstream.result")) == 4)
    times = [when for name, _, when in page.events if name == "slipstream.builds"]
    assert all(after - before > 0.2 for before, after in zip(times, times[1:], strict=False))


def test_a_cancelled_and_a_failed_build_say_why(
    provider: EngineProvider, page: Page, module_of: Callable[..., AcceleratedModule], worker: FakeWorker
) -> None:
    Announcer(provider, page, NodeRegistry())
    worker.error = BuildFailed("no compiler")
    sample(module_of())
    wait_until(lambda: page.of("slipstream.result"))
    worker.gate.clear()
    sample(module_of(), size=16)
    provider.queue.cancel_all("cancelled by the user")
    wait_until(lambda: len(page.of("slipstream.result")) == 2)
    failed, cancelled = page.of("slipstream.result")
    assert failed["result"] == "failed" and failed["message"] == "no compiler" and failed["speedup"] is None
    assert cancelled["result"] == "cancelled" and "cancelled by the user" in cancelled["message"]
