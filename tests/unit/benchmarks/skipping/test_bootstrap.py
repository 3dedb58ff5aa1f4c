"""How sure a mean is: intervals against enumeration, closed forms and counted coverage."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from slipstream.benchmarks.skipping.samples.bootstrap import Interval, paired_bootstrap


def normal(count: int, seed: int, mean: float = 0.0, deviation: float = 1.0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, deviation) for _ in range(count)]


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_few_differences_against_all_their_resamples() -> None:
    """Of 5 differences there are 5⁵ samples, all as likely: the interval that endless resamples would give."""
    differences = [0.3, -1.2, 2.5, 0.9, 4.0]
    means = sorted(sum(drawn) / 5 for drawn in itertools.product(differences, repeat=5))
    exact = [means[round(share * (len(means) - 1))] for share in (0.025, 0.975)]
    found = paired_bootstrap(differences, resamples=200_000)
    assert found.mean == pytest.approx(1.3)
    assert [found.low, found.high] == pytest.approx(exact, abs=0.03)


def test_few_groups_against_all_their_resamples() -> None:
    """Groups of several sizes: each sample's mean is over all differences in it."""
    groups = {"a": [10.0], "b": [2.0, 2.5, 3.0, 2.2, 2.1], "c": [-1.0, 0.0], "d": [5.0, 6.0]}
    pooled = (list(itertools.chain(*drawn)) for drawn in itertools.product(groups.values(), repeat=4))
    means = sorted(sum(values) / len(values) for values in pooled)
    exact = [means[round(share * (len(means) - 1))] for share in (0.1, 0.9)]
    differences = [value for values in groups.values() for value in values]
    names = [name for name, values in groups.items() for _ in values]
    found = paired_bootstrap(differences, groups=names, resamples=200_000, confidence=0.8)
    assert found.mean == pytest.approx(3.18)
    assert [found.low, found.high] == pytest.approx(exact, abs=0.05)


def test_of_many_differences_it_is_the_normal_interval() -> None:
    differences = normal(2000, seed=3, mean=1.5, deviation=2.0)
    found = paired_bootstrap(differences)
    half = 1.95996 * 2.0 / math.sqrt(2000)
    assert found.mean == pytest.approx(sum(differences) / 2000)
    assert [found.low, found.high] == pytest.approx([found.mean - half, found.mean + half], abs=0.06 * half)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_it_holds_the_true_mean_as_often_as_it_says(confidence: float) -> None:
    trials = [paired_bootstrap(normal(40, seed, mean=2), resamples=800, confidence=confidence) for seed in range(500)]
    covered = sum(trial.low <= 2 <= trial.high for trial in trials) / len(trials)
    # It is known to be a little too narrow; and 500 trials leave ± 0.04.
    assert confidence - 0.05 < covered < confidence + 0.03


def clustered(prompts: int, seeds: int, seed: int) -> tuple[list[float], list[str]]:
    """Differences that depend on the prompt more than on the seed, around 0."""
    generator = random.Random(seed)
    shifts = [generator.gauss(0, 1) for _ in range(prompts)]
    differences = [shift + generator.gauss(0, 0.2) for shift in shifts for _ in range(seeds)]
    return differences, [f"prompt {number}" for number in range(prompts) for _ in range(seeds)]


def test_what_shares_a_prompt_counts_less() -> None:
    differences, prompts = clustered(prompts=30, seeds=9, seed=5)
    alone, grouped = paired_bootstrap(differences), paired_bootstrap(differences, groups=prompts)
    assert alone.mean == grouped.mean
    assert 2.4 < width(grouped) / width(alone) < 3.3, "9 alike are worth about one"


