"""The one line that each node shows, and what the page hears of builds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.core.environment import versions_now
from slipstream.core.errors import BuildFailed, BuildOutOfMemory, IncompatibleEngine
from slipstream.core.spec import Precision, Quantised
from slipstream.engine_cache import EngineStore, Speed
from slipstream.hosts.comfy.building import build_engines
from slipstream.hosts.comfy.building.build_engines import failing
from slipstream.hosts.comfy.node_state import announcer, node_states, watched_nodes
from slipstream.hosts.comfy.node_state.announcer import Announcer
from slipstream.hosts.comfy.node_state.node_states import NodeAddress, NodeRegistry, state_of
from slipstream.hosts.comfy.node_state.status_text import describe
from slipstream.hosts.comfy.process import running_prompts
from slipstream.hosts.comfy.run.run_start import recorded
from slipstream.runtime.building import build as build_module
from slipstream.runtime.building import build_queue as queue_module
from slipstream.runtime.checking.step_timers import on_purpose
from slipstream.runtime.checking.step_times import StepTimes
from slipstream.runtime.loaded.canary import CAPTURE
from slipstream.runtime.loaded.device_memory import DeviceRoom
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.reporting.status import LastRun
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings, parse_resolutions
from slipstream.runtime.settings.preferences import Preferences
from slipstream.tests.fakes import (
    BACKGROUND,
    FIRST_USE,
    FakeSource,
    FakeWorker,
    Host,
    NullBackend,
    make_inputs,
    make_plan,
    wait_until,
)
from slipstream.tests.unit.runtime.doomed import Doomed

PLACE = NodeAddress("w1", "12:3")


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
    with recorded(module, None), module.run(source) as run:
        run(inputs, lambda: source.eager(inputs), veto)


# ------------------------------------------------------------------------------------------------ one line


def test_before_the_first_run_and_switched_off(module_of: Callable[..., AcceleratedModule]) -> None:
    assert state_of(module_of()).text == "not run yet" and state_of(module_of()).kind == "idle"
    off = state_of(module_of(Settings(backend=BackendChoice.OFF)))
    assert (off.kind, off.text, off.mend) == ("off", "off", "backend")


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
    assert state_of(second).text == "queued: waits for its turn"


def test_a_build_that_waits_for_memory_says_so(
    module_of: Callable[..., AcceleratedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceRoom, "is_there", lambda self, device, needed: False)
    sample(module := module_of())
    wait_until(lambda: state_of(module).text == "queued: waits for free GPU memory")


def test_a_build_that_found_no_memory_says_what_to_do(
    module_of: Callable[..., AcceleratedModule], worker: FakeWorker
) -> None:
    worker.error = BuildOutOfMemory("The build ran out of GPU memory. Unload other models, then build it again")
    sample(module := module_of())
    wait_until(lambda: state_of(module).kind == "failed")
    state = state_of(module)
    assert "ran out of GPU memory" in state.text and "Unload other models" in state.tip and state.mend == "retry"


def test_a_reason_is_cut_at_a_word_and_told_whole(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of()
    reason = "IP-Adapter patches the attention of this model, which no engine of ours can honour"
    sample(module, veto=reason)
    state = state_of(module)
    assert state.kind == "eager" and state.tip == f"eager: {reason}"
    assert len(state.text) <= node_states.TEXT_LENGTH and state.text.startswith(
        "eager: IP-Adapter patches the attention of this"
    )
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


def test_what_an_engine_gains_is_told_in_milliseconds(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of(FIRST_USE)
    sample(module)
    store = module.provider.store
    store.record_speed(store.list()[0], Speed(104.2, 312.4))
    state = state_of(module)
    assert state.text == "compiled fp32 · 64×64 · 312 → 104 ms a step · ready"
    assert (state.engine_ms, state.eager_ms, state.timed_by) == (104.2, 312.4, "step")
    source, inputs = FakeSource(), make_inputs()
    with recorded(module, None), module.run(source) as run:
        for veto in (None, "another node patches the model"):
            run(inputs, lambda: source.eager(inputs), veto)
    state = state_of(module)
    assert state.text == "compiled fp32 · 312 → 104 ms a step · ready"
    assert (state.last_run_eager_calls, state.last_run_calls) == (1, 2)


def test_an_engine_that_is_built_when_somebody_asks_can_be_asked_for(
    module_of: Callable[..., AcceleratedModule],
) -> None:
    sample(module := module_of(Settings(policy=BuildPolicy.MANUAL)))
    state = state_of(module)
    assert (state.kind, state.mend) == ("eager", "retry") and "build it with" in state.tip
    sample(module, veto="another node patches the model")
    assert (state_of(module).kind, state_of(module).mend) == ("eager", None)


def test_an_engine_without_cuda_graphs_is_ready_and_says_so(module_of: Callable[..., AcceleratedModule]) -> None:
    sample(module := module_of(FIRST_USE))
    assert not state_of(module).without_graphs
    store = module.provider.store
    Doomed(store.marks, store.list()[0].digest, CAPTURE, True, versions_now()).end()
    state = state_of(module)
    assert state.kind == "ready" and state.without_graphs and "It runs without CUDA graphs" in state.tip


def test_an_engine_that_is_slower_than_the_model_is_not_ready(
    module_of: Callable[..., AcceleratedModule], provider: EngineProvider
) -> None:
    provider.step_times = StepTimes(provider.store)
    module = module_of(FIRST_USE)
    sample(module)
    provider.store.record_speed(provider.store.list()[0], Speed(9.81, 9.1, retired=versions_now()))
    for _ in range(2):
        state = state_of(module)
        assert state.kind == "slower"
        assert state.text.startswith("slower: the engine takes 9.8 ms a step where your model")
        assert state.tip.endswith("or when you press Build engine")
        sample(module)
    assert module.status.engine_calls == 1
    by_hand = module_of(FIRST_USE, by_hand=True)
    sample(by_hand)
    assert state_of(by_hand).kind == "ready" and state_of(module).kind == "slower"


def test_calls_on_purpose_do_not_turn_a_nodes_line(module_of: Callable[..., AcceleratedModule]) -> None:
    module, source, inputs = module_of(FIRST_USE), FakeSource(), make_inputs()
    with recorded(module, None), module.run(source) as run:
        run(inputs, lambda: source.eager(inputs))
        with on_purpose():
            run(inputs, lambda: source.eager(inputs))
    assert state_of(module).text == "compiled fp32 · 64×64 · ready"
    assert "on your model × 1: timed on purpose, to compare" in describe(module).splitlines()


def test_engine_info_tells_what_an_engine_gains(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of(FIRST_USE)
    sample(module)
    assert "ms a step" not in describe(module) and "tensorrt:" not in describe(module)
    store = module.provider.store
    store.record_speed(store.list()[0], Speed(104.2, 312.4))
    assert describe(module).splitlines()[2].endswith(", 312 → 104 ms a step (3.0x)")


def test_a_deleted_engine_is_not_ready(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of(FIRST_USE)
    sample(module)
    module.provider.pool.clear()
    assert module.provider.store.delete(module.provider.store.list()[0].digest)
    assert state_of(module).text == "its engine was deleted"


# ------------------------------------------------------------------- what is there and not what the node uses


def test_who_asked_for_engines_and_was_refused_has_none(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule]
) -> None:
    provider.backends[0].error = 0.1  # type: ignore[attr-defined]
    module = module_of(FIRST_USE, by_hand=True)
    hooks = HostHooks(wants=module.status.want, by_hand=True)
    with pytest.raises(IncompatibleEngine), failing(module):
        provider.make(FakeSource(), CallShape.of(make_inputs()), FIRST_USE, hooks)
    state = state_of(module)
    assert state.kind == "failed" and "differs from the model" in state.tip
    assert state.digest == provider.store.list()[0].digest


def test_a_cancel_is_no_failure(module_of: Callable[..., AcceleratedModule]) -> None:
    module = module_of()
    with pytest.raises(KeyboardInterrupt), failing(module):
        raise KeyboardInterrupt
    assert state_of(module).text == "not run yet"


@pytest.fixture(autouse=True)
def _no_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_engines, "waiting_hooks", HostHooks)


@pytest.mark.parametrize(
    "preferred",
    [
        Preferences(precision=Precision.FP16),
        Preferences(precision=Quantised.FP8),
        Preferences(backend=BackendChoice.TENSORRT),
    ],
)
def test_an_engine_that_the_next_run_will_not_ask_for_is_not_ready(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule], preferred: Preferences
) -> None:
    module = module_of(FIRST_USE)
    sample(module)
    sample(module, veto="a mask")
    assert state_of(module).kind == "eager"
    sample(module)
    provider.preferences = lambda: preferred
    state = state_of(module)
    assert (state.kind, state.text) == ("idle", "settings changed, the next run asks for another engine")
    provider.preferences = Preferences
    assert state_of(module).kind == "ready"
    provider.preferences = lambda: Preferences(precision=Precision.FP32, backend=BackendChoice.COMPILED)
    assert state_of(module).kind == "ready", "what auto was, under its own name"


def test_back_from_a_precision_of_ones_own_to_auto(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule]
) -> None:
    for precision, kind in ((Precision.FP16, "idle"), (Precision.FP32, "ready")):
        provider.preferences = lambda precision=precision: Preferences(precision=precision)  # type: ignore[misc]
        module = module_of(FIRST_USE)
        sample(module)
        assert state_of(module).kind == "ready"
        provider.preferences = Preferences
        assert state_of(module).kind == kind, "the model computes in fp32"


def test_a_quantised_engine_is_named_and_asked_for_by_that(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule]
) -> None:
    module = module_of(Settings(policy=BuildPolicy.FIRST_USE, precision=Quantised.FP8))
    sample(module)
    assert state_of(module).kind == "ready" and state_of(module).text.startswith("compiled fp8 · 64×64 · ")
    provider.preferences = lambda: Preferences(precision=Quantised.INT8)
    assert state_of(module).kind == "ready", "the node's own choice goes before"
    module = module_of(FIRST_USE)
    sample(module)
    assert state_of(module).kind == "ready" and state_of(module).text.startswith("compiled int8 · 64×64 · ")
    provider.preferences = Preferences
    assert state_of(module).kind == "idle"


def test_a_model_that_overflows_in_fp16_has_the_engine_that_it_asks_for(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule]
) -> None:
    provider.backends[0].overflows = {Precision.FP16}  # type: ignore[attr-defined]
    module = module_of(FIRST_USE)
    source, inputs = FakeSource(precision=Precision.FP16), make_inputs(dtype=torch.float16)
    with module.run(source) as run:
        run(inputs, lambda: source.eager(inputs))
    assert state_of(module).text.startswith("compiled bf16 · 64×64") and state_of(module).kind == "ready"


def test_a_run_in_part_by_the_plain_model_says_so(module_of: Callable[..., AcceleratedModule]) -> None:
    module, source = (
        module_of(Settings(policy=BuildPolicy.FIRST_USE, resolutions=parse_resolutions("64x64"))),
        FakeSource(),
    )
    small, large = make_inputs(8), make_inputs(16)
    for last in (small, large):
        with recorded(module, None), module.run(source) as run:
            for inputs in (large, small, large, last):
                run(inputs, lambda inputs=inputs: source.eager(inputs))  # type: ignore[misc]
        state = state_of(module)
        plain = 2 if last is small else 3
        assert (state.kind, state.last_run_eager_calls, state.last_run_calls) == ("ready", plain, 4), state
        assert f"{plain} of 4 calls ran on your model" in state.tip
        assert state.text.startswith("compiled fp32") and "128×128 is not in the node's list" in state.tip
    sample(module)
    assert state_of(module).text.endswith(" · ready") and state_of(module).last_run_eager_calls is None


def test_calls_for_which_an_engine_was_built_meanwhile_are_no_reproach(
    module_of: Callable[..., AcceleratedModule], worker: FakeWorker
) -> None:
    sample(module_of(FIRST_USE))
    worker.gate.clear()
    module, source = module_of(BACKGROUND), FakeSource()
    with recorded(module, None), module.run(source) as run:
        for size in (8, 16):
            inputs = make_inputs(size)
            run(inputs, lambda inputs=inputs: source.eager(inputs))  # type: ignore[misc]
    worker.gate.set()
    wait_until(lambda: state_of(module).kind == "ready")
    assert "plain" not in state_of(module).text


# ------------------------------------------------------------------------------------------------ registry


def test_the_last_module_of_a_node_counts_and_the_oldest_are_forgotten(
    module_of: Callable[..., AcceleratedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_states, "_KEPT", 2)
    registry, off = NodeRegistry(), Settings(backend=BackendChoice.OFF)
    for place in (NodeAddress(None, "4"), NodeAddress("w2", "12:3"), PLACE):
        registry.register(place, module_of())
    registry.register(PLACE, module_of(off))
    states = {(state["workflow"], state["node"]): state for state in registry.to_json()}
    assert set(states) == {("w2", "12:3"), ("w1", "12:3")}
    assert states["w1", "12:3"]["kind"] == "off" and states["w2", "12:3"]["engine_calls"] == 0


class Server:
    """ComfyUI's, with one prompt that runs."""

    def __init__(self) -> None:
        self.prompt_queue = self
        self.currently_running: dict[int, Any] = {}

    def runs(self, workflow: str | None, **nodes: str) -> None:
        info = {"extra_pnginfo": {"workflow": {"id": workflow}}} if workflow else {}
        prompt = {node.removeprefix("n"): {"class_type": kind} for node, kind in nodes.items()}
        self.currently_running = {0: (0, "id", prompt, info, [])}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(running_prompts, "server_of_process", lambda: made)
    return made


