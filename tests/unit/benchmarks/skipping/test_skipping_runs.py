"""What is sampled, planned and scored is the same: presets as they are judged, rivals in their time, five draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.benchmarks.skipping import closer, fit, image_to_image, plan
from slipstream.benchmarks.skipping.samples import protocol, ways
from slipstream.benchmarks.skipping.samples.averages import averages
from slipstream.benchmarks.skipping.samples.costs import Costs
from slipstream.benchmarks.skipping.samples.protocol import Condition
from slipstream.benchmarks.skipping.samples.runs import Compared, Runs, make_all, sampled
from slipstream.benchmarks.skipping.samples.score import closeness, figures
from slipstream.benchmarks.skipping.samples.shelf import Made, Shelf
from slipstream.benchmarks.skipping.samples.subject import Outcome
from slipstream.benchmarks.skipping.samples.ways import Way
from slipstream.demo import scenes
from slipstream.sampling.presets import PRESETS
from slipstream.sampling.task import Task

CONDITION = Condition("dpmpp_2m", "normal", 1.0, 20)
CHEAP = Costs(0.1, 0.01, 0.002, {"EasyCache": 0.0005, "LazyCache": 0.0005})


class Levels:
    """Schedules that differ by name and length."""

    def sigmas(self, sampler: str, scheduler: str, steps: int) -> Tensor:
        start = 10.0 + sum(map(ord, scheduler)) / 1000
        return torch.cat([torch.linspace(start, 0.1, steps), torch.zeros(1)])


class Made20:
    """Runs whose latents are the further off the fewer steps are computed; a preset's in their own way."""

    def __init__(self, cached: Sequence[int] = ()) -> None:
        self.ways: dict[str, Way] = {}
        self._cached = iter(cached)

    def __call__(self, way: Way) -> Made:
        steps = len(way.sigmas) - 1
        if way.key not in self.ways:
            self.ways[way.key] = way
        calls = way.computed if way.computed is not None else next(self._cached, steps)
        seed = way.name.startswith("preset") * 1000
        return Made(latents(steps if way.name == "full" else calls, seed), calls, steps)


@functools.cache
def latents(calls: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + calls)
    picture = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8).expand(10, 4, 8, 8)
    spread = torch.linspace(0.5, 1.5, 10).reshape(10, 1, 1, 1)
    return picture + spread * (50 - calls) / 1000 * torch.randn(10, 4, 8, 8, generator=generator)


def runs(make: Any, costs: Costs = CHEAP, condition: Condition = CONDITION) -> Runs:
    return Runs.of_protocol(Levels(), condition, make, lambda sampler, cfg: costs)


def compared(make: Any, **more: Any) -> dict[str, Compared]:
    return {preset.name: found for preset, found in runs(make, **more).compared()}


def test_presets_are_judged_where_they_are_not_shipped() -> None:
    task = Task(CONDITION.sampler, CONDITION.steps, guided=False, has_mask=True)
    for preset in PRESETS.values():
        judged = ways.everywhere(preset)
        assert judged.why_not(task) is None
        assert judged.selection == preset.selection and judged.rule_for(task) == preset.rule_for(task)
    assert PRESETS["extreme"].why_not(task) is not None, "it would compute all steps"


def test_a_preset_that_does_not_skip_is_an_error(tmp_path: Any) -> None:
    class Subject:
        def sample(self, *_: Any) -> Outcome:
            return Outcome(torch.zeros(2, 4, 8, 8), 0.1, 20)

    make = sampled(Subject(), Shelf(tmp_path, "test"), lambda _: None)
    with pytest.raises(RuntimeError, match="computed 20 steps where it should have computed 14"):
        make(ways.preset(Levels(), CONDITION, PRESETS["balanced"]))
    assert make(ways.full(Levels(), CONDITION)).calls == 20


def test_rivals_have_the_presets_time() -> None:
    found = compared(Made20())
    for name, each in found.items():
        count = len(PRESETS[name].selection.computed(20))
        assert each.run.seconds == pytest.approx(CHEAP.of_preset(count, 20))
        plain = {rival: run for rival, run in each.rivals.items() if "Cache" not in rival}
        assert {run.made.calls for run in plain.values()} <= {count, CHEAP.affordable(each.run.seconds)}
        assert all(run.seconds <= each.run.seconds + 0.25 * CHEAP.computed + 1e-9 for run in plain.values())
    assert set(found["fast"].rivals) == {
        "shortened-10", "shortened-12", "dpmpp_2m-normal-12", "dpmpp_2m-karras-12", "dpmpp_2m-beta-12",
        "dpmpp_2m-ays-12", "uni_pc-normal-12",
    }  # fmt: skip


