"""Steps with an engine and without are timed as pictures are made, and an engine that is slower is retired.

Most of it by a clock that the model and its engines turn; the last tests by a real one in a running ComfyUI.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import pytest
import torch

from slipstream.core.spec import Optimize, Role
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy import accelerate_vae as vae_module
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.node_state.node_states import state_of
from slipstream.hosts.comfy.node_state.status_text import describe
from slipstream.hosts.comfy.run import controlnet_calls, step_recording, timed_steps
from slipstream.hosts.comfy.run.model_calls import ModelCalls
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.hosts.comfy.step_graph import graphed_steps
from slipstream.runtime.checking.sentinel import Sentinel
from slipstream.runtime.checking.step_timers import is_on_purpose
from slipstream.runtime.checking.step_times import StepTimes
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.module import Run as ModuleRun
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Levers, Settings
from slipstream.sampling.presets import Selection, custom
from slipstream.tests.comfyui.support.client import ComfyClient, Run
from slipstream.tests.comfyui.support.graph import Graph, Node
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.fakes import FakeClock
from slipstream.tests.tensors import distance

from ..models.test_controlnet import applied, chained, prompts
from ..models.test_unet_engines import accelerated, easy_cache
from ..server.test_dry_run import Page
from ..server.test_main_job import accelerate, difference, info_of, wait_for_engines
from .test_whole_step import Fast, replays  # noqa: F401

TOLERANCE = 1e-4
ON_PURPOSE = "timed on purpose, to compare"
FIRST_USE, MANUAL = Settings(policy=BuildPolicy.FIRST_USE), Settings(policy=BuildPolicy.MANUAL)
FAST_BUILD = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.FAST_BUILD)


class Stopwatch(FakeClock):
    """A clock that stands still but for calls of the model, of its engines, and of others.

    Attributes:
        engine_ms, eager_ms: of a call of the model.
        others_ms: of a call of an engine of another network.
        steps: who computed each call of the model: "engine" or "model".
    """

    engine_ms, eager_ms, others_ms = 10.0, 30.0, 2.0

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def by(self, who: str, ms: float) -> None:
        self.steps.append(who)
        self.now += ms

    def by_model(self) -> list[int]:
        """Which calls the model computed, counted from 0, of those since this was asked last."""
        steps, self.steps = self.steps, []
        return [number for number, who in enumerate(steps) if who == "model"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    made = Stopwatch()
    by_engine, by_model = ModuleRun._compute, ModelCalls._plain

    def compute(run: Any, offer: Any, *args: Any) -> Any:
        if offer.plan.spec.role is Role.UNET:
            made.by("engine", made.engine_ms)
        else:
            made.now += made.others_ms
        return by_engine(run, offer, *args)

    def plain(calls: Any, *args: Any) -> Any:
        made.by("model", made.eager_ms)
        return by_model(calls, *args)

    monkeypatch.setattr(Sentinel, "is_due", lambda *args: False)  # its comparisons are calls of the model, too
    monkeypatch.setattr(ModuleRun, "_compute", compute)
    monkeypatch.setattr(ModelCalls, "_plain", plain)
    return made


@pytest.fixture(scope="session")
def built(engine_store: EngineStore) -> Path:
    """A store with the engines of these tests, of which nothing was measured."""
    provider = EngineProvider(engine_store)
    tiny.sample(accelerated(provider, tiny.model())[0])
    accelerate_vae(tiny.vae(), AcceleratedModule(provider, FAST_BUILD)).decode(torch.zeros(1, 4, 8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed_steps, "can_replay", lambda device: True)
        patch.setattr(graphed_steps.GraphedSteps, "_as_before", lambda *args: None)
        for parallel in ("off", "on"):
            fast = Fast(provider, levers=Levers(parallel=parallel))
            tiny.sample(fast.model, steps=1, **prompts(applied(fast.control)))
    return engine_store.root


@pytest.fixture
def store(built: Path, tmp_path: Path) -> EngineStore:
    shutil.copytree(built / "engines", tmp_path / "engines")
    return EngineStore(tmp_path)


def provider_of(store: EngineStore, clock: FakeClock, **options: Any) -> EngineProvider:
    times = StepTimes(store, {"ComfyUI": "0.33.0"}, lambda device: clock, **options)
    return EngineProvider(store, is_idle=lambda: False, step_times=times)


@pytest.fixture
def provider(store: EngineStore, clock: Stopwatch) -> EngineProvider:
    return provider_of(store, clock)


def fast_model(provider: EngineProvider, settings: Settings = FIRST_USE) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, settings)
    return accelerate_model(tiny.model(), module), module


# ------------------------------------------------------------------------------------------------- figures


def test_pictures_before_an_engine_and_with_it_tell_what_it_gains(
    store: EngineStore, provider: EngineProvider, clock: Stopwatch, tmp_path: Path
) -> None:
    (tmp_path / "engines").rename(tmp_path / "later")
    model, module = fast_model(provider, MANUAL)
    tiny.sample(model, steps=6)
    assert module.status.eager_calls == 6 and "ms a step" not in describe(module)
    (tmp_path / "later").rename(tmp_path / "engines")
    tiny.sample(model, steps=7)
    assert module.status.engine_calls == 7 and "ms a step" not in state_of(module).text
    tiny.sample(model, steps=7)
    assert state_of(module).text == "compiled fp32 · 64×64 · 30 → 10 ms a step · ready"
    assert "30 → 10 ms a step (3.0x)" in describe(module)
    assert set(clock.steps[:6]) == {"model"} and set(clock.steps[6:]) == {"engine"}


def test_a_step_holds_what_lies_between_two_of_them(provider: EngineProvider, clock: Stopwatch) -> None:
    """As a preview of each step does."""
    model, module = fast_model(provider)

    def preview(*_: Any) -> None:
        clock.now += 5.0

    for _ in range(4):
        tiny.sample(model, steps=12, callback=preview)
    assert "35 → 15 ms a step" in describe(module)


def test_engine_info_speaks_of_tensorrt_where_it_was_chosen(provider: EngineProvider) -> None:
    assert "tensorrt:" not in describe(fast_model(provider)[1])
    chosen = Settings(backend=BackendChoice.TENSORRT, policy=BuildPolicy.FIRST_USE)
    assert "tensorrt:" in describe(fast_model(provider, chosen)[1])


# ------------------------------------------------------------------------------- steps computed on purpose


def test_a_few_steps_are_computed_by_the_model_and_the_picture_stays(
    provider: EngineProvider, clock: Stopwatch
) -> None:
    wanted = tiny.sample(tiny.model(), steps=12)
    model, module = fast_model(provider)
    for _ in range(3):
        found = tiny.sample(model, steps=12)
        assert clock.by_model() == [3, 4]
        assert distance(found, wanted) < TOLERANCE
        assert state_of(module).kind == "ready" and "plain" not in state_of(module).text
    assert module.status.engine_calls == 30
    assert module.status.to_json()["reasons"] == {ON_PURPOSE: 6}
    assert "30 → 10 ms a step (3.0x)" in describe(module) and f"on your model × 6: {ON_PURPOSE}" in describe(module)
    for _ in range(4):
        tiny.sample(model, steps=12)
    assert clock.by_model() == [], "enough is known"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_are_left_alone(provider: EngineProvider, clock: Stopwatch, steps: int) -> None:
    model, _ = fast_model(provider)
    for _ in range(4):
        tiny.sample(model, steps=steps)
    assert clock.by_model() == []


def test_the_shortest_run_in_which_the_engines_steps_are_timed_too(provider: EngineProvider, clock: Stopwatch) -> None:
    model, _ = fast_model(provider)
    tiny.sample(model, steps=8)
    assert clock.by_model() == [3, 4]


@pytest.mark.parametrize("steps", [4, 5, 7])
def test_of_short_runs_every_other_one_is_compared(provider: EngineProvider, clock: Stopwatch, steps: int) -> None:
    wanted = tiny.sample(tiny.model(), steps=steps)
    model, module = fast_model(provider)
    for number in range(6):
        clock.by_model()
        assert distance(tiny.sample(model, steps=steps), wanted) < TOLERANCE
        assert clock.by_model() == ([] if number % 2 else [steps - 3, steps - 2])
    for _ in range(4):
        tiny.sample(model, steps=steps)
        assert clock.by_model() == [], "enough is known"
    assert "30 → 10 ms a step (3.0x)" in describe(module)


def test_an_engine_that_is_slower_in_short_runs_is_retired(
    provider: EngineProvider, clock: Stopwatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock.engine_ms = 50.0
    model, _ = fast_model(provider)
    pictures = 0
    while "so it is not used" not in caplog.text:
        tiny.sample(model, steps=4)
        pictures += 1
        assert pictures < 40
    clock.by_model()
    tiny.sample(model, steps=4)
    assert clock.by_model() == [0, 1, 2, 3]
    assert pictures == 20


def test_each_sampler_is_compared(provider: EngineProvider, clock: Stopwatch) -> None:
    """What a step costs beside the model is another matter for each."""
    model, module = fast_model(provider)
    for sampler in ("euler", "heun", "euler"):
        tiny.sample(model, steps=8, sampler=sampler)
        assert clock.by_model() == [3, 4]
    assert module.status.engine_calls == 8 + 15 + 8 - 6


def test_with_step_skip_no_skipped_step_counts(provider: EngineProvider, clock: Stopwatch) -> None:
    preset = custom(Selection(listed="0 1 2 3 5 6 9 10 11"))
    model, module = fast_model(provider)
    wanted = tiny.sample(skip_steps(tiny.model(), preset), steps=12)
    for change in (model, model):
        found = tiny.sample(skip_steps(change, preset), steps=12)
        assert clock.by_model() == [3, 4] and distance(found, wanted) < 10 * TOLERANCE
    for _ in range(2):
        tiny.sample(skip_steps(model, preset), steps=12)
    assert "30 → 10 ms a step" in describe(module), "steps that call no model are no part of it"


def test_with_easycache(provider: EngineProvider, clock: Stopwatch) -> None:
    model, module = fast_model(provider)
    wanted = tiny.sample(easy_cache(tiny.model()), steps=12)
    found = tiny.sample(easy_cache(model), steps=12)
    assert distance(found, wanted) < 0.05 and module.status.engine_calls > 0


def test_rehearsals_are_left_alone(provider: EngineProvider, clock: Stopwatch) -> None:
    """They measure, and compare pictures that are otherwise the same."""
    model, _ = fast_model(provider)
    watched = model.clone()
    step_recording.watch(watched)
    tiny.sample(watched, steps=12)
    assert clock.by_model() == []


def test_nothing_is_computed_on_purpose_where_that_is_switched_off(store: EngineStore, clock: Stopwatch) -> None:
    model, module = fast_model(provider_of(store, clock, compares=False))
    tiny.sample(model, steps=12)
    module.provider.step_times = None
    tiny.sample(model, steps=12)
    assert clock.by_model() == []


def test_where_memory_is_short_nothing_is_computed_on_purpose(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    guider, x = SimpleNamespace(inner_model=tiny.model().model), torch.zeros(1, 4, 8, 8)
    assert timed_steps.has_memory(guider, x)
    with monkeypatch.context() as short:
        short.setattr(comfy.model_management, "get_free_memory", lambda *args, **kwargs: 1000)
        assert not timed_steps.has_memory(guider, x)
    monkeypatch.setattr(timed_steps, "has_memory", lambda *args: False)
    model, module = fast_model(provider)
    tiny.sample(model, steps=12)
    assert clock.by_model() == [] and module.status.eager_calls == 0


@pytest.mark.parametrize("at", [3, 4])
def test_where_memory_runs_out_the_engine_answers(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    plain = ModelCalls._plain

    def short(calls: Any, *args: Any) -> Any:
        assert is_on_purpose()
        if len(clock.steps) == at:
            clock.steps.append("failed")
            raise torch.OutOfMemoryError("no memory")
        return plain(calls, *args)

    monkeypatch.setattr(ModelCalls, "_plain", short)
    wanted = tiny.sample(tiny.model(), steps=12)
    model, module = fast_model(provider)
    found = tiny.sample(model, steps=12)
    assert distance(found, wanted) < TOLERANCE
    assert (module.status.engine_calls, module.status.eager_calls) == ((12, 0) if at == 3 else (11, 1))
    clock.steps.clear()
    for _ in range(3):
        tiny.sample(model, steps=12)
    assert clock.by_model() == [], "not again in this process"


def test_an_error_of_the_model_is_the_users_to_see(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("another node broke")

    monkeypatch.setattr(ModelCalls, "_plain", broken)
    with pytest.raises(RuntimeError, match="another node broke"):
        tiny.sample(fast_model(provider)[0], steps=12)


def test_a_cancel_in_a_compared_step_is_a_cancel(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, module = fast_model(provider)
    wanted = tiny.sample(model, steps=3)

    def cancelled(*_: Any) -> Any:
        raise comfy.model_management.InterruptProcessingException()

    with monkeypatch.context() as cancelling:
        cancelling.setattr(ModelCalls, "_plain", cancelled)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            tiny.sample(model, steps=12)
    assert not is_on_purpose() and torch.equal(tiny.sample(model, steps=3), wanted)


def test_what_breaks_in_timing_breaks_no_picture(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    wanted = tiny.sample(tiny.model(), steps=12)
    for name in ("conditions_of_run", "has_memory"):
        with monkeypatch.context() as breaking:
            breaking.setattr(timed_steps, name, broken)
            found = tiny.sample(fast_model(provider)[0], steps=12)
        assert distance(found, wanted) < TOLERANCE and clock.by_model() == []


# ------------------------------------------------------------------------------- whole steps, and ControlNets


@pytest.mark.parametrize("parallel", ["off", "on"])
@pytest.mark.parametrize("with_control", [False, True])
def test_whole_steps_are_compared_as_they_are(
    provider: EngineProvider,
    clock: Stopwatch,
    replays: list[Any],  # noqa: F811
    parallel: str,
    with_control: bool,
) -> None:
    """From the second picture on every step is replayed, and none goes through the calls of the model."""
    fast = Fast(provider, levers=Levers(parallel=parallel))
    control = tiny.controlnet()
    plain = prompts(applied(control)) if with_control else {}
    given = prompts(applied(fast.control)) if with_control else {}
    wanted = tiny.sample(tiny.model(), steps=12, **plain)
    for replayed in (9, 10, 10):
        replays.clear()
        found = tiny.sample(fast.model, steps=12, **given)
        assert distance(found, wanted) < TOLERANCE
        assert len(replays) == replayed
    status = fast.model_module.status
    assert status.to_json()["reasons"] == {ON_PURPOSE: 6}
    if with_control:
        assert fast.control_module.status.to_json()["reasons"] == {ON_PURPOSE: 6}, "the whole step, not the model alone"
    halves = 2 if with_control and parallel == "on" else 1
    found_speeds = [entry.manifest.speed for entry in provider.store.list() if entry.manifest.speed is not None]
    assert len(found_speeds) == halves
    engine_ms = 10.0 * halves + (2.0 if with_control else 0.0)
    assert {(speed.eager_ms, speed.engine_ms) for speed in found_speeds} == {(30.0, engine_ms)}


def test_a_controlnet_for_part_of_a_run_is_other_work(provider: EngineProvider, clock: Stopwatch) -> None:
    fast = Fast(provider, levers=Levers(parallel="off"))
    for _ in range(6):
        tiny.sample(fast.model, steps=16, **prompts(applied(fast.control, end=0.5)))
    found = {entry.manifest.label: entry.manifest.speed for entry in provider.store.list() if entry.manifest.speed}
    assert {label: (speed.eager_ms, speed.engine_ms) for label, speed in found.items() if speed} == {
        "SD15 64×64 batch 2 with control": (30.0, 12.0),
        "SD15 64×64 batch 2": (30.0, 10.0),
    }


def test_which_of_several_controlnets_are_in_a_step_is_not_known(provider: EngineProvider, clock: Stopwatch) -> None:
    fast = Fast(provider, levers=Levers(parallel="off"))
    for _ in range(3):
        tiny.sample(fast.model, steps=12, **prompts(chained(fast.control)))
    assert fast.model_module.status.eager_calls == 0
    assert not [entry for entry in provider.store.list() if entry.manifest.speed]


def test_a_controlnets_own_engine_is_timed_by_its_calls(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = controlnet_calls.residuals_by_name

    def slow(control: Any) -> Any:
        clock.now += 5.0
        return by_name(control)

    monkeypatch.setattr(controlnet_calls, "residuals_by_name", slow)
    fast = Fast(provider, levers=Levers(parallel="off"))
    tiny.sample(fast.model, steps=12, **prompts(applied(fast.control)))
    assert "ms a call" not in describe(fast.control_module), "too few"
    for _ in range(3):
        tiny.sample(fast.model, steps=12, **prompts(applied(fast.control)))
    assert "5.0 → 2.0 ms a call (2.5x)" in describe(fast.control_module)
    assert "35 → 12 ms a step" in describe(fast.model_module)


# ------------------------------------------------------------------------------------------------------- VAEs


def test_a_vae_is_timed_by_its_calls(
    provider: EngineProvider, clock: Stopwatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = vae_module.plain_method

    def slow(model: Any, half: Any) -> Any:
        plain = method(model, half)

        def compute(*args: Any, **kwargs: Any) -> Any:
            clock.now += 8.0
            return plain(*args, **kwargs)

        return compute

    monkeypatch.setattr(vae_module, "plain_method", slow)
    (tmp_path / "engines").rename(tmp_path / "later")
    latent, vae = torch.randn(1, 4, 8, 8), tiny.vae()
    before = AcceleratedModule(provider, MANUAL)
    for _ in range(4):
        accelerate_vae(vae, before).decode(latent)
    (tmp_path / "later").rename(tmp_path / "engines")
    module = AcceleratedModule(provider, FAST_BUILD)
    fast = accelerate_vae(vae, module)
    for _ in range(6):
        fast.decode(latent)
    assert (before.status.eager_calls, module.status.engine_calls) == (4, 6)
    assert "8.0 → 2.0 ms a call (4.0x)" in describe(module)
    assert state_of(module).text == "compiled fp32 · 64×64 · 8.0 → 2.0 ms a call · ready"


# ------------------------------------------------------------------------------------------- a slow engine


def test_a_slow_engine_is_retired_until_somebody_asks_for_it(
    provider: EngineProvider, clock: Stopwatch, store: EngineStore, caplog: pytest.LogCaptureFixture
) -> None:
    clock.engine_ms = 50.0
    plain = tiny.sample(tiny.model(), steps=8)
    model, module = fast_model(provider)
    for _ in range(3):
        assert distance(tiny.sample(model, steps=8), plain) < TOLERANCE
    assert state_of(module).kind == "ready", "it is compared once more, side by side"
    for _ in range(3):
        tiny.sample(model, steps=8)
    reason = "the engine takes 50.0 ms a step where your model without Slipstream takes 30.0 ms, so it is not used"
    assert state_of(module).kind == "slower" and reason in state_of(module).tip
    assert caplog.text.count(reason) == 1
    calls = module.status.engine_calls
    assert torch.equal(tiny.sample(model, steps=8), plain)
    assert module.status.engine_calls == calls and reason in describe(module)
    later, again = fast_model(provider_of(EngineStore(store.root), clock))
    tiny.sample(later, steps=4)
    assert again.status.engine_calls == 0, "the next start knows"
    by_hand = AcceleratedModule(provider, FIRST_USE, by_hand=True)  # as Build engine's dry run makes it
    tiny.sample(accelerate_model(tiny.model(), by_hand), steps=1)
    assert by_hand.status.engine_calls == 1 and state_of(by_hand).kind == "ready"
    clock.engine_ms = 10.0
    for _ in range(3):
        tiny.sample(model, steps=8)
    assert module.status.engine_calls > calls and "30 → 10 ms a step" in state_of(module).text


def test_while_the_engine_seems_slower_it_takes_turns_with_the_model(
    provider: EngineProvider, clock: Stopwatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So two pictures of a usual length are enough."""
    clock.engine_ms = 31.5
    plain = tiny.sample(tiny.model(), steps=20)
    model, _ = fast_model(provider)
    for _ in range(2):
        assert "so it is not used" not in caplog.text
        assert distance(tiny.sample(model, steps=20), plain) < TOLERANCE
        assert clock.by_model() == [3, 4, 8, 9, 12, 13, 17, 18]
    assert caplog.text.count("so it is not used") == 1
    assert torch.equal(tiny.sample(model, steps=20), plain) and clock.by_model() == [*range(20)]


