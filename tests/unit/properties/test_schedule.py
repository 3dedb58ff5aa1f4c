"""Properties of which steps are computed, over runs of any length."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling.schedule import count_of, count_within, countdown_law, parse_steps, power_law, shortened


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, float]:
    steps = draw(st.integers(2, 1000))
    return steps, draw(st.integers(2, steps)), draw(st.floats(0.05, 20))


@given(runs())
@settings(max_examples=400, deadline=None)
def test_a_selection_rises_from_the_first_step_and_stays_in_the_run(run: tuple[int, int, float]) -> None:
    steps, count, power = run
    for law in (power_law, countdown_law):
        computed = law(steps, count, power)
        assert len(computed) == count and computed[0] == 0 and computed[-1] < steps
        assert all(one < other for one, other in itertools.pairwise(computed))
    assert power_law(steps, count, power)[-1] == steps - 1


@given(runs())
@settings(max_examples=200, deadline=None)
def test_a_list_is_read_as_it_was_written_in_both_ways_of_counting(run: tuple[int, int, float]) -> None:
    steps, count, power = run
    computed = power_law(steps, count, power)
    assert parse_steps(", ".join(map(str, computed)), steps) == computed
    assert parse_steps(" ".join(str(steps - 1 - step) for step in computed), steps) == computed


@given(st.text(max_size=40), st.none() | st.integers(1, 50))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_list_or_a_clear_error(text: str, steps: int | None) -> None:
    try:
        found = parse_steps(text, steps)
    except ValueError as error:
        assert len(str(error)) > 20
    else:
        assert found and all(isinstance(step, int) and step >= 0 for step in found)
        assert steps is None or (found[0] == 0 and found[-1] < steps)


@given(st.integers(2, 1000), st.floats(0.001, 1))
def test_a_share_is_at_least_two_and_at_most_all(steps: int, share: float) -> None:
    assert 2 <= count_of(share, steps) <= steps


@given(st.integers(2, 200), st.floats(0.01, 10), st.floats(0, 0.9), st.floats(0.1, 1000))
def test_a_budget_is_kept_and_used_up(steps: int, computed: float, share: float, seconds: float) -> None:
    skipped = share * computed
    try:
        count = count_within(seconds, steps, computed, skipped)
    except ValueError:
        assert seconds < 2 * computed + (steps - 2) * skipped + 1e-6 * steps
        return
    takes = count * computed + (steps - count) * skipped
    assert takes <= seconds + 1e-6 * max(seconds, takes)
    assert count == steps or takes + computed - skipped > seconds - 1e-6 * max(seconds, takes)


@given(runs())
@settings(max_examples=100, deadline=None)
def test_the_sigmas_of_a_selection_fall_to_the_last(run: tuple[int, int, float]) -> None:
    steps, count, power = run
    sigmas = torch.linspace(14.6, 0.0, steps + 1, dtype=torch.float64)
    found = shortened(sigmas, power_law(steps, count, power))
    assert len(found) == count + 1 and found[0] == sigmas[0] and found[-1] == 0
    assert bool((found.diff() < 0).all())
    with pytest.raises(ValueError):
        shortened(sigmas, (steps,))