def test_the_same_run_is_made_and_compared_once() -> None:
    levels = Levels()
    euler, ddim = (Condition(sampler, "normal", 4.0, 20) for sampler in ("euler", "ddim"))
    assert ways.full(levels, euler).key == ways.full(levels, ddim).key
    assert ways.plain(levels, euler, "euler", "normal", 20).key == ways.full(levels, euler).key
    assert ways.plain(levels, euler, "euler", "normal", 12).key != ways.plain(levels, euler, "euler", "beta", 12).key
    free = Costs(0.1, 0.01, 0.0, {"EasyCache": 0.0, "LazyCache": 0.0})
    for each in compared(Made20(), costs=free).values():
        assert len({run.key for run in each.rivals.values()}) == len(each.rivals)
        assert sum(name.startswith("shortened") for name in each.rivals) == 1


def test_a_presets_run_hangs_on_its_fingerprint() -> None:
    preset = PRESETS["fast"]
    assert ways.fingerprint(preset) in ways.preset(Levels(), CONDITION, preset).key


def test_a_cache_is_a_rival_only_in_about_the_presets_time() -> None:
    near = compared(Made20(cached=[12] * 20))
    assert near["balanced"].has_cache and not near["extreme"].has_cache
    assert any(name.startswith("EasyCache-") for name in near["balanced"].rivals)
    never_skips = compared(Made20())
    assert not any(each.has_cache for each in never_skips.values())


def test_random_places_are_five_draws_of_as_many_steps() -> None:
    drawn = list(ways.random_places(Levels(), CONDITION))
    assert len({way.key for way in drawn}) == 5 and {way.computed for way in drawn} == {14}
    assert [way.key for way in drawn] == [way.key for way in ways.random_places(Levels(), CONDITION)]


def test_a_row_says_how_equal_its_time_is_and_how_the_worst_tenth_fares() -> None:
    make = Made20()
    whole = runs(make).full()
    preset, found = next(iter(runs(make).compared([PRESETS["balanced"]])))
    row = figures(CONDITION, preset, found, whole, "abc").row
    assert row["seconds"] == round(found.run.seconds, 4) and row["step_seconds"]["fixed"] == CHEAP.fixed
    assert row["best_plain_seconds"] <= row["seconds"] + 0.25 * CHEAP.computed
    assert row["seeds"] == protocol.seeds() and row["fingerprint"] == ways.fingerprint(preset)
    gains = closeness(found.run.made, whole) - closeness(found.rivals[row["best_plain"]].made, whole)
    assert row["worst_tenth_gain_db"] == pytest.approx(float(gains.min()), abs=1e-3)
    assert row["worst_tenth_gain_db"] < row["gain_db"]
    right = figures(CONDITION, preset, found, whole, "abc", lambda latents: latents[..., 4:]).row
    assert right["psnr_db"] != row["psnr_db"]


def test_what_is_not_finite_is_as_far_away_as_can_be() -> None:
    whole = Made(latents(20), 20, 20)
    assert closeness(Made(torch.full((10, 4, 8, 8), torch.nan), 5, 20), whole).tolist() == [-100.0] * 10


# --------------------------------------------------------------------------------------------------------- the fit


def test_the_fit_tries_every_rule_with_every_power() -> None:
    rows = list(fit.rows(Levels(), CONDITION, Made20(), lambda sampler, cfg: CHEAP, "abc", fit.Tried()))
    assert [(row["share"], row["computed"]) for row in rows] == [
        (0.35, 7), (0.5, 10), (0.6, 12), (0.667, 13), (0.7, 14), (0.75, 15),
    ]  # fmt: skip
    for row in rows:
        rules = ("hold", "hold noise", "linear", "measured", "measured with bend")
        powers = ("1", "1.25", "1.5", "1.75", "2", "2.5")
        assert set(row["psnr_db"]) == {f"{rule} {power}" for rule in rules for power in powers}
        assert set(row["median_db"]) == set(row["pooled_db"]) == set(row["psnr_db"])
        assert row["best_plain_db"] == max(row["plain_db"].values())
        shortened = {name.rsplit(" ", 1)[1] for name in row["plain_db"] if name.startswith("shortened")}
        assert shortened == set(powers), "a rival for every power that is tried"
        assert row["seeds"] == {"captions": 12_345, "noise": 7} and row["case"] == "fit"


