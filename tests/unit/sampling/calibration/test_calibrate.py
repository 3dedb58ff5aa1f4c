"""Calibration on toy samplers whose best selection is known by trying all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream.sampling.calibration.calibrate import SWAP_RUNS, Pictures, calibrate, most_runs, moved, nearest_preset
from slipstream.sampling.calibration.calibrated import Calibration, Candidate, Choice
from slipstream.sampling.calibration.paths import Gap, cheapest_selections, gaps_up_to, least_gap, with_gap
from slipstream.sampling.calibration.trial import Trial, mean
from slipstream.sampling.presets import PRESETS
from slipstream.sampling.reuse import Reuse
from slipstream.sampling.run import SkippingRun
from slipstream.sampling.schedule import Steps, power_law

STEPS, COUNT = 12, 7


class Toy:
    """One picture whose final latent misses the full run's by something of its own for each gap: errors add up.

    Args:
        costs: squared error of each gap; what is not in it costs a lot.
    """

    def __init__(self, costs: dict[Gap, float], steps: int = STEPS) -> None:
        self.steps = steps
        self.costs = costs
        self.places = {gap: place for place, gap in enumerate(gaps_up_to(steps, steps))}
        self.asked: list[Steps | None] = []

    def cost(self, computed: Steps) -> float:
        return sum(self.costs.get(gap, 100.0) for gap in gaps_of(computed))

    def __call__(self, computed: Steps | None) -> Tensor:
        self.asked.append(computed)
        latent = torch.zeros(1, len(self.places) + 2, dtype=torch.float64)
        latent[0, -1] = 1.0  # the range, which a PSNR is relative to
        for gap in gaps_of(computed) if computed is not None else ():
            latent[0, self.places[gap]] = self.costs.get(gap, 100.0) ** 0.5
        return latent


def gaps_of(computed: Steps) -> Iterator[Gap]:
    return ((i, j) for i, j in itertools.pairwise(computed) if j > i + 1)


def toy(seed: int, steps: int = STEPS, longest: int = 4) -> Toy:
    generator = random.Random(seed)
    return Toy({gap: generator.uniform(0.01, 1.0) for gap in gaps_up_to(longest, steps)}, steps)


def all_selections(count: int, steps: int = STEPS) -> list[Steps]:
    """Every one with the first and the last step."""
    return [(0, *inner, steps - 1) for inner in itertools.combinations(range(1, steps - 1), count - 2)]


def pictures(fitted: Toy, held_out: Toy | None = None) -> Pictures:
    held_out = held_out or fitted
    return Pictures(fitted, held_out, held_out)


# ---- gaps and ways through them


def test_gaps_are_few_and_leave_out_what_is_between() -> None:
    gaps = gaps_up_to(4, 20)
    assert len(gaps) == 18 + 17 + 16 <= 3 * 20
    assert with_gap((3, 6), 8) == (0, 1, 2, 3, 6, 7)
    assert all(len(with_gap(gap, 20)) == 20 - (gap[1] - gap[0] - 1) for gap in gaps)
    assert all(20 - 1 in with_gap(gap, 20) and with_gap(gap, 20)[0] == 0 for gap in gaps)


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_selections_are_those_of_brute_force(seed: int) -> None:
    costs = toy(seed).costs
    found = cheapest_selections(costs, STEPS)
    allowed = {count: [each for each in all_selections(count) if fits(each, costs)] for count in range(2, STEPS + 1)}
    assert set(found) == {count for count, selections in allowed.items() if selections}
    for count, selection in found.items():
        assert len(selection) == count and selection in allowed[count]
        least = min(sum(costs[gap] for gap in gaps_of(each)) for each in allowed[count])
        assert sum(costs[gap] for gap in gaps_of(selection)) == pytest.approx(least)


def fits(computed: Steps, costs: dict[Gap, float]) -> bool:
    return all(gap in costs for gap in gaps_of(computed))


@pytest.mark.parametrize("count", range(2, STEPS))
def test_the_least_gap_is_just_wide_enough(count: int) -> None:
    widest = least_gap(count, STEPS)
    assert count in cheapest_selections(dict.fromkeys(gaps_up_to(widest, STEPS), 1.0), STEPS)
    assert count not in cheapest_selections(dict.fromkeys(gaps_up_to(widest - 1, STEPS), 1.0), STEPS)


# ---- a trial


def test_a_trial_runs_a_selection_once() -> None:
    ran: list[int] = []
    sampler = toy(1)
    trial = Trial(sampler, lambda: ran.append(1))
    selection = with_gap((2, 4), STEPS)
    assert trial.of(selection) == trial.of(selection)
    assert sampler.asked == [None, selection] and trial.runs == len(ran) == 2
    assert trial.error(selection) == pytest.approx((sampler.costs[2, 4] / (len(sampler.places) + 2)) ** 0.5)


def test_a_full_run_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="NaN or Inf"):
        Trial(lambda computed: torch.full((1, 4), float("nan")), lambda: None)


def test_a_selection_that_is_not_finite_is_as_far_off_as_can_be() -> None:
    trial = Trial(lambda steps: torch.tensor([[0.0, 1.0 if steps is None else float("inf")]]), lambda: None)
    assert trial.of((0, 2)) == (-100.0,)


# ---- the search


@pytest.mark.parametrize("seed", range(5))
def test_where_errors_add_up_it_finds_the_closest_of_all(seed: int) -> None:
    sampler = toy(seed)
    found = calibrate(pictures(sampler), STEPS, COUNT).choice.found
    assert sampler.cost(found.computed) == pytest.approx(min(map(sampler.cost, all_selections(COUNT))))


class Curved:
    """Euler's method on a curved way, by the same rules as real runs: errors do not add up.

    Args:
        seed: of the picture.
    """

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.start = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        self.turn = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        self.sigmas = [10.0 * (1 - step / steps) ** 2 for step in range(steps + 1)]

    def __call__(self, computed: Steps | None) -> Tensor:
        steps = len(self.sigmas) - 1
        run, x = SkippingRun(self.sigmas, computed or tuple(range(steps)), Reuse.MEASURED), self.start * 10
        for sigma, following in itertools.pairwise(self.sigmas):
            denoised = run(x, sigma, lambda x=x, sigma=sigma: torch.tanh(x @ self.turn / (sigma + 1)) + 0.3 * x / sigma)
            x = denoised + following / sigma * (x - denoised)
        return x


@pytest.mark.parametrize("seed", range(3))
def test_it_is_at_least_as_close_as_every_start_and_swaps_never_lose(seed: int) -> None:
    sampler = Curved(seed)
    trial = Trial(sampler, lambda: None)
    starts = [power_law(STEPS, COUNT, power) for power in (1.5, 2.0)]
    for start in starts:
        assert trial.mean(moved(trial, start, 100)) >= trial.mean(start)
    found = calibrate(Pictures(sampler, sampler, sampler), STEPS, COUNT).choice.found
    assert found.computed[0] == 0 and found.computed[-1] == STEPS - 1 and len(found.computed) == COUNT
    assert all(mean(found.fitted) >= trial.mean(start) for start in starts)
    ranks = sorted(map(trial.mean, all_selections(COUNT)), reverse=True)
    assert mean(found.fitted) >= ranks[len(ranks) // 20], "among the closest twentieth of all"


def test_swaps_end_where_no_single_step_helps() -> None:
    trial = Trial(Curved(7), lambda: None)
    found = moved(trial, power_law(STEPS, COUNT, 1.0), 1000)
    for k, by in itertools.product(range(1, COUNT - 1), (-1, 1)):
        other = (*found[:k], found[k] + by, *found[k + 1 :])
        if len(set(other)) == COUNT:
            assert trial.mean(other) <= trial.mean(found) + 1e-6


@pytest.mark.parametrize("most", [0, 1, 5])
def test_swaps_are_limited(most: int) -> None:
    trial = Trial(Curved(1), lambda: None)
    start = power_law(STEPS, COUNT, 1.0)
    trial.of(start)
    before = trial.runs
    moved(trial, start, most)
    assert trial.runs - before <= most


def test_few_steps_widen_the_gaps_that_are_measured() -> None:
    """3 of 12 leave a gap of 6 or more, where 4 are measured in other cases."""
    sampler = toy(3, longest=7)
    found = calibrate(pictures(sampler), STEPS, 3).choice.found
    assert sampler.cost(found.computed) == pytest.approx(min(map(sampler.cost, all_selections(3))))


# ---- how much it runs


@pytest.mark.parametrize(("steps", "count", "others"), [(12, 7, ()), (20, 12, (7, 10, 12, 15)), (20, 4, (10,))])
def test_its_runs_are_bounded_and_counted(steps: int, count: int, others: tuple[int, ...]) -> None:
    sampler, seen = Curved(1, steps), []
    found = calibrate(Pictures(sampler, sampler, sampler), steps, count, others, after_run=lambda *it: seen.append(it))
    most = sum(most_runs(steps, count, others))
    assert seen == [(number, most) for number in range(1, found.fitted_runs + found.held_out_runs + 1)]
    assert len(seen) <= most
    assert [choice.count for choice in found.choices] == sorted({count, *others})


def test_the_bound_for_an_ordinary_run() -> None:
    assert sum(most_runs(20, 12)) <= 3 * 20 + SWAP_RUNS + 11
    assert sum(most_runs(30, 18, (10, 15, 22))) <= 3 * 30 + SWAP_RUNS + 2 + 4 * 9


def test_its_progress_is_told_in_pictures() -> None:
    """A run of the held-out ones takes longer where there are more of them."""
    sampler, seen = Curved(1, STEPS), []
    pictures_of = Pictures(sampler, sampler, sampler, sizes=(2, 5))
    found = calibrate(pictures_of, STEPS, COUNT, after_run=lambda *it: seen.append(it))
    fitted, held_out = most_runs(STEPS, COUNT)
    assert {most for _, most in seen} == {2 * fitted + 5 * held_out}
    assert seen[-1][0] == 2 * found.fitted_runs + 5 * found.held_out_runs <= seen[-1][1]


@pytest.mark.parametrize("at", [1, 2, 30])
def test_a_cancel_ends_it_at_once(at: int) -> None:
    def cancel(runs: int, most: int) -> None:
        if runs == at:
            raise KeyboardInterrupt

    sampler = toy(1)
    with pytest.raises(KeyboardInterrupt):
        calibrate(pictures(sampler), STEPS, COUNT, after_run=cancel)
    assert len(sampler.asked) == at


@pytest.mark.parametrize("count", [1, STEPS, STEPS + 1])
def test_a_number_that_skips_nothing_is_refused(count: int) -> None:
    sampler = toy(1)
    with pytest.raises(ValueError, match=f"{count} of {STEPS} steps cannot be chosen"):
        calibrate(pictures(sampler), STEPS, count)
    assert not sampler.asked


# ---- what is held out


def test_what_is_held_out_is_never_fitted_on() -> None:
    """Whatever the held-out pictures are, the same is found, and they are asked for only afterwards."""
    found = set()
    for seed in (10, 11, 12):
        fitted, held_out = toy(1), toy(seed)
        order: list[str] = []
        parts = [noted(order, "fitted", fitted), noted(order, "held out", held_out), noted(order, "plain", held_out)]
        found.add(calibrate(Pictures(*parts), STEPS, COUNT).choice.found.computed)
        first = order.index("held out")
        assert set(order[:first]) == {"fitted"} and "fitted" not in order[first:]
    assert len(found) == 1


def noted(order: list[str], name: str, sampler: Toy):
    def sample(computed: Steps | None) -> Tensor:
        order.append(name)
        return sampler(computed)

    return sample


def same_gaps(cost: float, of: Steps, others: float) -> Toy:
    """One to which skipping as `of` does costs little, or much."""
    costs = dict.fromkeys(gaps_up_to(STEPS, STEPS), others)
    return Toy(costs | dict.fromkeys(gaps_of(of), cost))


def test_what_does_not_carry_over_is_not_proposed() -> None:
    fitted = toy(1)
    preset = calibrate(pictures(fitted), STEPS, COUNT).choice.preset
    result = calibrate(pictures(fitted, same_gaps(0.001, preset.computed, 1.0)), STEPS, COUNT)
    choice, text = result.choice, "\n".join(result.lines())
    assert mean(choice.found.fitted) > mean(choice.preset.fitted)
    assert choice.gain < 0 and not choice.helps and choice.proposal is choice.preset
    assert "NOT closer to your 12-step pictures than balanced (7 steps)" in text
    assert "Proposed, balanced (7 steps): steps " + " ".join(map(str, preset.computed)) in text


def test_what_carries_over_is_proposed() -> None:
    fitted = toy(1)
    found = calibrate(pictures(fitted), STEPS, COUNT).choice.found
    result = calibrate(pictures(fitted, same_gaps(0.001, found.computed, 1.0)), STEPS, COUNT)
    choice, text = result.choice, "\n".join(result.lines())
    assert choice.helps and choice.proposal.computed == found.computed
    assert f"{choice.gain:.2f} dB closer" in text and "closer in 1 of 1" in text and "NOT" not in text


def choice(found: tuple[float, ...], preset: tuple[float, ...]) -> Choice:
    """Of which these are the held-out figures."""
    ways = Candidate("calibrated", (0, 3, 11), found), Candidate("balanced (3 steps)", (0, 5, 11), preset)
    return Choice(*ways, Candidate("shortened sigmas", (0, 3, 11), preset))


@pytest.mark.parametrize(
    ("found", "closer", "helps"),
    [
        ((31.0, 31.0, 31.0, 29.0), 3, True),
        ((60.0, 31.0, 29.0, 29.0), 2, False),
        ((90.0, 29.9, 29.9, 29.9), 1, False),
        ((30.1, 30.1, 30.1, 20.0), 3, False),
        ((30.0, 30.0, 30.0, 30.0), 0, False),
    ],
    ids=["most", "half", "a single one", "most, and one far off", "none"],
)
def test_what_was_found_has_to_be_closer_in_most_pictures_and_in_the_mean(
    found: tuple[float, ...], closer: int, helps: bool
) -> None:
    made = choice(found, (30.0,) * 4)
    assert (made.closer, made.helps) == (closer, helps)
    assert made.proposal is (made.found if helps else made.preset)
    text = "\n".join(Calibration(12, 3, (made,), 1, 1).lines())
    assert f"closer in {closer} of 4 held-out pictures" in text and ("is NOT closer" in text) is not helps


def test_shortened_sigmas_that_are_closer_are_said_to_be() -> None:
    fitted = toy(1)
    plain = same_gaps(1e-6, tuple(range(0, STEPS, 2)), 1e-6)
    result = calibrate(Pictures(fitted, fitted, plain), STEPS, COUNT)
    assert "use Skip Sigmas here" in result.lines()[-1]
    assert "use Skip Sigmas" not in "\n".join(calibrate(pictures(fitted, same_gaps(1, (), 1)), STEPS, COUNT).lines())


def test_where_the_preset_is_found_it_says_so() -> None:
    preset = calibrate(pictures(toy(1)), STEPS, COUNT).choice.preset.computed
    result = calibrate(pictures(same_gaps(0.001, preset, 1.0)), STEPS, COUNT)
    assert result.choice.found.computed == preset and not result.choice.helps
    assert any("found nothing closer than balanced" in line for line in result.lines())


def test_no_picture_is_called_better() -> None:
    for held_out in (toy(1), toy(2), toy(3)):
        assert "better" not in "\n".join(calibrate(pictures(toy(1), held_out), STEPS, COUNT).lines())


def test_the_nearest_preset_has_about_as_many_steps() -> None:
    for preset in (each for each in PRESETS.values() if not each.selection.counts_down):
        assert nearest_preset(len(preset.selection.computed(20)), 20) is preset