class Wakes:
    count = 0

    def wake(self) -> None:
        self.count += 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> NodeRegistry:
    made = NodeRegistry()
    monkeypatch.setattr(watched_nodes, "REGISTRY", made)
    wakes = Wakes()
    monkeypatch.setattr(watched_nodes, "announcer", lambda: wakes)
    return made


MODEL = "SlipstreamAccelerateModel"


def test_a_node_is_what_ran_last_also_where_comfyui_kept_it(
    module_of: Callable[..., AcceleratedModule], server: Server, registry: NodeRegistry
) -> None:
    info, place = {"workflow": {"id": "w1"}}, NodeAddress("w1", "4")
    server.runs("w1", n4=MODEL)
    real, dry = module_of(FIRST_USE), module_of(FIRST_USE, by_hand=True)
    watched_nodes.watch(real, 4, info)
    watched_nodes.watch(dry, 4, info)
    assert registry.modules() == {place: dry}
    with recorded(real, None):  # its node does not run again: ComfyUI has it in its cache
        assert registry.modules() == {place: real}, "from the first step on"
    assert watched_nodes.announcer().count >= 3  # type: ignore[attr-defined]


def test_a_copy_of_a_workflow_has_its_own_states(
    module_of: Callable[..., AcceleratedModule], server: Server, registry: NodeRegistry
) -> None:
    module = module_of(FIRST_USE)
    watched_nodes.watch(module, "4", {"workflow": {"id": "w1"}})
    server.runs("w2", n4=MODEL)
    with recorded(module, None):
        assert registry.modules() == {NodeAddress("w1", "4"): module, NodeAddress("w2", "4"): module}
    server.runs("w3", n5=MODEL)  # a prompt without that node: nobody knows whose run this is
    with recorded(module, None):
        assert set(registry.modules()) == {NodeAddress("w1", "4"), NodeAddress("w2", "4")}


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
    monkeypatch.setattr(announcer, "policy", lambda: "idle")
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