def test_groups_hold_the_true_mean_where_single_differences_do_not() -> None:
    samples = [clustered(prompts=30, seeds=6, seed=seed) for seed in range(200)]
    grouped = [paired_bootstrap(values, groups=names, resamples=500) for values, names in samples]
    alone = [paired_bootstrap(values, resamples=500) for values, _ in samples]
    assert sum(it.low <= 0 <= it.high for it in grouped) > 0.87 * 200
    assert sum(it.low <= 0 <= it.high for it in alone) < 0.75 * 200


def test_groups_of_one_change_nothing() -> None:
    differences = normal(30, seed=2)
    assert paired_bootstrap(differences, groups=range(30)) == paired_bootstrap(differences)


def test_groups_need_not_lie_together_and_may_be_a_tensor() -> None:
    differences = [1.0, 5.0, 2.0, 6.0]
    wanted = paired_bootstrap([1.0, 2.0, 5.0, 6.0], groups=["a", "a", "b", "b"])
    assert paired_bootstrap(differences, groups=["a", "b", "a", "b"]) == wanted
    assert paired_bootstrap(differences, groups=torch.tensor([4, 9, 4, 9])) == wanted


def test_a_seed_decides_and_the_hosts_random_numbers_stay() -> None:
    differences = normal(50, seed=1)
    before = torch.get_rng_state()
    first, again, other = (paired_bootstrap(differences, seed=seed) for seed in (4, 4, 5))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_and_lists_are_the_same() -> None:
    differences = normal(50, seed=1)
    wanted = paired_bootstrap(differences)
    tensor = torch.tensor(differences, dtype=torch.float64, requires_grad=True)
    assert paired_bootstrap(tensor) == paired_bootstrap(tuple(differences)) == wanted
    assert paired_bootstrap(tensor.float()).low == pytest.approx(wanted.low, abs=1e-6)


def test_differences_that_are_all_the_same_have_no_width() -> None:
    found = paired_bootstrap([0.1] * 7)
    assert [found.mean, found.low, found.high] == pytest.approx([0.1] * 3, abs=1e-12)


def test_more_confidence_is_wider() -> None:
    differences = normal(50, seed=1)
    widths = [width(paired_bootstrap(differences, confidence=share)) for share in (0.5, 0.8, 0.95, 0.99)]
    assert widths == sorted(widths) and len(set(widths)) == 4


def test_memory_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randint = torch.randint

    def spied(high: int, size: tuple[int, int], **options: object) -> torch.Tensor:
        drawn.append(math.prod(size))
        return randint(high, size, **options)

    monkeypatch.setattr(torch, "randint", spied)
    paired_bootstrap(torch.randn(30_000, generator=torch.Generator().manual_seed(1)), resamples=100)
    assert sum(drawn) == 3_000_000 and max(drawn) <= 1 << 20


@pytest.mark.parametrize(
    ("differences", "options", "said"),
    [
        ([], {}, "Measure at least two pairs"),
        (torch.zeros(0), {}, "Measure at least two pairs"),
        (torch.zeros(2, 3), {}, r"got shape \[2, 3\].*one number for each"),
        (torch.tensor(1.0), {}, r"got shape \[\]"),
        ([1.0], {}, "One difference does not tell.*at least two"),
        ([1.0, 2.0], {"groups": ["a", "a"]}, "One group does not tell.*at least two"),
        ([1.0, math.nan], {}, "Difference 1 is nan.*metrics.capped"),
        ([-math.inf, 1.0], {}, "Difference 0 is -inf.*metrics.capped"),
        ([1.0, 2.0], {"groups": ["a"]}, "2 differences, but 1 groups: give the group of each"),
        ([1.0, 2.0], {"resamples": 0}, "at least 1 resample.*got 0 and 0.95"),
        ([1.0, 2.0], {"confidence": 95}, "between 0 and 1, got 10000 and 95"),
        ([1.0, 2.0], {"confidence": math.nan}, "between 0 and 1"),
    ],
)
def test_what_nothing_can_be_said_of(differences: object, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        paired_bootstrap(differences, **options)  # type: ignore[arg-type]
