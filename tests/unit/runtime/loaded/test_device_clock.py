"""Marks of a device's work; of a GPU's, by events that are pretended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.runtime.loaded import device_clock
from slipstream.runtime.loaded.device_clock import CudaClock, HostClock, clock_of, disturb, disturbances
from slipstream.tests.fakes import CPU

CUDA = torch.device("cuda", 0)


class Gpu:
    """Where a GPU stands in the work that it was given, in ms; and the host's own clock."""

    def __init__(self) -> None:
        self.given = 0.0
        self.done = 0.0
        self.host = 0.0
        self.captures = False
        self.asked = 0


class Event:
    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert not self.gpu.captures, "an event in the midst of a capture"
        self.at = self.gpu.given

    def query(self) -> bool:
        assert not self.gpu.captures, "a question in the midst of a capture"
        self.gpu.asked += 1
        return self.gpu.done >= self.at

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(Event, "gpu", made, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.captures)
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: made.host / 1000)
    yield made


def test_each_device_has_its_clock() -> None:
    assert isinstance(clock_of(CPU), HostClock) and isinstance(clock_of(CUDA), CudaClock)


def test_on_a_cpu_by_the_clock() -> None:
    host = HostClock()
    begin = host.mark()
    assert 0 <= host.milliseconds(begin, host.mark()) < 1000
    assert host.milliseconds(1.0, 1.25) == 250


def test_on_a_gpu_once_it_has_got_there(gpu: Gpu) -> None:
    cuda = CudaClock(CUDA)
    begin = cuda.mark()
    gpu.given = 40.0
    end = cuda.mark()
    assert begin is not None and end is not None
    assert cuda.milliseconds(begin, end) is None, "nobody waits for it"
    gpu.done = 40.0
    assert cuda.milliseconds(begin, end) == 40.0


def test_the_longer_of_both_times_counts(gpu: Gpu) -> None:
    """Behind a long queue a GPU never waits for the host, which takes longer to launch than the GPU to compute."""
    cuda = CudaClock(CUDA)
    begin = cuda.mark()
    gpu.given, gpu.host, gpu.done = 30.0, 45.0, 100.0
    end = cuda.mark()
    assert begin is not None and end is not None and cuda.milliseconds(begin, end) == pytest.approx(45.0)


def test_nothing_is_marked_or_asked_during_a_capture(gpu: Gpu) -> None:
    cuda = CudaClock(CUDA)
    begin, end = cuda.mark(), cuda.mark()
    assert begin is not None and end is not None
    gpu.captures = True
    assert cuda.mark() is None and cuda.milliseconds(begin, end) is None
    gpu.captures = False
    assert cuda.milliseconds(begin, end) == 0.0


def test_disturbances_are_counted() -> None:
    before = disturbances()
    disturb()
    assert disturbances() == before + 1
