"""Which sizes a block's program takes."""

from __future__ import annotations

import json

import pytest

from slipstream.compile_backend.blocks.sizes import Sizes

SIZES = Sizes(
    (({"b": 1}, {"image": 1}, 64), ({"b": 1}, {"text": 1}, 64), (1, {"image": 1, "text": 1}, 8)),
    {"b": (2, 8), "image": (2, 100), "text": (2, 100)},
)


@pytest.mark.parametrize(
    ("shapes", "is_accepted"),
    [
        ([(2, 10, 64), (2, 7, 64), (1, 17, 8)], True),
        ([(8, 100, 64), (8, 2, 64), (1, 102, 8)], True),
        ([(2, 10, 64), (2, 7, 64), (1, 16, 8)], False),
        ([(2, 10, 64), (3, 7, 64), (1, 17, 8)], False),
        ([(1, 10, 64), (1, 7, 64), (1, 17, 8)], False),
        ([(2, 101, 64), (2, 7, 64), (1, 108, 8)], False),
        ([(2, 10, 32), (2, 7, 64), (1, 17, 8)], False),
        ([(2, 10, 64), (2, 7, 64)], False),
        ([(2, 10, 64), (2, 7, 64), (17, 8)], False),
    ],
)
def test_shapes(shapes: list[tuple[int, ...]], is_accepted: bool) -> None:
    assert SIZES.accept(shapes) is is_accepted
    assert Sizes.from_json(json.loads(json.dumps(SIZES.to_json()))).accept(shapes) is is_accepted


def test_one_of_what_is_open_from_two_on() -> None:
    one = [(1, 10, 64), (1, 7, 64), (1, 17, 8)]
    assert SIZES.accept(one, ones_too=True) and not SIZES.accept([(0, 10, 64), (0, 7, 64), (1, 17, 8)], ones_too=True)
    assert not SIZES.accept([(1, 10, 64), (2, 7, 64), (1, 17, 8)], ones_too=True)
    assert not SIZES.accept([(9, 10, 64), (9, 7, 64), (1, 17, 8)], ones_too=True)
    grown = Sizes((({"b": 1}, {"s": 1}),), {"b": (2, 8), "s": (3, 9)}, ({"b s": 4.0},))
    assert not grown.accept([(1, 1)], ones_too=True)  # no size that the program was found to take for two or more
    assert grown.accept([(1, 5)], ones_too=True) and grown.most_elements([(1, 5)]) == 20


def test_sizes_that_are_taken_for_equal() -> None:
    assert SIZES.takes_others_for_equal([(2, 10, 64), (3, 7, 64), (1, 17, 8)])
    assert not SIZES.takes_others_for_equal([(2, 10, 64), (2, 7, 64), (1, 16, 8)])
    assert not SIZES.takes_others_for_equal([(9, 10, 64), (9, 7, 32), (1, 17, 8)])


def test_a_symbol_that_only_a_multiple_names() -> None:
    pairs = Sizes((({"s": 2, "": 1},),), {"s": (2, 10)})
    assert [size for size in range(30) if pairs.accept([(size,)])] == [2 * half + 1 for half in range(2, 11)]


def test_one_size() -> None:
    sizes = Sizes(((2, 3),), {})
    assert sizes.accept([(2, 3)]) and not sizes.accept([(2, 4)]) and not sizes.are_open and SIZES.are_open