def test_the_fits_table_has_the_closest_in_the_mean() -> None:
    row = {"case": "fit", "sampler": "euler", "scheduler": "normal", "cfg": 4.0, "share": 0.5}
    rows = [
        {**row, "steps": 20, "psnr_db": {"hold 2": 40.0, "linear 1": 44.0, "linear 2": 60.0}, "best_plain_db": 41.0},
        {**row, "steps": 30, "psnr_db": {"hold 2": 42.0, "linear 1": 41.0}, "best_plain_db": 43.0},
    ]
    assert fit.table(rows)[2:] == [
        "| one step | above 1 | 0.5 | 2 | linear 1 | 42.50, –, – | 42.00 | -2.00 ‡ | euler, normal, 30 steps, CFG 4 |"
    ]


def test_the_fits_table_counts_held_steps_as_the_schedules_that_they_are() -> None:
    """Older rows have shortened schedules of one power, 2, beside selections of another."""
    row = {"case": "fit", "sampler": "euler", "scheduler": "normal", "cfg": 4.0, "share": 0.75, "steps": 20}
    near = {"hold 1.5": 54.8, "hold noise 1.5": 54.8, "measured with bend 1.5": 62.0}
    found = {**row, "psnr_db": near, "best_plain_db": 50.6}
    others = {"median_db": {name: 61.5 for name in near}, "pooled_db": {name: 58.25 for name in near}}
    named = "measured with bend 1.5"
    (line,) = fit.table([found | others])[2:]
    assert f"| 1 | {named} | 62.00, 61.50, 58.25 | 54.80 | +7.20 |" in line, "not 11.4 ahead"
    del near["hold 1.5"]
    assert "| 50.60 | +11.40 ‡ |" in fit.table([found])[2], "at most"
    assert "| 50.60 | +11.40 |" in fit.table([{**found, "plain_powers": [1.0, 1.5]}])[2]
    multistep = {**found, "sampler": "dpmpp_2m", "psnr_db": {"hold 1.5": 54.8, named: 62.0}}
    assert "| 50.60 | +11.40 ‡ |" in fit.table([multistep])[2], "there holding is no schedule"


def test_the_fits_table_says_where_conditions_are_missing() -> None:
    row = {
        "case": "fit",
        "scheduler": "normal",
        "cfg": 4.0,
        "psnr_db": {"hold 2": 40.0},
        "best_plain_db": 41.0,
        "steps": 20,
    }
    whole = [{**row, "sampler": sampler, "share": 0.5} for sampler in ("dpmpp_2m", "uni_pc")]
    lines = fit.table([*whole, {**row, "sampler": "dpmpp_2m", "share": 0.7}])[2:]
    assert [line.split(" | ")[3] for line in lines] == ["2", "1 of 2"]


# ---------------------------------------------------------------------------- more steps, where a floor is missed


def test_more_steps_are_measured_where_a_preset_misses_its_floor() -> None:
    found = closer.cases(protocol.conditions())
    assert [(str(condition), preset.name) for condition, preset, _ in found] == [
        ("dpmpp_2m-normal-cfg7.5-20", "balanced"), ("dpmpp_2m-karras-cfg7.5-20", "balanced"),
    ]  # fmt: skip
    own, rivals = closer.ways_of(Levels(), found[1])
    assert own.computed == 17 and {way.computed for way in rivals} == {17}


# ------------------------------------------------------------------------------------- runs that begin with a picture


def case_of(sampler: str, denoise: float = 0.5) -> image_to_image.Case:
    return next(case for case in image_to_image.cases() if (case.condition.sampler, case.denoise) == (sampler, denoise))


class Karras(Levels):
    """As ComfyUI makes them for SD1.x."""

    def sigmas(self, sampler: str, scheduler: str, steps: int) -> Tensor:
        first, last = 14.6 ** (1 / 7), 0.03 ** (1 / 7)
        return torch.cat([torch.linspace(first, last, steps) ** 7, torch.zeros(1)])