def test_the_page_hears_of_builds_of_blocks(provider: EngineProvider, page: Page) -> None:
    provider._host_is_idle = lambda: False  # they wait, as nobody waits for them
    Announcer(provider, page, NodeRegistry())
    ticket = provider.blocks.queue.submit(make_plan())
    wait_until(lambda: page.of("slipstream.builds"))
    (build,) = page.of("slipstream.builds")[-1]["builds"]
    assert build["held"] and build["id"] == ticket.plan.key.digest
    ticket.cancel()
    wait_until(lambda: page.of("slipstream.builds")[-1]["builds"] == [])
    wait_until(lambda: page.of("slipstream.result"))
    (told,) = page.of("slipstream.result")
    assert told["result"] == "cancelled" and told["role"] == ticket.plan.spec.role.value


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
    assert failed["result"] == "failed" and failed["message"] == "no compiler"
    assert cancelled["result"] == "cancelled" and "cancelled by the user" in cancelled["message"]


def test_an_engine_that_was_refused_is_a_build_that_failed(
    provider: EngineProvider, page: Page, module_of: Callable[..., AcceleratedModule]
) -> None:
    Announcer(provider, page, NodeRegistry())
    provider.backends[0].error = 0.1  # type: ignore[attr-defined]
    began = time.monotonic()
    sample(module_of(FIRST_USE))
    wait_until(lambda: page.of("slipstream.result"))
    assert time.monotonic() - began < 5, "nobody will compare it"
    (result,) = page.of("slipstream.result")
    assert result["result"] == "failed" and "differs from the model" in result["message"]


