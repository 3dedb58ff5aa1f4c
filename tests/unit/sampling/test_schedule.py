"""Which steps are computed: every selection of runs of up to 60 steps, published lists and budgets by trial."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch

from slipstream.sampling.schedule import (
    Steps,
    count_of,
    count_within,
    countdown_law,
    parse_steps,
    power_law,
    shortened,
)


def gaps(computed: Steps, steps: int) -> tuple[int, ...]:
    return tuple(after - before for before, after in itertools.pairwise((*computed, steps)))


COUNTS = [(steps, count) for steps in range(2, 61) for count in range(2, steps + 1)]
POWERS = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0]
PUBLISHED = "19,18,17,16,15,14,13,11,8,4"


def rises(numbers: list[int] | Steps) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def rounded(value: float) -> int | None:
    """The nearest whole number; None where two are as near, up to floating point."""
    return None if abs(value % 1 - 0.5) < 1e-9 else math.floor(value + 0.5)


# ---- the power law


@pytest.mark.parametrize("power", POWERS)
def test_a_selection_has_both_ends_and_so_many_steps(power: float) -> None:
    for steps, count in COUNTS:
        computed = power_law(steps, count, power)
        assert len(computed) == count and rises(computed), (steps, count)
        assert (computed[0], computed[-1]) == (0, steps - 1), (steps, count)
        assert all(type(step) is int for step in computed)


@pytest.mark.parametrize("power", POWERS)
def test_where_places_differ_they_are_the_law(power: float) -> None:
    compared = 0
    for steps, count in COUNTS:
        law = [(steps - 1) * math.exp(power * math.log(k / (count - 1))) if k else 0.0 for k in range(count)]
        nearest = [rounded(place) for place in law]
        computed = power_law(steps, count, power)
        if None not in nearest and rises([place or 0 for place in nearest]):
            assert list(computed) == nearest, (steps, count)
            compared += 1
        elif min(b - a for a, b in itertools.pairwise(law)) > 1:
            assert max(abs(step - place) for step, place in zip(computed, law, strict=True)) <= 0.5 + 1e-9
    assert compared > 50, "too many were passed over"


@pytest.mark.parametrize("power", POWERS)
def test_where_places_collide_steps_move_to_the_next_free_one(power: float) -> None:
    collided = 0
    for steps, count in COUNTS:
        law = [(steps - 1) * (k / (count - 1)) ** power for k in range(count)]
        places = [rounded(place) for place in law]
        if any(place is None for place in places):
            continue
        known = [place or 0 for place in places]
        pushed = [max(known[j] + k - j for j in range(k + 1)) for k in range(count)]
        wanted = [min(step, steps - count + k) for k, step in enumerate(pushed)]
        assert list(power_law(steps, count, power)) == wanted, (steps, count)
        collided += not rises(known)
    assert collided > 50 or power == 1


def test_an_even_selection() -> None:
    for steps, count in COUNTS:
        stride, rest = divmod(steps - 1, count - 1)
        if rest == 0:
            assert power_law(steps, count, 1) == tuple(range(0, steps, stride))
        assert max(gaps(power_law(steps, count, 1), steps)) <= stride + 1


def test_squares() -> None:
    assert power_law(50, 8, 2) == (0, 1, 4, 9, 16, 25, 36, 49)
    assert power_law(65, 5, 3) == (0, 1, 8, 27, 64)
    assert power_law(10, 5, 2) == (0, 1, 2, 5, 9)
    assert power_law(10, 5, 0.5) == (0, 4, 6, 8, 9)


def test_a_higher_power_computes_earlier_steps() -> None:
    for steps, count in COUNTS:
        selections = [power_law(steps, count, power) for power in POWERS]
        for flatter, steeper in itertools.pairwise(selections):
            assert all(late >= early for late, early in zip(flatter, steeper, strict=True)), (steps, count)


@pytest.mark.parametrize("law", [power_law, countdown_law])
@pytest.mark.parametrize("power", [1, 2.5, 4])
def test_all_steps_and_one_step(law: Callable[..., Steps], power: float) -> None:
    for steps in range(1, 61):
        assert law(steps, steps, power) == tuple(range(steps))


@pytest.mark.parametrize("law", [power_law, countdown_law])
@pytest.mark.parametrize(
    ("steps", "count", "least"), [(20, 21, 2), (20, 1, 2), (20, 0, 2), (20, -3, 2), (2, 1, 2), (1, 2, 1), (1, 0, 1)]
)
def test_a_count_out_of_range_says_which_there_are(
    law: Callable[..., Steps], steps: int, count: int, least: int
) -> None:
    with pytest.raises(ValueError, match=f"^{count} of {steps} steps .*; choose from {least} to {steps}\\.$"):
        law(steps, count, 2.0)


@pytest.mark.parametrize("power", [0, -1, -0.5])
def test_a_power_that_selects_nothing(power: float) -> None:
    with pytest.raises(ValueError, match=f"A power of {power} selects nothing; 1 spreads the steps evenly"):
        power_law(20, 10, power)


# ---- the hackathon's law


def test_the_published_list() -> None:
    wanted = (0, 1, 2, 3, 4, 5, 6, 8, 11, 15)
    assert countdown_law(20, 10) == wanted
    assert parse_steps(PUBLISHED, 20) == wanted
    assert gaps(wanted, 20) == (1, 1, 1, 1, 1, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("power", [power for power in POWERS if power >= 1])
def test_countdown_selections(power: float) -> None:
    for steps, count in COUNTS:
        computed = countdown_law(steps, count, power)
        assert len(computed) == count and rises(computed), (steps, count)
        assert computed[0] == 0 and computed[-1] < steps, (steps, count)
        for k, step in enumerate(computed):
            place = steps * math.exp(power * math.log(k / count)) if k else 0.0
            wanted = rounded(place)
            if wanted is None:
                assert abs(step - place) <= 0.5 + 1e-9 or step == k > place, (steps, count)
            else:
                assert step == max(k, wanted), (steps, count)


def test_an_even_countdown_leaves_the_end_to_the_last_computed_step() -> None:
    assert countdown_law(20, 10, 1) == tuple(range(0, 20, 2))
    assert gaps(countdown_law(21, 7, 1), 21) == (3,) * 7


@pytest.mark.parametrize("power", [0.25, 0.5, 0, -1])
def test_a_countdown_with_a_power_below_1_is_a_selection_or_refused(power: float) -> None:
    for steps, count in COUNTS:
        try:
            computed = countdown_law(steps, count, power)
        except ValueError as error:
            assert f"A power of {power}" in str(error)
            continue
        assert power > 0 and rises(computed) and computed[0] == 0 and computed[-1] < steps, (steps, count)


# ---- lists


def test_every_selection_is_read_back_in_both_directions() -> None:
    chance = random.Random(4)
    for steps in range(2, 61):
        for _ in range(5):
            computed = (0, *sorted(chance.sample(range(1, steps), chance.randint(1, steps - 1))))
            rising = [str(step) for step in computed]
            falling = [str(steps - 1 - step) for step in computed]
            for separator in (",", " ", ", ", " ,\n", "\t"):
                assert parse_steps(separator.join(rising), steps) == computed
                assert parse_steps(separator.join(falling), steps) == computed


def test_lists_as_people_write_them() -> None:
    assert parse_steps("0 1 2 4 8 15", 20) == (0, 1, 2, 4, 8, 15)
    assert parse_steps(" ,19,, 18 ,\n4, ", 20) == (0, 1, 15)
    assert parse_steps("0", 20) == parse_steps("0", 1) == (0,)
    assert parse_steps("1 0", 2) == parse_steps("0 1", 2) == (0, 1)


def test_without_a_run_a_list_stays_as_written() -> None:
    assert parse_steps(PUBLISHED) == (19, 18, 17, 16, 15, 14, 13, 11, 8, 4)
    assert parse_steps("3,5 99") == (3, 5, 99)
    with pytest.raises(ValueError, match="neither rise nor fall"):
        parse_steps("3, 5, 4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all", "'all' is not a list of steps; write it as 19,18,17,15,11,4 or 0 1 2 4 8 15"),
        ("0-5", "is not a list of steps; write it as"),
        ("0;5", "is not a list of steps; write it as"),
        ("0, 1.5", "is not a list of steps; write it as"),
        ("", "'' names no steps; write them as 19,18,17,15,11,4 or 0 1 2 4 8 15"),
        (" ,\n", "names no steps; write them as"),
        ("3 -1", "write them as"),
        ("0 0", "'0 0' neither rise nor fall throughout; name each once, in order"),
        ("0 1 1 2", "name each once, in order"),
        ("0 4 2", "name each once, in order"),
        ("19 18 18", "name each once, in order"),
        ("0 1 20", "Step 20 of the list '0 1 20' is not in a run of 20 steps, 0 to 19"),
        ("20,19,4", "Step 20 of the list '20,19,4' is not in a run of 20 steps, 0 to 19"),
        ("1 2 3", "leaves out the first step of 20.*nothing before it to go on from. Begin it with 0"),
        ("18,17,4", "leaves out the first step of 20.*Begin it with 19"),
        ("5", "Begin it with 0"),
    ],
)
def test_what_is_no_list_of_these_steps_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_steps(text, 20)


def test_the_published_list_belongs_to_20_steps() -> None:
    with pytest.raises(ValueError, match="Step 19 .* not in a run of 19 steps, 0 to 18"):
        parse_steps(PUBLISHED, 19)
    with pytest.raises(ValueError, match="first step of 30.*Begin it with 29"):
        parse_steps(PUBLISHED, 30)


# ---- counts


def test_a_share_of_the_steps() -> None:
    assert [count_of(0.5, steps) for steps in (1, 2, 3, 4, 20, 50)] == [1, 2, 2, 2, 10, 25]
    assert [count_of(share, 20) for share in (0.01, 0.35, 0.6, 0.75, 0.99, 1)] == [2, 7, 12, 15, 20, 20]
    for steps in range(2, 61):
        for share in (0.1, 0.3, 0.55, 0.9):
            count = count_of(share, steps)
            assert count == 2 > share * steps or abs(count - share * steps) <= 0.5 + 1e-9
            assert 2 <= count <= steps


@pytest.mark.parametrize("share", [0, -0.5, 1.01, 60, math.nan, math.inf])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match=f"A share of {share} of the steps.*choose one above 0 and at most 1"):
        count_of(share, 20)


def test_a_time_budget_by_trial() -> None:
    """All times in whole milliseconds, where nothing is rounded."""
    chance = random.Random(2)
    fits = 0
    for _ in range(3000):
        steps, computed = chance.randint(2, 30), chance.randint(2, 500)
        skipped = chance.choice([0, chance.randint(0, computed - 1)])
        budget = chance.randint(1, int(1.2 * steps * computed))
        possible = [k for k in range(2, steps + 1) if k * computed + (steps - k) * skipped <= budget]
        arguments = (budget / 1000, steps, computed / 1000, skipped / 1000)
        if possible:
            assert count_within(*arguments) == possible[-1], arguments
            fits += 1
        else:
            least = (2 * computed + (steps - 2) * skipped) / 1000
            with pytest.raises(ValueError, match=f"too few for {steps} steps, which take at least {least:g} s"):
                count_within(*arguments)
    assert 500 < fits < 2900


def test_a_budget_that_fits_exactly() -> None:
    for steps, count in COUNTS:
        seconds = count * 0.1 + (steps - count) * 0.003
        assert count_within(seconds, steps, 0.1, 0.003) == count
    assert count_within(1e6, 20, 0.1) == 20


def test_a_run_of_one_step_has_its_time() -> None:
    assert count_within(1, 1, 1.0) == 1


def test_too_few_seconds_for_one_step() -> None:
    with pytest.raises(ValueError, match="too few for 1 step.* at least 1 s"):
        count_within(0.5, 1, 1.0, 0.25)


@pytest.mark.parametrize(("computed", "skipped"), [(0.1, 0.1), (0.1, 0.2), (0, 0), (-1, 0)])
def test_times_that_cannot_be(computed: float, skipped: float) -> None:
    with pytest.raises(ValueError, match="must take longer than a skipped one; measure both again"):
        count_within(10, 20, computed, skipped)


# ---- a schedule of the computed steps alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shortened_schedule(dtype: torch.dtype) -> None:
    sigmas = torch.tensor([14, 7, 3, 1.5, 0.5, 0], dtype=dtype)
    short = shortened(sigmas, (0, 1, 3))
    assert short.dtype == dtype and short.tolist() == [14, 7, 1.5, 0]
    assert shortened(sigmas, range(5)).equal(sigmas)
    short.zero_()
    assert sigmas.tolist() == [14, 7, 3, 1.5, 0.5, 0]


def test_a_shortened_schedule_ends_where_the_whole_does() -> None:
    assert shortened(torch.tensor([14.0, 7, 3, 1.5]), [0, 1]).tolist() == [14, 7, 1.5], "to be gone on with elsewhere"


@pytest.mark.parametrize("computed", [(0, 5), (-1, 2), ()])
def test_steps_that_a_schedule_has_not(computed: Steps) -> None:
    with pytest.raises(ValueError, match="do not belong to 5 steps; name some of 0 to 4"):
        shortened(torch.linspace(5, 0, 6), computed)
