"""Work on several streams that has to do with the same memory is done in the order in which it is given."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from slipstream.core import streams
from slipstream.core.streams import Turns

CUDA = torch.device("cuda", 1)


class Device:
    """In the place of torch's CUDA: notes what streams are told, and which device is current then."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.current: list[torch.device] = []
        self.here = threading.local()

    @contextmanager
    def device(self, device: torch.device) -> Any:
        self.current.append(device)
        try:
            yield
        finally:
            self.current.pop()

    def current_stream(self, device: torch.device) -> Device.Stream:
        return Device.Stream(self, getattr(self.here, "stream", "first"))

    class Stream:
        def __init__(self, owner: Device, name: str) -> None:
            self._owner, self.name = owner, name

        def wait_event(self, event: Any) -> None:
            assert self._owner.current == [CUDA]
            self._owner.told.append((self.name, "waits"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def record(self, stream: Device.Stream) -> None:
            made.told.append((stream.name, "is noted"))

    for name, value in (("Event", Event), ("device", made.device), ("current_stream", made.current_stream)):
        monkeypatch.setattr(streams.torch.cuda, name, value)
    return made


def test_a_turn_waits_for_the_one_before_whatever_stream_that_had(device: Device) -> None:
    turns = Turns(CUDA)
    for name in ("first", "second", "second"):
        device.here.stream = name
        with turns.turn() as stream:
            device.told.append((stream.name, "works"))  # type: ignore[attr-defined]
    assert device.told == [
        *[("first", what) for what in ("works", "is noted")],
        *[("second", what) for what in ("waits", "works", "is noted")] * 2,
    ]


def test_a_turn_that_fails_is_waited_for_too(device: Device) -> None:
    turns = Turns(CUDA)
    with pytest.raises(ValueError), turns.turn():
        raise ValueError
    with turns.turn():
        pass
    assert [what for _, what in device.told] == ["is noted", "waits", "is noted"] and not device.current


def test_threads_give_their_turns_one_after_the_other(device: Device) -> None:
    turns, is_in, go_on = Turns(CUDA), threading.Event(), threading.Event()

    def work() -> None:
        device.here.stream = "another thread's"
        with turns.turn():
            is_in.set()
            go_on.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert is_in.wait(10)
    threading.Timer(0.1, go_on.set).start()
    with turns.turn():
        assert go_on.is_set()
    thread.join(10)
    assert [name for name, what in device.told if what == "is noted"] == ["another thread's", "first"]


def test_without_a_gpu_there_is_nothing_to_wait_for() -> None:
    turns = Turns(torch.device("cpu"))
    with turns.turn() as stream:
        stream.synchronize()
    turns.wait()