def test_a_run_that_begins_with_a_picture_has_the_last_of_a_longer_ones_noise_levels() -> None:
    whole, part = Levels().sigmas("euler", "normal", 40), image_to_image.LastPart(Levels(), 0.5)
    assert part.sigmas("euler", "normal", 20).tolist() == whole[-21:].tolist()
    fewer = part.sigmas("euler", "normal", 14)
    assert len(fewer) == 15 and fewer[0] == Levels().sigmas("euler", "normal", 28)[-15] < whole[0]


def test_each_power_computes_as_many_steps_as_the_preset_does_there() -> None:
    spread, rivals = image_to_image.ways_of(Levels(), case_of("euler"))
    assert {way.computed for way in (*spread.values(), *rivals)} == {14}
    assert PRESETS["balanced"].selection.power in spread
    assert len({way.key for way in (*spread.values(), *rivals)}) == len(spread) + 2
    closer_ways, _ = image_to_image.ways_of(Karras(), case_of("dpmpp_2m"))
    assert {way.computed for way in closer_ways.values()} == {17}, "as balanced does where it would miss its floor"


def test_a_row_tells_how_close_each_power_comes_and_the_plain_ways_beside_it() -> None:
    row = image_to_image.row_of(_Decoding(), case_of("euler"), Made20(), {"gpu": "CPU", "commit": None})
    assert row["computed"] == 14 and row["steps"] == 20 and row["samples"] == 10
    assert set(row["by_power"]) == {"1", "1.25", "1.5"} and set(row["decoded"]) == {*row["by_power"], "best_plain"}
    assert row["best_plain"] in row["rivals_db"] and row["ci_low"] <= row["gain_db"] <= row["ci_high"]
    told = row["by_power"]["1.5"]["psnr_db"] - row["rivals_db"][row["best_plain"]]["psnr_db"]
    assert row["gain_db"] == pytest.approx(told, abs=2e-3)


class _Decoding(Levels):
    """Latents are its pictures."""

    def decode(self, latents: Tensor) -> Tensor:
        return latents


def test_averages_do_not_hide_what_is_far_off() -> None:
    found = averages(torch.tensor([20.0, 60.0, 61.0, 62.0]))
    assert found["psnr_db"] == 50.75 and found["median_db"] == 60.5
    assert found["pooled_db"] == pytest.approx(20.0 + 10 * math.log10(4), abs=2e-3)


# ------------------------------------------------------------------------------------------- seeds, shares, the plan


def test_no_caption_has_had_a_part_in_the_presets() -> None:
    def captions(count: int, seed: int) -> set[str]:
        return set(scenes.captions(scenes.sample(count, seed)))

    new = captions(protocol.SAMPLES, protocol.CAPTIONS_SEED)
    assert not new & captions(protocol.SAMPLES, protocol.FIRST_LOOK_SEEDS[0])
    assert not new & captions(protocol.FIT_SAMPLES, protocol.FIT_CAPTIONS_SEED)
    assert protocol.NOISE_SEED not in (protocol.FIRST_LOOK_SEEDS[1], protocol.FIT_NOISE_SEED)


def test_processes_share_all_conditions_evenly() -> None:
    conditions = protocol.conditions()
    parts = [protocol.share(conditions, part, 2) for part in range(2)]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, conditions))
    work = [sum(each.steps * (1.0 if each.cfg > 1 else 0.5) for each in part) for part in parts]
    assert max(work) <= 1.1 * min(work)
    assert protocol.share(conditions, 0, 1) == conditions


def test_the_plan_counts_what_is_made() -> None:
    counting, make = plan.Counting(), Made20()
    chosen = [CONDITION, Condition("ddim", "ddim_uniform", 4.0, 20)]
    for condition in chosen:
        make_all(Runs.of_protocol(Levels(), condition, counting, plan.costs))
        make_all(Runs.of_protocol(Levels(), condition, make, plan.costs))
    plain = [way for way in make.ways.values() if way.computed is not None]
    assert counting.runs >= len(plain)
    stages = plan.plan(Levels(), chosen, [CONDITION], fit.Tried())
    assert [name.split(",")[0] for name, _, _ in stages] == ["--time-only", "--fit", "--sample-only", "--beside"]
    assert stages[2][1:] == (counting.runs, counting.steps)
    assert "--sample-only" in plan.lines(stages)[2]
