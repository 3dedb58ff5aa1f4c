"""Builds that find too little memory of the device get what ComfyUI's models hold, while ComfyUI is idle."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import comfy.model_management as management
import execution
import pytest
import torch

from slipstream.hosts.comfy.process import build_room
from slipstream.hosts.comfy.process.build_room import BuildRoom
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.fakes import CPU

pytestmark = pytest.mark.skipif(not management.cpu_mode(), reason="free memory is made up")

GB = 1 << 30
NEEDED = 2 * GB


class Card:
    """A device of 8 GB: what ComfyUI's models and `others` do not hold is free.

    Attributes:
        in_pieces: what models give back piecemeal is of no use to other processes.
    """

    others = 0
    in_pieces = False

    def free(self, *_: Any, torch_free_too: bool = False) -> Any:
        free = 8 * GB - self.others - sum(patcher.loaded_size() for patcher in management.loaded_models())
        return (free, 0) if torch_free_too else free

    def free_for_others(self, _: torch.device) -> int:
        return 0 if self.in_pieces and management.current_loaded_models else int(self.free())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class ComfyUI:
    """Its queue, and the few lines of its prompt worker that read it."""

    def __init__(self) -> None:
        self.queue = execution.PromptQueue(SimpleNamespace(queue_updated=lambda: None))
        self.unloaded_all = self.resets = 0

    def work(self) -> None:
        """One round of the worker."""
        item = self.queue.get(timeout=0)
        if item is not None:
            self.queue.task_done(item[1], {}, status=None)
        flags = self.queue.get_flags()
        reset = flags.get("free_memory", False)
        if flags.get("unload_models", reset):
            self.unloaded_all += 1
            management.unload_all_models()
        self.resets += bool(reset)

    def put(self) -> None:
        self.queue.put((0, "a prompt", {}, {}, [], {}))


@pytest.fixture(autouse=True)
def _nothing_is_left(nothing_loaded: None) -> Iterator[None]:
    yield
    _models.clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(management, "get_free_memory", made.free)
    monkeypatch.setattr(build_room, "bytes_for_others", made.free_for_others)
    monkeypatch.setattr(management, "extra_reserved_memory", lambda: 0)
    return made


@pytest.fixture
def comfyui(monkeypatch: pytest.MonkeyPatch) -> ComfyUI:
    made = ComfyUI()
    monkeypatch.setattr(build_room, "server_of_process", lambda: SimpleNamespace(prompt_queue=made.queue))
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(build_room, "time", made)
    return made


@pytest.fixture
def room() -> BuildRoom:
    return BuildRoom()


_models: list[Any] = []
"""ComfyUI's list does not keep them alive, but what its nodes made does."""


def load(size: int, seed: int = 1) -> Any:
    """A model that holds so many bytes of the card."""
    patcher = tiny.model(seed=seed)
    _models.append(patcher)
    management.load_models_gpu([patcher])
    patcher.model.model_loaded_weight_memory = patcher.size = size
    return patcher


def loaded() -> list[Any]:
    return [each.model for each in management.current_loaded_models]


