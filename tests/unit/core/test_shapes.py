"""Which shapes a profile accepts, and what it says about the others."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch

from slipstream.core.shapes import ShapeProfile, ShapeRange, profile_for


def profile() -> ShapeProfile:
    exactly = ShapeRange.exactly
    return ShapeProfile(
        {
            "x": (ShapeRange(1, 2, 4), exactly(4), ShapeRange(32, 64, 128), ShapeRange(32, 64, 128)),
            "context": [exactly(2), ShapeRange(77, 77, 231)],  # type: ignore[dict-item]
        }
    )


@pytest.mark.parametrize("sizes", [(0, 1, 2), (2, 1, 3), (1, 4, 3), (-1, 1, 1), (3, 2, 1)])
def test_a_range_must_be_in_order_and_positive(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 < min <= opt <= max"):
        ShapeRange(*sizes)


def test_a_range_accepts_its_ends() -> None:
    axis = ShapeRange(2, 3, 5)
    assert [size for size in range(8) if axis.accepts(size)] == [2, 3, 4, 5]
    assert (str(axis), str(ShapeRange.exactly(7))) == ("2..5", "7")
    assert ShapeRange.exactly(7).is_static and not axis.is_static


def test_order_of_inputs_does_not_count() -> None:
    turned = ShapeProfile(dict(reversed(profile().inputs.items())))
    assert list(turned.inputs) == ["context", "x"]
    assert turned == profile() and hash(turned) == hash(profile())
    assert {turned: 1}[profile()] == 1


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        profile().inputs["x"] = ()  # type: ignore[index]


def test_round_trips() -> None:
    assert ShapeProfile.from_json(json.loads(json.dumps(profile().to_json()))) == profile()
    assert pickle.loads(pickle.dumps(profile())) == profile()


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"x": (2, 4, 64, 64), "context": (2, 77)}, None),
        ({"x": (1, 4, 32, 128), "context": (2, 231)}, None),
        ({"x": torch.Size((4, 4, 128, 32)), "context": (2, 100)}, None),
        ({"x": (2, 4, 64, 64)}, "inputs are ['x'], the engine takes ['context', 'x']"),
        ({"x": (2, 4, 64, 64), "context": (2, 77), "y": (1,)}, "inputs are ['context', 'x', 'y'], the engine"),
        ({"x": (2, 4, 64), "context": (2, 77)}, "x has 3 axes, the engine takes 4"),
        ({"x": (2, 4, 64, 129), "context": (2, 77)}, "x is 2×4×64×129, the engine takes 1..4×4×32..128×32..128"),
        ({"x": (2, 5, 64, 64), "context": (2, 77)}, "x is 2×5×64×64"),
        ({"x": (2, 4, 64, 64), "context": (3, 77)}, "context is 3×77, the engine takes 2×77..231"),
    ],
)
def test_why_not(shapes: dict[str, tuple[int, ...]], reason: str | None) -> None:
    said = profile().why_not(shapes)
    assert said == reason if reason is None else str(said).startswith(reason)
    assert profile().accepts(shapes) is (reason is None)
    assert math.isinf(profile().distance(shapes)) is (reason is not None)


def test_distance_grows_with_every_axis() -> None:
    at = {"x": (2, 4, 64, 64), "context": (2, 77)}
    assert profile().distance(at) == 0
    assert profile().distance({**at, "x": (4, 4, 64, 64)}) == pytest.approx(1)
    assert profile().distance({**at, "x": (4, 4, 32, 64)}) == pytest.approx(1.5)
    assert profile().distance({**at, "context": (2, 154)}) == pytest.approx(1)


def test_corners_come_once_each_and_are_accepted() -> None:
    assert profile().corners() == [
        {"context": (2, 77), "x": (2, 4, 64, 64)},
        {"context": (2, 77), "x": (1, 4, 32, 32)},
        {"context": (2, 231), "x": (4, 4, 128, 128)},
    ]
    assert all(map(profile().accepts, profile().corners()))
    static = ShapeProfile.static({"x": (2, 4), "scale": ()})
    assert static.corners() == [static.opt] == [{"scale": (), "x": (2, 4)}]
    assert static.is_static and not profile().is_static


def test_the_profile_that_is_tuned_nearest() -> None:
    small = ShapeProfile({"x": (ShapeRange(1, 2, 8),)})
    large = ShapeProfile({"x": (ShapeRange(4, 8, 16),)})
    found = [profile_for([small, large], {"x": (size,)}) for size in (1, 2, 4, 6, 8, 16)]
    assert found == [0, 0, 1, 1, 1, 1]
    assert profile_for([large, large], {"x": (8,)}) == 0
    assert profile_for([small, large], {"x": (17,)}) is None
    assert profile_for([], {"x": (1,)}) is None


def test_in_words() -> None:
    assert str(profile()) == "context 2×77..231, x 1..4×4×32..128×32..128"
    assert str(ShapeProfile.static({"s": ()})) == "s scalar"
