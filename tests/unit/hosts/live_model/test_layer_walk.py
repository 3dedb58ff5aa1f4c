"""The quick walk finds what torch's own finds, also after layers were replaced, added and taken away."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from slipstream.hosts.live_model import layer_walk
from slipstream.hosts.live_model.layer_walk import layers_of, tensors_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.ModuleList([nn.BatchNorm1d(4), nn.SiLU()]))
        self.nothing = None
        self.register_module("missing", None)
        self.second = nn.ModuleDict({"shared": self.first[0], "own": nn.Linear(4, 2, bias=False)})
        self.scale = nn.Parameter(torch.ones(()))


def assert_same(model: nn.Module) -> None:
    assert list(layers_of(model).items()) == list(model.named_modules())
    wanted = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert {name: id(tensor) for name, tensor in tensors_of(layers_of(model)).items()} == wanted


def replace(model: Model) -> None:
    model.first[1][1] = nn.GELU()


def add(model: Model) -> None:
    model.second["more"] = nn.Sequential(nn.Linear(2, 2))


def take_away(model: Model) -> None:
    del model.first[1]


def rename(model: Model) -> None:
    model.other = model.second
    del model.second


def empty_a_place(model: Model) -> None:
    model.first = None


def other_numbers(model: Model) -> None:
    model.second["own"].weight = nn.Parameter(torch.zeros(2, 4))


def more_numbers(model: Model) -> None:
    model.second["own"].register_buffer("factor", torch.ones(2))


def fewer_numbers(model: Model) -> None:
    model.first[0].bias = None


def another_name(model: Model) -> None:
    """As many parameters as before, of as many layers."""
    model.offset = model.scale
    del model.scale


CHANGES = [
    replace, add, take_away, rename, empty_a_place, other_numbers, more_numbers, fewer_numbers, another_name,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_found(change: Callable[[Model], None]) -> None:
    model = Model()
    assert_same(model)
    assert_same(model)
    change(model)
    assert_same(model)


def test_a_change_deep_inside_a_new_layer_is_found() -> None:
    model = Model()
    assert_same(model)
    add(model)
    assert_same(model)
    model.second["more"][0] = nn.Identity()
    assert_same(model)


def test_a_scripted_layer_is_one_too() -> None:
    """Its parts are in no dict of Python's."""
    model = Model()
    model.first[1][1] = torch.jit.script(nn.Sequential(nn.SiLU()))
    for _ in range(2):
        assert list(layers_of(model)) == [name for name, _ in model.named_modules()]
        wanted = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        assert sorted(tensors_of(layers_of(model))) == sorted(wanted)


def test_another_thread_mixes_nothing_up() -> None:
    class Shifting(dict):  # type: ignore[type-arg]
        """Between a look at its names and one at its values, somebody takes one out and puts it back."""

        shifts = 1

        def values(self):  # type: ignore[no-untyped-def]
            if self.shifts:
                self.shifts -= 1
                self["weight"] = self.pop("weight")
            return super().values()

    model = Model()
    layer = model.first[0]
    layer._parameters = Shifting(layer._parameters)
    for _ in range(2):
        found = tensors_of(layers_of(model))
        assert found["first.0.weight"] is layer.weight and found["first.0.bias"] is layer.bias
    layers = layers_of(model)
    layer_walk._known.clear()
    assert tensors_of(layers).keys() == found.keys()


def test_models_that_say_they_are_equal_are_not_mixed_up() -> None:
    class Equal(Model):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    for model in (Equal(), Equal()):
        assert layers_of(model)["second.own"] is model.second["own"]


def test_no_model_is_kept_alive() -> None:
    model = Model()
    vars(model.first[0])["whole"] = model  # as some extensions do
    layers_of(model)
    gone = weakref.ref(model), weakref.ref(model.first)
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]