def test_a_result_is_for_all_nodes_whose_prompt_waited(
    provider: EngineProvider, page: Page, module_of: Callable[..., AcceleratedModule], server: Server
) -> None:
    registry = NodeRegistry()
    Announcer(provider, page, registry)
    server.runs("w1", n1="KSampler", n4=MODEL, n8="SlipstreamAccelerateVAE", n9="SlipstreamDryRunEnd")
    module, other = module_of(FIRST_USE), module_of(BACKGROUND)
    registry.register(NodeAddress("w1", "4"), module)
    registry.register(NodeAddress("w2", "8"), other)
    sample(module)
    wait_until(lambda: page.of("slipstream.result"))
    (waited,) = page.of("slipstream.result")
    assert waited["nodes"] == [{"node": "4", "workflow": "w1"}, {"node": "8", "workflow": "w1"}]
    sample(other, size=16)
    wait_until(lambda: len(page.of("slipstream.result")) == 2)
    assert page.of("slipstream.result")[-1]["nodes"] == [{"node": "8", "workflow": "w2"}], "nobody waited for it"


def test_a_node_runs_again_once_the_engine_is_there_that_it_lacked(
    provider: EngineProvider, module_of: Callable[..., AcceleratedModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then: not where the first picture waited for its engine, and not when an engine goes again."""
    monkeypatch.setattr(watched_nodes, "provider", lambda: provider)
    monkeypatch.setattr(watched_nodes, "_engines", {})
    waiting = module_of(FIRST_USE)
    watched_nodes.watch(waiting, "4", None)
    sample(waiting)
    watched_nodes.run_ended(waiting, "4")
    assert watched_nodes.engines_that_came("4") == "", "its picture was made on the engine"
    (built,) = provider.store.list()
    provider.store.delete(built.digest, force=True)
    lacking: Any = SimpleNamespace(status=SimpleNamespace(last_run=LastRun(wanted={"it is being built": built.digest})))
    watched_nodes.run_ended(lacking, "5")
    assert watched_nodes.engines_that_came("5") == ""
    sample(module_of(FIRST_USE))
    assert watched_nodes.engines_that_came("5") == built.digest
    assert watched_nodes.engines_that_came("4") == watched_nodes.engines_that_came("6") == ""
    provider.store.delete(built.digest, force=True)
    assert watched_nodes.engines_that_came("5") == built.digest, "no picture is made again because an engine went"
