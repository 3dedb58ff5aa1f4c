"""Which steps and calls are timed, and which are not: with a clock that tests turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.runtime.checking.step_timers import CallTimer, StepTimer, is_on_purpose, on_purpose
from slipstream.runtime.checking.step_times import StepTimes, TimedStep
from slipstream.runtime.loaded.device_clock import disturb
from slipstream.tests.fakes import CPU, FakeClock

ENGINE = ("e" * 64, "2026-01-01T00:00:00+00:00")
BY_ENGINE, BY_MODEL = TimedStep("work", (ENGINE,)), TimedStep("work")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def times(tmp_path: Path, clock: FakeClock) -> StepTimes:
    return StepTimes(EngineStore(tmp_path), clock_of=lambda device: clock)


class Counted:
    """A run whose steps take 1, 2, 3 … ms; which of them are counted."""

    def __init__(self, times: StepTimes, clock: FakeClock) -> None:
        self._timer, self._clock = StepTimer(times, CPU), clock
        self._timer.begin(None)
        self.steps: list[int] = []
        self._number = 0

    def step(self, done: TimedStep | None, spoiled: bool = False) -> bool:
        """One step, and the beginning of the next one; whether it was counted."""
        self._number += 1
        self._clock.now += self._number
        if spoiled:
            disturb()
        counted = self._timer.begin(done)
        if counted:
            self.steps.append(self._number)
        return counted


def counted(times: StepTimes, clock: FakeClock, *steps: TimedStep | None) -> list[int]:
    run = Counted(times, clock)
    for step in steps:
        run.step(step)
    return run.steps


def test_the_first_two_steps_are_cold_and_the_last_one_has_no_end(times: StepTimes, clock: FakeClock) -> None:
    assert counted(times, clock, *[BY_ENGINE] * 5) == [3, 4, 5]
    times.settle()
    assert list(times._samples[BY_ENGINE]) == [3.0, 4.0, 5.0]
    assert counted(times, clock, *[BY_ENGINE] * 2) == [], "each run begins cold"


def test_after_a_change_the_first_step_is_cold(times: StepTimes, clock: FakeClock) -> None:
    steps = [*[BY_ENGINE] * 4, *[BY_MODEL] * 2, *[BY_ENGINE] * 3]
    assert counted(times, clock, *steps) == [3, 4, 6, 8, 9]
    times.settle()
    assert list(times._samples[BY_MODEL]) == [6.0]


def test_other_work_is_a_change(times: StepTimes, clock: FakeClock) -> None:
    with_control = TimedStep("with a ControlNet", (ENGINE,))
    assert counted(times, clock, *[BY_ENGINE] * 3, *[with_control] * 2) == [3, 5]


def test_steps_of_no_use_are_not_counted(times: StepTimes, clock: FakeClock) -> None:
    assert counted(times, clock, *[TimedStep(None)] * 5, BY_ENGINE, BY_ENGINE) == [7]


def test_a_step_without_a_model_is_none(times: StepTimes, clock: FakeClock) -> None:
    """As one that is skipped: it neither counts nor cools anything down, and is no part of its neighbours."""
    steps = [BY_ENGINE, BY_ENGINE, BY_ENGINE, None, BY_ENGINE, None, None, BY_ENGINE]
    assert counted(times, clock, *steps) == [3, 5, 8]
    assert counted(times, clock, None, None, None, BY_ENGINE) == []


def test_a_step_in_which_an_engine_was_loaded_is_not_counted(times: StepTimes, clock: FakeClock) -> None:
    run = Counted(times, clock)
    for number in range(1, 8):
        run.step(BY_ENGINE, spoiled=number == 5)
    assert run.steps == [3, 4, 6, 7]


def test_steps_beside_a_build_are_not_counted(times: StepTimes, clock: FakeClock) -> None:
    run = Counted(times, clock)
    for number in range(1, 9):
        times.is_busy = lambda number=number: number in (4, 5)  # type: ignore[misc]
        run.step(BY_ENGINE)
    assert run.steps == [3, 7, 8], "neither where it began, nor where it ended"


def test_where_no_mark_can_be_had_nothing_is_counted(times: StepTimes, clock: FakeClock) -> None:
    run = Counted(times, clock)
    for number in range(1, 7):
        clock.is_capturing = number == 4
        run.step(BY_ENGINE)
    assert run.steps == [3, 6]


def call(
    timer: CallTimer, clock: FakeClock, step: TimedStep = BY_ENGINE, ms: float = 8.0, spoiled: bool = False
) -> str:
    def compute() -> str:
        clock.now += ms
        if spoiled:
            disturb()
        return "the answer"

    return timer(compute, lambda: step)


def samples(times: StepTimes, step: TimedStep) -> list[float]:
    times.settle()
    return list(times._samples.get(step, []))


def test_calls_are_timed_but_for_the_first_of_each_kind(times: StepTimes, clock: FakeClock) -> None:
    timer = CallTimer(times, CPU, 0)
    assert call(timer, clock) == "the answer"
    call(timer, clock, BY_MODEL, 20.0)
    assert samples(times, BY_ENGINE) == samples(times, BY_MODEL) == []
    call(timer, clock)
    call(CallTimer(times, CPU, 0), clock, BY_MODEL, 21.0)
    assert (samples(times, BY_ENGINE), samples(times, BY_MODEL)) == ([8.0], [21.0])


def test_calls_at_the_beginning_of_a_run_may_be_cold(times: StepTimes, clock: FakeClock) -> None:
    for ms in (10.0, 20.0):
        timer = CallTimer(times, CPU, 2)
        for number in range(4):
            call(timer, clock, ms=ms + number)
    assert samples(times, BY_ENGINE) == [12.0, 13.0, 22.0, 23.0]


def test_calls_that_are_not_as_they_will_be_are_not_counted(times: StepTimes, clock: FakeClock) -> None:
    timer = CallTimer(times, CPU, 0)
    call(timer, clock)
    call(timer, clock, spoiled=True)
    call(timer, clock, TimedStep(None))
    clock.is_capturing = True
    call(timer, clock)
    clock.is_capturing = False
    times.is_busy = lambda: True
    call(timer, clock)
    assert samples(times, BY_ENGINE) == []


def test_on_purpose_ends_with_its_block_whatever_happens() -> None:
    assert not is_on_purpose()
    with pytest.raises(RuntimeError), on_purpose():
        assert is_on_purpose()
        raise RuntimeError
    assert not is_on_purpose()