def test_an_engine_that_seems_slower_no_more_computes_the_rest(provider: EngineProvider, clock: Stopwatch) -> None:
    clock.engine_ms = 50.0
    model, module = fast_model(provider)

    def recovers(step: int, *_: Any) -> None:
        if step == 9:
            clock.engine_ms = 10.0

    tiny.sample(model, steps=20, callback=recovers)
    assert clock.by_model() == [3, 4, 8, 9, 12, 13], "of its steps between them three took 50 ms and three 10"
    tiny.sample(model, steps=20)
    assert clock.by_model() == [] and "30 → 10 ms a step" in describe(module)


@pytest.mark.parametrize(("period", "offset"), [(2, 0), (2, 1), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3), (5, 2)])
def test_what_takes_time_each_so_many_steps_retires_no_engine(
    provider: EngineProvider, clock: Stopwatch, period: int, offset: int
) -> None:
    """As a preview of each fourth step, which would fall on the engine's alone were turns of equal length."""
    model, module = fast_model(provider)

    def preview(step: int, *_: Any) -> None:
        clock.now += 60.0 * (step % period == offset)

    for _ in range(4):
        tiny.sample(model, steps=20, callback=preview)
    clock.by_model()
    tiny.sample(model, steps=7)
    assert clock.by_model() == [] and state_of(module).kind == "ready"


