"""Engines that are slower than the model are retired: by a clock that tests turn, so that nothing is luck."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.core.errors import StoreError
from slipstream.engine_cache import EngineStore, Entry, Speed
from slipstream.runtime.checking import step_times
from slipstream.runtime.checking.step_timers import on_purpose
from slipstream.runtime.checking.step_times import (
    EngineId,
    StepTimes,
    TimedStep,
    id_of,
    id_of_blocks,
    is_slower,
    why_retired,
)
from slipstream.runtime.loaded.device_clock import disturbances
from slipstream.runtime.module import AcceleratedModule, Waiting
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks, Offer
from slipstream.tests.fakes import (
    BACKGROUND,
    CPU,
    FIRST_USE,
    FakeClock,
    FakeSource,
    FakeWorker,
    NullBackend,
    ask,
    make_inputs,
    run_once,
    wait_until,
)

CALL = CallShape.of(make_inputs())
WORK = "work"
PLAIN = TimedStep(WORK)
VERSIONS = {"ComfyUI": "0.33.0"}
FAST, SLOW = (10.0,) * 8, (30.0,) * 8


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def times(store: EngineStore, clock: FakeClock) -> StepTimes:
    return StepTimes(store, VERSIONS, lambda device: clock)


@pytest.fixture
def provider(provider: EngineProvider, times: StepTimes) -> EngineProvider:
    provider.step_times = times
    return provider


@pytest.fixture
def engine(provider: EngineProvider, source: FakeSource) -> EngineId:
    """One that is built and compared."""
    offer = run_once(provider, source)
    assert offer.engine is not None
    return id_of(offer.engine.entry)


def measure(times: StepTimes, step: TimedStep, *took: float) -> None:
    """As if steps had taken so many ms."""
    clock = times.clock_of(CPU)
    for ms in took:
        times.add(clock, step, 0.0, ms)
    times.settle()


def only_entry(provider: EngineProvider) -> Entry:
    (entry,) = provider.store.list()
    return entry


def speed(provider: EngineProvider) -> Speed | None:
    return only_entry(provider).manifest.speed


# ------------------------------------------------------------------------------------------------ beyond noise


def around(middle: float, share: float, count: int = 40, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [middle * (1 + chance.uniform(-share, share)) for _ in range(count)]


@pytest.mark.parametrize(
    ("engine", "eager", "slower"),
    [
        ([104.0] * 5, [98.0] * 3, True),
        ([98.0] * 5, [104.0] * 3, False),
        ([100.9] * 5, [100.0] * 3, False),
        ([3.1] * 5, [3.0] * 3, False),
        (around(104, 0.02), around(98, 0.02, 3), True),
        (around(104, 0.2), around(98, 0.2, 3), False),
        (around(104, 0.2), around(98, 0.2), False),
        ([60.0, 61.0, 62.0, 500.0, 61.0], [98.0] * 3, False),
        ([104.0, 104.0, 1.0, 104.0, 900.0, 104.0, 104.0, 104.0], [98.0, 98.5, 2000.0, 98.0], False),
        ([104.0, 104.0, 1.0, 104.0, 900.0, 104.0, 104.0, 104.0], [98.0] * 8 + [2000.0], True),
    ],
)
def test_slower_is_what_noise_does_not_explain(engine: Sequence[float], eager: Sequence[float], slower: bool) -> None:
    assert is_slower(engine, eager) == slower


# ---------------------------------------------------------------------------------------------------- figures


def test_both_medians_are_written_down(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    heard: list[Speed | None] = []
    times.on_change = lambda: heard.append(speed(provider))
    measure(times, PLAIN, 30.0, 31.0, 99.0)
    measure(times, TimedStep(WORK, (engine,)), 10.0, 11.0, 12.0, 80.0)
    assert speed(provider) is None, "too few"
    measure(times, TimedStep(WORK, (engine,)), 11.0)
    found = speed(provider)
    assert found is not None and (found.engine_ms, found.eager_ms, found.retired) == (11.0, 31.0, {})
    assert heard == [found]


def test_figures_are_written_when_they_have_changed(
    provider: EngineProvider, times: StepTimes, engine: EngineId
) -> None:
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    first = speed(provider)
    measure(times, TimedStep(WORK, (engine,)), *[10.4] * 40)
    assert speed(provider) == first
    measure(times, TimedStep(WORK, (engine,)), *[11.0] * 64)
    assert speed(provider) != first


def test_old_samples_are_forgotten(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *[20.0] * 64, *[10.0] * 64)
    found = speed(provider)
    assert found is not None and found.engine_ms == 10.0


def test_only_the_same_work_is_compared(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    """A ControlNet makes each step longer, with an engine and without."""
    measure(times, TimedStep("with a ControlNet"), *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    assert speed(provider) is None
    measure(times, PLAIN, *[9.0] * 2)
    assert speed(provider) is None


def test_engines_of_controlnets_are_told_apart(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    other = ("c" * 64, "2026-01-01T00:00:00+00:00")
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,), (other,)), *FAST[:4])
    measure(times, TimedStep(WORK, (engine,)), *FAST[:4])
    assert speed(provider) is None
    measure(times, TimedStep(WORK, (engine,), (other,)), 12.0)
    found = speed(provider)
    assert found is not None and found.engine_ms == 10.0


def test_several_engines_of_a_step_share_its_figures(provider: EngineProvider, times: StepTimes) -> None:
    engines = []
    for size in (8, 16):
        offer = ask(provider, FakeSource(), call=CallShape.of(make_inputs(size)))
        assert offer.engine is not None
        engines.append(id_of(offer.engine.entry))
        provider.pool.give_back(offer.engine)
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, tuple(sorted(engines))), *FAST)
    found = [entry.manifest.speed for entry in provider.store.list()]
    assert len(found) == 2 and all(each is not None and each.speedup == 3.0 for each in found)
    for _ in range(2):
        measure(times, TimedStep("other work"), *FAST)
        measure(times, TimedStep("other work", tuple(sorted(engines))), *SLOW)
    for size in (8, 16):
        assert "so it is not used" in ask(provider, FakeSource(), call=CallShape.of(make_inputs(size))).reason


def test_what_was_read_in_the_midst_of_a_run_is_judged_at_its_end(
    provider: EngineProvider, times: StepTimes, clock: FakeClock, engine: EngineId
) -> None:
    step = TimedStep(WORK, (engine,))
    assert not times.seems_slower(step), "nothing is known"
    for each, ms, count in ((PLAIN, 30.0, 3), (step, 50.0, 5)):
        for _ in range(count):
            times.add(clock, each, 0.0, ms)
    assert times.seems_slower(step) and speed(provider) is None
    times.settle()
    found = speed(provider)
    assert found is not None and (found.engine_ms, found.eager_ms) == (50.0, 30.0)
    times.settle()
    assert times.saved_ms == 0.0, "nothing was known of the model while it ran"
    measure(times, step, 20.0)
    assert times.saved_ms == 10.0


def test_events_that_the_device_has_not_reached_are_read_later(
    provider: EngineProvider, times: StepTimes, engine: EngineId, clock: FakeClock, source: FakeSource
) -> None:
    clock.reached = 20.0
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    assert speed(provider) is None
    clock.reached = 30.0
    run_begins = AcceleratedModule(provider, FIRST_USE).run(source)
    with run_begins:
        assert speed(provider) is not None


def test_a_clock_that_breaks_costs_figures_alone(
    provider: EngineProvider, times: StepTimes, engine: EngineId, clock: FakeClock, source: FakeSource
) -> None:
    def broken(begin: float, end: float) -> float:
        raise RuntimeError("the device is lost")

    times.add(clock, PLAIN, 0.0, 1.0)
    clock.milliseconds = broken  # type: ignore[method-assign]
    assert run_once(provider, source).engine is not None
    times.settle()
    del clock.milliseconds
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    assert speed(provider) is not None


def test_a_listener_that_breaks_costs_no_figures(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    def broken() -> None:
        raise RuntimeError("the page is gone")

    times.on_change = broken
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    assert speed(provider) is not None


def test_where_nothing_can_be_written_this_process_knows(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise StoreError("read-only")

    monkeypatch.setattr(provider.store, "record_speed", refuse)
    measure(times, PLAIN, *SLOW)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    found = provider.speed_of(only_entry(provider))
    assert speed(provider) is None and found is not None and found.speedup == 3.0
    for _ in range(2):
        measure(times, TimedStep("other"), *FAST)
        measure(times, TimedStep("other", (engine,)), *SLOW)
    assert "is not used" in run_once(provider, source).reason


def test_what_takes_no_time_is_not_compared(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    measure(times, PLAIN, *[0.0] * 5)
    measure(times, TimedStep(WORK, (engine,)), *FAST)
    assert speed(provider) is None
    measure(times, TimedStep("other"), *SLOW)
    measure(times, TimedStep("other", (engine,)), *FAST)
    assert speed(provider) is not None


def test_few_kinds_of_work_are_kept(times: StepTimes) -> None:
    for number in range(1000):
        measure(times, TimedStep(number), 1.0)
        times.is_due(TimedStep(number))
    assert len(times._samples) == len(times._turns) == 256


# --------------------------------------------------------------------------------------------------- retired


def suspect(times: StepTimes, engine: EngineId) -> None:
    measure(times, PLAIN, *[98.04] * 3)
    measure(times, TimedStep(WORK, (engine,)), *[104.3] * 5)


def retire(times: StepTimes, engine: EngineId) -> None:
    """Slower at first, and when both are timed anew."""
    for _ in range(2):
        suspect(times, engine)


REASON = (
    "the engine takes 104.3 ms a step where your model without Slipstream takes 98.0 ms, so it is not used; tried "
    "again after an update of Slipstream, ComfyUI or torch, or when you press Build engine"
)


def test_an_engine_that_is_slower_is_not_used(
    provider: EngineProvider,
    times: StepTimes,
    engine: EngineId,
    source: FakeSource,
    caplog: pytest.LogCaptureFixture,
) -> None:
    retire(times, engine)
    offer = run_once(provider, source)
    assert offer.engine is None and offer.reason == REASON
    assert caplog.text.count("so it is not used") == 1
    assert provider.forecast(source, CALL, FIRST_USE) is None
    assert why_retired(only_entry(provider).manifest) == REASON


def test_blocks_that_are_slower_are_not_used_in_this_process(times: StepTimes) -> None:
    slower, faster = id_of_blocks("a" * 64, CPU), id_of_blocks("b" * 64, CPU)
    retire(times, slower)
    assert "104.3 ms a step where your model without Slipstream takes 98.0 ms" in str(times.why_not_blocks(slower))
    measure(times, TimedStep("other", (faster,)), *FAST)
    measure(times, TimedStep("other"), *SLOW)
    assert times.why_not_blocks(faster) is None
    assert (known := times._of_blocks.get(faster)) is not None and known.speedup == 3.0
    elsewhere = id_of_blocks("a" * 64, torch.device("cuda", 1))
    assert times.why_not_blocks(elsewhere) is None, "another GPU has its own times"


BLOCKS = TimedStep(WORK, (id_of_blocks("a" * 64, CPU),))


def beside_blocks(provider: EngineProvider, source: FakeSource) -> Offer:
    """What a run is offered whose calls engines of blocks compute where none of the whole model does."""
    offer = provider.offer(source, CALL, FIRST_USE, HostHooks(has_blocks=True))
    if offer.engine is not None:
        provider.pool.give_back(offer.engine)
    return offer


BEHIND = (
    "the engine takes 38.1 ms a step where engines of the model's blocks take 34.2 ms, so these are used instead; "
    "tried again once they take longer, at the next start, or when you press Build engine"
)


def fall_behind(times: StepTimes, engine: EngineId) -> None:
    """Slower than blocks were before, and are again."""
    measure(times, BLOCKS, *[34.0] * 5)
    measure(times, TimedStep(WORK, (engine,)), *[38.1] * 5)
    measure(times, BLOCKS, *[34.2] * 5)


def test_a_whole_engine_that_is_slower_than_those_of_blocks_gives_way_to_them(
    provider: EngineProvider,
    times: StepTimes,
    engine: EngineId,
    source: FakeSource,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []
    times.on_change = lambda: heard.append(beside_blocks(provider, source).reason)
    measure(times, BLOCKS, *[34.0] * 5)
    measure(times, TimedStep(WORK, (engine,)), *[38.1] * 4)
    assert beside_blocks(provider, source).engine is not None, "too few"
    measure(times, TimedStep(WORK, (engine,)), 38.1)
    assert "so these are used instead" in beside_blocks(provider, source).reason
    assert not caplog.text, "it is not sure yet"
    for _ in range(3):
        measure(times, BLOCKS, *[34.2] * 5)
    offer = beside_blocks(provider, source)
    assert (offer.engine, offer.reason, offer.gives_way) == (None, BEHIND, only_entry(provider))
    assert caplog.text.count(BEHIND) == 1 and heard[-1] == BEHIND
    assert run_once(provider, source).engine is not None, "a run without blocks has no other"
    assert why_retired(only_entry(provider).manifest) is None


@pytest.mark.parametrize("took", [34.0, 20.0, 34.9], ids=["equal", "faster", "noise"])
def test_a_whole_engine_that_is_not_slower_than_those_of_blocks_stays(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, took: float
) -> None:
    for _ in range(3):
        measure(times, BLOCKS, *[34.0] * 5)
        measure(times, TimedStep(WORK, (engine,)), *[took] * 5)
        assert beside_blocks(provider, source).engine is not None


def test_blocks_that_are_no_faster_when_they_are_timed_anew_take_no_engines_place(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    """A game began when the whole engine came."""
    measure(times, BLOCKS, *[34.0] * 64)
    measure(times, TimedStep(WORK, (engine,)), *[45.0] * 64)
    measure(times, PLAIN, *[40.0] * 64)
    assert beside_blocks(provider, source).engine is None
    measure(times, BLOCKS, *[46.0] * 5)
    assert beside_blocks(provider, source).engine is not None and not caplog.text
    measure(times, TimedStep(WORK, (engine,)), *[44.0] * 5)
    assert beside_blocks(provider, source).engine is not None


def test_blocks_that_become_slower_later_give_way_in_their_turn(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    """As where memory no longer suffices for all weights."""
    fall_behind(times, engine)
    measure(times, BLOCKS, *[38.0] * 64)
    assert beside_blocks(provider, source).engine is None, "no slower"
    measure(times, BLOCKS, *[60.0] * 8)
    assert beside_blocks(provider, source).engine is not None


@pytest.mark.parametrize("way", ["other work", "another ControlNet", "slower than the model", "two engines"])
def test_blocks_that_could_not_have_served_in_its_place_are_not_compared_with_an_engine(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, way: str
) -> None:
    other = ("c" * 64, "2026-01-01T00:00:00+00:00")
    blocks, whole = BLOCKS, TimedStep(WORK, (engine,))
    if way == "other work":
        blocks = TimedStep("beside another node's patch", (id_of_blocks("a" * 64, CPU, patches=("skips",)),))
    elif way == "another ControlNet":
        blocks = TimedStep(WORK, BLOCKS.engines, (other,))
    elif way == "slower than the model":
        retire(times, *BLOCKS.engines)
    else:
        whole = TimedStep(WORK, tuple(sorted((engine, other))))
    for _ in range(3):
        measure(times, blocks, *[34.0] * 5)
        measure(times, whole, *[50.0] * 5)
    assert beside_blocks(provider, source).engine is not None


def test_where_blocks_turn_out_slower_than_the_model_the_whole_engine_serves_again(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    fall_behind(times, engine)
    measure(times, PLAIN, *[20.0] * 64)
    assert beside_blocks(provider, source).engine is None
    for _ in range(2):
        measure(times, BLOCKS, *[34.2] * 64)
        measure(times, PLAIN, *[20.0] * 64)
    assert times.why_not_blocks(*BLOCKS.engines) is not None
    assert beside_blocks(provider, source).engine is not None


def test_an_engine_that_gave_way_to_blocks_is_not_judged_by_its_old_steps(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    fall_behind(times, engine)
    for _ in range(3):
        measure(times, PLAIN, *[36.0] * 64)
        measure(times, BLOCKS, *[34.2] * 5)
    assert beside_blocks(provider, source).reason == BEHIND and run_once(provider, source).engine is not None


def test_an_engine_that_is_the_faster_one_in_other_work_does_not_give_way(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    """An engine serves all samplers, with and without ControlNets."""
    others = TimedStep("another sampler", (engine,)), TimedStep("another sampler", BLOCKS.engines)
    for step, took in zip(others, (30.0, 90.0), strict=True):
        measure(times, step, *[took] * 5)
    fall_behind(times, engine)
    assert beside_blocks(provider, source).engine is not None


def test_where_blocks_have_no_part_the_engine_that_gave_way_is_back_for_good(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    fall_behind(times, engine)
    module = AcceleratedModule(provider, FIRST_USE)
    for _ in range(4):
        with module.run(source) as run:
            run.by_blocks = lambda: "ComfyUI casts its weights at each call"
            run(make_inputs(), lambda: source.eager(make_inputs()))
    assert (module.status.engine_calls, module.status.eager_calls) == (3, 1)
    measure(times, PLAIN, *[10.0] * 5)
    for _ in range(3):
        measure(times, TimedStep(WORK, (engine,)), *[20.0] * 64)
        measure(times, PLAIN, *[10.0] * 5)
    assert why_retired(only_entry(provider).manifest) is not None, "it is held against the model again"


def test_while_blocks_are_on_their_way_the_engine_that_gave_way_serves_for_the_run_alone(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    fall_behind(times, engine)
    module = AcceleratedModule(provider, FIRST_USE)
    with module.run(source) as run:
        run.by_blocks = lambda: Waiting("their engines are on their way")
        for _ in range(3):
            run(make_inputs(), lambda: source.eager(make_inputs()))
    assert (module.status.engine_calls, module.status.eager_calls) == (2, 1)
    assert beside_blocks(provider, source).reason == BEHIND


def test_blocks_whose_steps_take_no_time_that_can_be_measured_are_not_compared(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    measure(times, BLOCKS, *[0.0] * 5)
    measure(times, TimedStep(WORK, (engine,)), *[5.0] * 5)
    assert beside_blocks(provider, source).engine is not None


def test_blocks_that_are_forgiven_have_to_be_faster_anew(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    fall_behind(times, engine)
    retire(times, *BLOCKS.engines)
    times.forgive_blocks(*BLOCKS.engines)
    assert beside_blocks(provider, source).engine is not None


def test_by_hand_an_engine_that_gave_way_to_blocks_is_used_and_measured_anew(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    fall_behind(times, engine)
    provider.make(source, CALL, FIRST_USE, HostHooks(by_hand=True))
    assert beside_blocks(provider, source).engine is not None
    measure(times, BLOCKS, *[34.2] * 5)
    assert beside_blocks(provider, source).engine is not None, "what was measured before counts no more"
    fall_behind(times, engine)
    assert beside_blocks(provider, source).reason == BEHIND


def test_the_next_process_tries_an_engine_that_gave_way_to_blocks(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, backend: NullBackend
) -> None:
    fall_behind(times, engine)
    assert beside_blocks(provider, source).engine is None
    assert beside_blocks(again(provider, backend), source).engine is not None


def test_where_no_engine_is_retired_none_gives_way_to_blocks(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    provider.step_times = StepTimes(provider.store, VERSIONS, times.clock_of, retires=False)
    fall_behind(provider.step_times, engine)
    assert beside_blocks(provider, source).engine is not None


def test_so_it_stays_whatever_is_measured_in_the_rest_of_the_run(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    retire(times, engine)
    measure(times, PLAIN, *[500.0] * 64)
    measure(times, TimedStep(WORK, (engine,)), *[1.0] * 64)
    assert run_once(provider, source).reason == REASON


def again(provider: EngineProvider, backend: NullBackend, versions: dict[str, str] | None = None) -> EngineProvider:
    """The provider of the next process."""
    store = EngineStore(provider.store.root)
    times = StepTimes(store, versions or VERSIONS, lambda device: FakeClock())
    return EngineProvider(store, [backend], step_times=times)


def test_the_next_process_knows(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, backend: NullBackend
) -> None:
    retire(times, engine)
    assert run_once(again(provider, backend), source).reason == REASON


@pytest.mark.parametrize("name", ["ComfyUI", "torch", "Slipstream"])
def test_after_an_update_it_is_tried_again(
    provider: EngineProvider,
    times: StepTimes,
    engine: EngineId,
    source: FakeSource,
    backend: NullBackend,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    retire(times, engine)
    newer = {**step_times.versions_now(), name: "99.0"}
    monkeypatch.setattr(step_times, "versions_now", lambda: {each: newer[each] for each in newer if each != "ComfyUI"})
    later = again(provider, backend, {"ComfyUI": newer.get("ComfyUI", VERSIONS["ComfyUI"])})
    assert run_once(later, source).engine is not None
    assert later.step_times is not None
    measure(later.step_times, PLAIN, *SLOW)
    measure(later.step_times, TimedStep(WORK, (engine,)), *FAST)
    found = speed(later)
    assert found is not None and found.speedup == 3.0 and not found.retired


def test_another_driver_is_an_update(
    provider: EngineProvider, times: StepTimes, engine: EngineId, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire(times, engine)
    entry = only_entry(provider)
    known = entry.manifest.speed
    assert known is not None
    kept = replace(entry.manifest, speed=replace(known, retired={**known.retired, "the driver": "580.1"}))
    assert "torch or the driver" in str(why_retired(kept)), "what is not known here counts as unchanged"
    now = {**step_times.versions_now(), "the driver": "590.2"}
    monkeypatch.setattr(step_times, "versions_now", lambda: now)
    assert why_retired(kept) is None


@pytest.mark.parametrize("way", ["prepare", "in a run"])
def test_by_hand_it_is_used_again_and_measured_anew(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, way: str
) -> None:
    retire(times, engine)
    hooks = HostHooks(by_hand=True)
    if way == "prepare":
        provider.make(source, CALL, FIRST_USE, hooks)
    else:
        offer = provider.offer(source, CALL, FIRST_USE, hooks)
        assert offer.engine is not None
        provider.pool.give_back(offer.engine)
    assert run_once(provider, source).engine is not None
    suspect(times, engine)
    assert run_once(provider, source).engine is not None, "what was measured before counts no more"
    suspect(times, engine)
    assert run_once(provider, source).reason == REASON


def test_an_engine_that_is_built_anew_is_used(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire(times, engine)
    provider.pool.clear()
    provider.store.delete(engine[0])
    monkeypatch.setattr("slipstream.engine_cache.manifest.utc_now", lambda: "2030-01-01T00:00:00+00:00")
    offer = run_once(provider, source)
    assert offer.engine is not None and id_of(offer.engine.entry) != engine
    measure(times, TimedStep(WORK, (engine,)), *[104.3] * 64)
    assert run_once(provider, source).engine is not None, "these are steps of the old one"


def test_retirement_can_be_switched_off(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource, backend: NullBackend
) -> None:
    off = StepTimes(provider.store, VERSIONS, times.clock_of, retires=False)
    provider.step_times = off
    retire(off, engine)
    assert run_once(provider, source).engine is not None
    found = speed(provider)
    assert found is not None and found.eager_ms == 98.04 and not found.retired, "figures there are"
    provider.step_times = times
    retire(times, engine)
    assert run_once(provider, source).engine is None
    provider.step_times = off
    assert run_once(provider, source).engine is not None


def test_without_a_stopwatch_nothing_is_measured(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    retire(times, engine)
    provider.step_times = None
    assert run_once(provider, source).engine is not None and provider.why_retired(only_entry(provider)) is None


# --------------------------------------------------------------------------------------------------- compared


def turns(times: StepTimes, step: TimedStep, runs: int, runs_apart: int = 1) -> list[int]:
    """The runs, counted from 1, in which steps are computed by the model on purpose."""
    return [number for number in range(1, runs + 1) if times.is_due(step, runs_apart)]


def test_where_nothing_is_known_three_runs_are_used(times: StepTimes, engine: EngineId) -> None:
    assert turns(times, TimedStep(WORK, (engine,)), 500) == [1, 2, 3, 203, 403]


def test_runs_that_are_too_short_for_both_leave_others_between_them(times: StepTimes, engine: EngineId) -> None:
    """Of the twelve at most each has one sample, which may be lost."""
    step = TimedStep(WORK, (engine,))
    assert turns(times, step, 300, runs_apart=2) == [*range(1, 24, 2), 223]
    measure(times, PLAIN, *[30.0] * 3)
    measure(times, step, *[10.0] * 5)
    assert turns(times, step, 100, runs_apart=2) == []


def test_what_was_known_before_the_engine_came_is_compared_later(times: StepTimes, engine: EngineId) -> None:
    measure(times, PLAIN, *SLOW)
    assert turns(times, TimedStep(WORK, (engine,)), 450) == [200, 400]


def test_three_samples_are_enough(times: StepTimes, engine: EngineId) -> None:
    measure(times, PLAIN, 30.0, 30.0)
    assert times.is_due(TimedStep(WORK, (engine,)))
    measure(times, PLAIN, 30.0)
    assert turns(times, TimedStep(WORK, (engine,)), 150) == []


def test_each_kind_of_work_has_its_turns(times: StepTimes, engine: EngineId) -> None:
    assert times.is_due(TimedStep(WORK, (engine,))) and times.is_due(TimedStep("other", (engine,)))


def test_where_memory_ran_out_nothing_is_computed_on_purpose_again(times: StepTimes, engine: EngineId) -> None:
    times.stop_comparing()
    assert turns(times, TimedStep(WORK, (engine,)), 500) == []


def test_comparing_can_be_switched_off(store: EngineStore, engine: EngineId) -> None:
    assert turns(StepTimes(store, compares=False), TimedStep(WORK, (engine,)), 500) == []


def test_a_machine_that_was_busy_for_long_costs_no_engine(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    """The model was timed in the morning, and now a game runs beside the engine."""
    step = TimedStep(WORK, (engine,))
    measure(times, PLAIN, *[30.0] * 20)
    assert not times.is_due(step)
    measure(times, step, *[45.0] * 20)
    assert run_once(provider, source).engine is not None, "it is asked again, side by side"
    for _ in range(3):
        assert times.is_due(step)
        measure(times, step, *[45.0] * 10)
        measure(times, PLAIN, 90.0)
    assert run_once(provider, source).engine is not None
    found = speed(provider)
    assert found is not None and (found.engine_ms, found.eager_ms) == (45.0, 90.0)


def test_what_is_slower_side_by_side_is_retired(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    step = TimedStep(WORK, (engine,))
    measure(times, PLAIN, *[30.0] * 20)
    times.is_due(step)
    measure(times, step, *[45.0] * 20)
    for _ in range(3):
        assert run_once(provider, source).engine is not None and times.is_due(step)
        measure(times, step, *[45.0] * 10)
        measure(times, PLAIN, 31.0)
    assert "takes 45.0 ms a step where your model without Slipstream takes 31.0 ms" in run_once(provider, source).reason


def test_what_seems_slower_is_timed_until_noise_explains_it_no_more(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    """One of the model's first three steps took longer than all of the engine's."""
    step = TimedStep(WORK, (engine,))
    for took in (30.0, 31.0, 62.0):
        assert times.is_due(step)
        measure(times, step, *[45.0] * 10)
        measure(times, PLAIN, took)
    while run_once(provider, source).engine is not None:
        assert times.is_due(step), "nothing is decided"
        measure(times, step, *[45.0] * 10)
        measure(times, PLAIN, 30.0)
    assert "takes 45.0 ms a step where your model without Slipstream takes 30.0 ms" in run_once(provider, source).reason


def test_what_noise_explains_for_long_is_left_alone(times: StepTimes, engine: EngineId) -> None:
    step = TimedStep(WORK, (engine,))
    measure(times, step, *[30.0, 40.0, 50.0] * 20)
    measure(times, PLAIN, *[20.0, 35.0, 50.0] * 20)
    assert turns(times, step, 150) == [*range(1, 13)]


def test_where_no_engine_is_retired_none_is_timed_again_for_it(
    times: StepTimes, store: EngineStore, engine: EngineId
) -> None:
    times, step = StepTimes(store, VERSIONS, times.clock_of, retires=False), TimedStep(WORK, (engine,))
    measure(times, step, *[45.0] * 20)
    measure(times, PLAIN, *[30.0] * 3)
    assert turns(times, step, 150) == []


@pytest.mark.parametrize("way", ["memory ran out", "switched off", "a VAE"])
def test_where_the_model_computes_nothing_any_more_no_engine_is_retired(
    provider: EngineProvider, engine: EngineId, source: FakeSource, way: str, clock: FakeClock
) -> None:
    """Three calls of an idle machine, and nobody knows how busy it was later: only `is_due` has more of them made."""
    times = StepTimes(provider.store, VERSIONS, lambda device: clock, compares=way != "switched off")
    provider.step_times, step = times, TimedStep(WORK, (engine,))
    measure(times, PLAIN, *[30.0] * 3)
    assert way == "a VAE" or not times.is_due(step)
    if way == "memory ran out":
        times.stop_comparing()
    for _ in range(20):
        measure(times, step, *[45.0] * 5)
        assert run_once(provider, source).engine is not None
        found = speed(provider)
        assert found is not None and (found.engine_ms, found.eager_ms, found.retired) == (45.0, 30.0, {})
    measure(times, step, *[20.0] * 64)
    found = speed(provider)
    assert found is not None and (found.engine_ms, found.eager_ms) == (20.0, 30.0), "figures there are all the same"
    measure(times, step, *[45.0] * 64)
    measure(times, PLAIN, *[30.0] * 2)
    assert run_once(provider, source).engine is not None
    measure(times, PLAIN, 30.0)
    assert run_once(provider, source).engine is None, "now both are new"


def test_steps_from_before_the_suspicion_retire_no_engine(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    suspect(times, engine)
    measure(times, PLAIN, *[98.04] * 64)
    measure(times, TimedStep(WORK, (engine,)), *[104.3] * 4)
    assert run_once(provider, source).engine is not None
    measure(times, TimedStep(WORK, (engine,)), 104.3)
    assert run_once(provider, source).reason == REASON


def test_after_a_suspicion_three_more_runs_are_used(times: StepTimes, engine: EngineId) -> None:
    step = TimedStep(WORK, (engine,))
    assert turns(times, step, 10) == [1, 2, 3]
    suspect(times, engine)
    assert turns(times, step, 10) == [1, 2, 3]


def test_a_suspicion_that_was_unfounded_is_dropped(
    provider: EngineProvider, times: StepTimes, engine: EngineId, source: FakeSource
) -> None:
    suspect(times, engine)
    measure(times, TimedStep(WORK, (engine,)), *[90.0] * 5)
    measure(times, PLAIN, *[98.04] * 3)
    measure(times, TimedStep(WORK, (engine,)), *[104.3] * 64)
    assert run_once(provider, source).engine is not None, "it is suspected anew"


def test_little_is_kept_of_what_was_suspected(provider: EngineProvider, times: StepTimes, engine: EngineId) -> None:
    for number in range(300):
        measure(times, TimedStep(number), *FAST)
        measure(times, TimedStep(number, (engine,)), *SLOW)
    assert len(times._earlier) == 256 and len(times._samples) == 256


# ---------------------------------------------------------------------------------------- calls of a model


def calls(provider: EngineProvider, source: FakeSource, count: int, veto: str | None = None) -> AcceleratedModule:
    """As a VAE makes them: a run for each."""
    module = AcceleratedModule(provider, FIRST_USE)
    for _ in range(count):
        with module.run(source, cold_calls=0) as run:
            run(make_inputs(), lambda: source.eager(make_inputs()), veto)
    return module


def takes(clock: FakeClock, source: FakeSource, backend: NullBackend, engine_ms: float, eager_ms: float) -> None:
    """Let calls take so long."""
    compute = source.eager

    def eager(inputs: Any) -> Any:
        clock.now += eager_ms
        return compute(inputs)

    source.eager = eager  # type: ignore[method-assign]
    (engine,) = backend.engines
    run = engine._run

    def slow(tensors: Any) -> Any:
        clock.now += engine_ms
        return run(tensors)

    engine._run = slow  # type: ignore[method-assign]


def test_calls_of_engine_and_model_are_compared(
    provider: EngineProvider,
    times: StepTimes,
    engine: EngineId,
    clock: FakeClock,
    source: FakeSource,
    backend: NullBackend,
) -> None:
    takes(clock, source, backend, 4.0, 12.0)
    calls(provider, source, 6)
    with on_purpose():
        calls(provider, source, 4)
    found = speed(provider)
    assert found is not None and (found.engine_ms, found.eager_ms) == (4.0, 12.0)


def test_calls_that_no_engine_might_have_answered_are_not_compared(
    provider: EngineProvider,
    times: StepTimes,
    engine: EngineId,
    clock: FakeClock,
    source: FakeSource,
    backend: NullBackend,
) -> None:
    takes(clock, source, backend, 4.0, 12.0)
    calls(provider, source, 6)
    calls(provider, source, 6, veto="another node patches the model")
    assert speed(provider) is None


def test_calls_that_were_made_while_the_engine_was_built_are_compared(
    provider: EngineProvider, clock: FakeClock, source: FakeSource, backend: NullBackend, worker: FakeWorker
) -> None:
    worker.gate.clear()
    module = AcceleratedModule(provider, BACKGROUND)
    provider._host_is_idle = lambda: False  # the build waits, and disturbs nobody

    def one() -> None:
        def eager() -> Any:
            clock.now += 12.0
            return source.eager(make_inputs())

        with module.run(source, cold_calls=0) as run:
            run(make_inputs(), eager)

    for _ in range(4):
        one()
    provider._host_is_idle = lambda: True
    worker.gate.set()
    wait_until(lambda: not provider.queue.pending())
    one()
    takes(clock, source, backend, 4.0, 12.0)
    for _ in range(6):
        one()
    assert module.status.eager_calls == 4 and module.status.engine_calls == 7
    found = speed(provider)
    assert found is not None and (found.engine_ms, found.eager_ms) == (4.0, 12.0)


def test_a_call_on_purpose_is_told_as_that(provider: EngineProvider, engine: EngineId, source: FakeSource) -> None:
    module = AcceleratedModule(provider, FIRST_USE)
    module.status.begin_run()
    with module.run(source) as run:
        run(make_inputs(), lambda: source.eager(make_inputs()))
        with on_purpose():
            run(make_inputs(), lambda: source.eager(make_inputs()))
    status = module.status
    assert (status.engine_calls, status.eager_calls) == (1, 1)
    assert status.to_json()["reasons"] == {"timed on purpose, to compare": 1}
    assert status.standing.engine is not None and status.last_run.reasons == {}


def test_steps_in_which_engines_are_made_ready_are_known(provider: EngineProvider, source: FakeSource) -> None:
    before = disturbances()
    run_once(provider, source)
    compared = disturbances()
    assert compared > before
    run_once(provider, source)
    assert disturbances() == compared, "it waited in memory"
    provider.pool.clear()
    run_once(provider, source)
    assert disturbances() > compared