def ask_until_answered(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    """A build waits until ComfyUI was idle for long enough, and unloaded what it was asked for."""
    assert not room.is_there(CPU, NEEDED)
    clock.now += 31
    assert not room.is_there(CPU, NEEDED)
    comfyui.work()
    assert room.is_there(CPU, NEEDED)


@pytest.mark.usefixtures("card")
def test_nothing_is_unloaded_where_a_build_fits(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    model = load(6 * GB)
    for _ in range(3):
        assert room.is_there(CPU, NEEDED)
        clock.now += 31
    assert comfyui.queue.flags == {} and loaded() == [model]


@pytest.mark.usefixtures("card")
def test_models_go_where_a_build_lacks_memory(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    load(7 * GB)
    ask_until_answered(room, comfyui, clock)
    assert loaded() == []
    assert comfyui.resets == 0, "what nodes made is kept"


@pytest.mark.usefixtures("card")
def test_no_more_than_twice_the_memory_is_taken(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    large, small = load(3 * GB), load(4 * GB, seed=2)
    management.current_loaded_models.reverse()
    ask_until_answered(room, comfyui, clock)
    assert loaded() == [small] and comfyui.unloaded_all == 0 and large.loaded_size() == 0


def test_all_models_go_where_a_part_frees_nothing(room: BuildRoom, comfyui: ComfyUI, clock: Clock, card: Card) -> None:
    load(3 * GB), load(4 * GB, seed=2)
    card.in_pieces = True
    ask_until_answered(room, comfyui, clock)
    assert loaded() == [] and comfyui.unloaded_all == 1 and comfyui.resets == 0


@pytest.mark.usefixtures("card")
def test_models_stay_for_as_long_as_a_person_is_likely_to_go_on(
    room: BuildRoom, comfyui: ComfyUI, clock: Clock
) -> None:
    model = load(7 * GB)
    for _ in range(3):
        for _ in range(29):
            assert not room.is_there(CPU, NEEDED)
            clock.now += 1
        comfyui.put()
        comfyui.work()
    assert comfyui.queue.flags == {} and loaded() == [model]


@pytest.mark.usefixtures("card")
def test_nothing_is_unloaded_in_the_midst_of_a_prompt(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    load(7 * GB)
    comfyui.put()
    for _ in range(2):
        assert room.is_there(CPU, NEEDED), "the queue of builds says whether this one may run now"
        clock.now += 31
    assert comfyui.queue.flags == {}


@pytest.mark.usefixtures("card")
def test_a_prompt_that_comes_first_keeps_its_models(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    """Its worker reads the flag only after the prompt."""
    model = load(7 * GB)
    assert not room.is_there(CPU, NEEDED)
    clock.now += 31
    assert not room.is_there(CPU, NEEDED) and "unload_models" in comfyui.queue.flags
    comfyui.put()
    comfyui.work()
    assert loaded() == [model] and comfyui.queue.flags == {}
    assert not room.is_there(CPU, NEEDED) and comfyui.queue.flags == {}, "and the time begins anew"


@pytest.mark.usefixtures("card")
def test_a_persons_own_wish_to_unload_is_left_as_it_is(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    load(7 * GB)
    assert not room.is_there(CPU, NEEDED)
    clock.now += 31
    comfyui.queue.set_flag("free_memory", True)
    assert not room.is_there(CPU, NEEDED)
    comfyui.work()
    assert comfyui.unloaded_all == comfyui.resets == 1


def test_nothing_is_unloaded_in_vain(room: BuildRoom, comfyui: ComfyUI, clock: Clock, card: Card) -> None:
    model, card.others = load(1 * GB), 7 * GB - 1
    assert not room.is_there(CPU, NEEDED), "another program may end"
    clock.now += 31
    assert room.is_there(CPU, NEEDED), "the build itself says that memory does not suffice"
    comfyui.work()
    assert loaded() == [model]


def test_a_shortage_that_stays_is_asked_about_once(room: BuildRoom, comfyui: ComfyUI, clock: Clock, card: Card) -> None:
    load(7 * GB)
    assert not room.is_there(CPU, NEEDED)
    clock.now += 31
    assert not room.is_there(CPU, NEEDED)
    card.others = 8 * GB  # another program was faster
    comfyui.work()
    model = load(1)
    assert not room.is_there(CPU, NEEDED)
    clock.now += 16
    assert room.is_there(CPU, NEEDED)
    comfyui.work()
    assert loaded() == [model]


def test_another_shortage_is_asked_about_again(room: BuildRoom, comfyui: ComfyUI, clock: Clock, card: Card) -> None:
    load(3 * GB), load(4 * GB, seed=2)
    ask_until_answered(room, comfyui, clock)
    card.others = 3 * GB
    assert not room.is_there(CPU, NEEDED)
    comfyui.work()
    assert room.is_there(CPU, NEEDED)


@pytest.mark.usefixtures("card")
def test_an_error_in_comfyuis_thread_does_not_end_it(
    room: BuildRoom, comfyui: ComfyUI, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("another extension's")

    load(7 * GB)
    monkeypatch.setattr(management, "free_memory", broken)
    assert not room.is_there(CPU, NEEDED)
    clock.now += 31
    assert not room.is_there(CPU, NEEDED)
    comfyui.work()
    clock.now += 16
    assert room.is_there(CPU, NEEDED)
    monkeypatch.undo()


@pytest.mark.usefixtures("card")
def test_what_models_gave_is_given_back_to_the_next_picture(room: BuildRoom, comfyui: ComfyUI, clock: Clock) -> None:
    load(3 * GB)
    assert room.is_there(CPU, NEEDED) and not room.is_wanted_back(CPU), "nothing was unloaded for it"
    load(4 * GB, seed=2)
    ask_until_answered(room, comfyui, clock)
    assert room.is_wanted_back(CPU)
    comfyui.put()
    comfyui.work()
    room.is_there(CPU, NEEDED)
    assert not room.is_wanted_back(CPU), "models lie there again as they did"