def test_while_they_take_turns_no_file_is_read(
    provider: EngineProvider, clock: Stopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as a part of the engine's step."""
    lookup = EngineStore.lookup

    def slow(store: EngineStore, *args: Any) -> Any:
        clock.now += 25.0
        return lookup(store, *args)

    monkeypatch.setattr(EngineStore, "lookup", slow)
    model, module = fast_model(provider)
    for _ in range(3):
        tiny.sample(model, steps=20)
        assert clock.by_model() == [3, 4]
    assert "30 → 10 ms a step" in describe(module)


def test_where_the_host_retires_no_engine_none_takes_turns(store: EngineStore, clock: Stopwatch) -> None:
    clock.engine_ms = 50.0
    tiny.sample(fast_model(provider_of(store, clock, retires=False))[0], steps=20)
    assert clock.by_model() == [3, 4]


def picture(model_files: Any, seed: int) -> tuple[Graph, Node]:
    """Loader → Accelerate Model → KSampler → SaveLatent, with Engine Info; the graph and the node."""
    graph = Graph()
    loader = graph.add("CheckpointLoaderSimple", ckpt_name=model_files.checkpoint("sd15"))
    model = accelerate(graph, loader, build="background")
    samples = graph.sample(model, size=64, steps=8, cfg=7.0, seed=seed)
    graph.save(samples)
    graph.add("SlipstreamEngineInfo", model=model, after=samples)
    return graph, model


class Pictures:
    """Pictures of one model in a running ComfyUI, one after the other."""

    def __init__(self, client: ComfyClient, model_files: Any) -> None:
        self.client, self._model_files = client, model_files
        self.run: Run
        self.info = ""
        self._seed, self._calls = 0, (0, 0)

    def next(self) -> tuple[int, int]:
        """Calls of the engine and of the model in the next one."""
        self._seed += 1
        self.run = self.client.run(picture(self._model_files, self._seed)[0])
        assert self.run.ok, self.run.error
        self.info, before = info_of(self.run), self._calls
        found = re.search(r"calls on engines: (\d+), on your model: (\d+)", self.info)
        assert found is not None, self.info
        self._calls = int(found[1]), int(found[2])
        if any(now < then for now, then in zip(self._calls, before, strict=True)):
            before = 0, 0  # the engine came that it lacked, so the node ran again
        return self._calls[0] - before[0], self._calls[1] - before[1]

    def is_plain(self) -> bool:
        """Whether the last one is the model's own."""
        plain = Graph()
        loader = plain.add("CheckpointLoaderSimple", ckpt_name=self._model_files.checkpoint("sd15"))
        plain.save(plain.sample(loader, size=64, steps=8, cfg=7.0, seed=self._seed))
        return difference(self.run, self.client.run(plain)) == 0.0


def test_in_a_running_comfyui_a_slow_engine_gives_way(start_comfy: Any, model_files: Any) -> None:
    """By the real clock: each call of the engine takes 0.4 s longer than the model's."""
    seconds = {"SLIPSTREAM_TEST_BUILD_SECONDS": "0.3", "SLIPSTREAM_TEST_ENGINE_SECONDS": "0.4"}
    server = start_comfy(environment={**seconds, "SLIPSTREAM_STEP_TIMES": ""})
    with server.client() as client:
        pictures, page = Pictures(client, model_files), Page(client, server.home)
        graph, node = picture(model_files, seed=1)
        assert pictures.next() == (0, 8)
        wait_for_engines(server.home, 1)
        assert pictures.next() == (8, 0), "what the model took is known from the first picture"
        assert [pictures.next() for _ in range(3)] == [(6, 2)] * 3, "side by side, to be sure"
        assert f"on your model × 6: {ON_PURPOSE}" in pictures.info
        state = page.state(node)
        assert state["kind"] == "slower" and "so it is not used" in state["tip"], state
        assert pictures.next() == (0, 8) and "so it is not used" in pictures.info and pictures.is_plain()
        page.build(graph, node)
        assert page.state(node)["kind"] == "ready"
        pictures.next()
        assert "calls on engines: 8, on your model: 0" in pictures.info, "the dry run's node was another"
    assert "Traceback" not in server.log(), server.log()
