"""Equal time follows from slopes between timed runs, and caches are tried until they take it."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.benchmarks.skipping.samples import caches
from slipstream.benchmarks.skipping.samples.costs import Costs, Timed, costs_from
from slipstream.benchmarks.skipping.samples.protocol import TIME_TOLERANCE
from slipstream.benchmarks.skipping.samples.shelf import Made, Shelf

FIXED, COMPUTED, SKIPPED, CACHE = 0.2, 0.018, 0.002, 0.001


def timed(computed: int, steps: int, extra: float = 0.0) -> Timed:
    seconds = FIXED + computed * COMPUTED + extra
    return Timed([seconds + 0.002, seconds + 1.0, seconds, seconds + 0.001], computed, steps)


def costs() -> Costs:
    found = {"EasyCache": timed(9, 20, 20 * CACHE), "LazyCache": timed(12, 20)}
    return costs_from(timed(10, 10), timed(20, 20), timed(10, 20, 10 * SKIPPED), found)


def test_a_runs_fixed_cost_is_not_that_of_skipped_steps() -> None:
    found = costs()
    assert found.fixed == pytest.approx(FIXED) and found.computed == pytest.approx(COMPUTED)
    assert found.skipped == pytest.approx(SKIPPED)
    assert found.caches == pytest.approx({"EasyCache": CACHE, "LazyCache": 0.0})
    seconds = found.of_preset(12, 20)
    assert seconds == pytest.approx(FIXED + 12 * COMPUTED + 8 * SKIPPED)
    assert found.affordable(seconds) == 13  # 8 skipped ones pay for 0.89 of a step, and a quarter may be added
    assert Costs(FIXED, COMPUTED, 0.0).affordable(seconds - 8 * SKIPPED) == 12


def test_a_rival_has_the_most_steps_that_fit() -> None:
    found = costs()
    for seconds in (0.3, 0.41, 0.5, 0.77):
        steps = found.affordable(seconds)
        assert found.of_plain(steps) <= seconds + TIME_TOLERANCE * COMPUTED + 1e-9
        assert found.of_plain(steps + 1) > seconds + TIME_TOLERANCE * COMPUTED
    assert found.affordable(0.0) == 2


def test_a_rivals_own_sampler_counts() -> None:
    quick, slow = Costs(FIXED, COMPUTED, SKIPPED), Costs(FIXED, 2 * COMPUTED, SKIPPED)
    seconds = quick.of_preset(12, 20)
    assert slow.affordable(seconds) < quick.affordable(seconds)


def test_a_machine_that_was_not_quiet_is_noticed() -> None:
    with pytest.raises(ValueError, match="not quiet"):
        costs_from(timed(20, 10), timed(10, 20), timed(10, 20), {})


def test_costs_are_kept_for_later_processes(tmp_path) -> None:
    Shelf(tmp_path, "one").add_costs("euler", 4.0, costs())
    assert Shelf(tmp_path, "one").costs("euler", 4.0) == costs()
    assert not Shelf(tmp_path, "other").has_costs("euler", 4.0), "of other seeds"
    assert not Shelf(tmp_path, "one").has_costs("euler", 1.0)


class Cache:
    """Computes fewer steps the higher the threshold."""

    def __init__(self, steps: int, middle: float) -> None:
        self.steps, self.middle, self.runs = steps, middle, 0

    def __call__(self, threshold: float) -> Made:
        self.runs += 1
        share = 0.25 + 0.75 / (1 + (threshold / self.middle) ** 1.5)
        return Made(torch.empty(0), round(self.steps * share), self.steps)


@pytest.mark.parametrize("steps", [20, 30, 50])
@pytest.mark.parametrize("middle", [0.1, 0.4, 1.5])
def test_thresholds_are_found_for_every_number_of_steps(steps: int, middle: float) -> None:
    cache = Cache(steps, middle)
    wanted = [math.floor(steps * share) for share in (0.8, 0.65, 0.5, 0.4)]
    made = caches.try_thresholds(cache, steps, wanted, (0.01, 10.0))
    found = {run.calls for run in made.values()}
    assert all(min(abs(calls - number) for calls in found) <= max(1, steps // 25) for number in wanted), found
    assert cache.runs == len(made) <= caches.TRIES * len(wanted)


def test_the_cache_that_is_nearest_is_a_rival_and_only_if_it_is_near() -> None:
    found = costs()
    seconds = found.of_plain(12)
    assert caches.nearest([10, 11, 13, 15], found.of_plain, seconds) == 13, "of two as near the one with more time"
    assert caches.nearest([11, 15], found.of_plain, seconds) == 11
    assert caches.nearest([], found.of_plain, seconds) is None
    assert found.is_near(found.of_plain(13), seconds) and found.is_near(found.of_plain(11), seconds)
    assert not found.is_near(found.of_plain(16), seconds) and not found.is_near(found.of_plain(8), seconds)
