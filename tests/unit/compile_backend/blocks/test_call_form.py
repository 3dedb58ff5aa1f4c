"""Calls taken apart into tensors and a form, and put together again."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.compile_backend.blocks.call_form import put_together, say_form, taken_apart, tensor_names
from slipstream.runtime.building.job_file import as_plain, from_plain


@dataclass
class Modulation:
    shift: torch.Tensor
    scale: torch.Tensor


X, Y, Z = (torch.full((2,), float(value)) for value in range(3))


@pytest.fixture(autouse=True)
def comfy_has_modulations(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("comfy.modulations")
    monkeypatch.setattr(module, "Modulation", Modulation, raising=False)
    monkeypatch.setattr(Modulation, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def in_a_job(form: Any) -> Any:
    """As it crosses to the build process."""
    return from_plain(json.loads(json.dumps(as_plain(form))))


def test_a_call_is_the_same_again_when_it_is_put_together() -> None:
    arguments = {"x": X, "vec": ((Modulation(Y, Z),), None), "parts": [Y, 2], "name": "a"}
    form, tensors = taken_apart(arguments)
    assert tensor_names(form) == ["parts.0", "vec.0.0.shift", "vec.0.0.scale", "x"]
    found = put_together(in_a_job(form), tensors)
    assert found["x"] is X and found["parts"][0] is Y and found["parts"][1] == 2 and found["name"] == "a"
    assert found["vec"][0][0].shift is Y and found["vec"][0][0].scale is Z and found["vec"][1] is None


@pytest.mark.parametrize(
    "value",
    [None, 5, True, 0.5, "a", (16, (None, X)), [X, 1], Modulation(X, Y)],
    ids=lambda value: type(value).__name__,
)
def test_a_form_crosses_to_the_build_process(value: Any) -> None:
    form, _ = taken_apart({"x": X, "value": value})
    found = in_a_job(form)
    assert found == form and hash(found) == hash(form) and say_form(found) == say_form(form)


@pytest.mark.parametrize("name", ["subprocess:Popen", "comfy.modulations:X", "comfy.modulations:json.loads"])
def test_a_form_makes_nothing_but_data_classes_of_the_host(name: str) -> None:
    sys.modules["comfy.modulations"].__dict__.update(X=X, json=json)
    with pytest.raises(TypeError, match="is no data class"):
        put_together((("x", ("data", name, ())),), [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": X, "n": 1}, {"x": X, "n": True}),
        ({"x": X, "n": 1}, {"x": X, "n": 1.0}),
        ({"x": X}, {"x": X, "y": Y}),
        ({"x": [X]}, {"x": (X,)}),
        ({"x": X, "y": None}, {"x": X, "y": Y}),
    ],
)
def test_other_calls_have_other_forms(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = taken_apart(one)[0], taken_apart(other)[0]
    assert first != second and say_form(first) != say_form(second)


def test_calls_that_differ_in_their_tensors_alone_have_one_form() -> None:
    first, second = taken_apart({"b": X, "a": [Y]})[0], taken_apart({"a": [Z], "b": Y})[0]
    assert first == second and hash(first) == hash(second) and say_form(first) == say_form(second)


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(TypeError, match="a set is among the arguments"):
        taken_apart({"x": {1}})


def test_a_data_class_of_another_extension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Modulation, "__module__", "custom_nodes.other")
    with pytest.raises(TypeError, match="a Modulation is among the arguments"):
        taken_apart({"x": Modulation(X, Y)})
