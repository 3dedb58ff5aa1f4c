"""Rows of other samples or other presets are dropped, and what is shipped follows from all rows of a use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.benchmarks.skipping.samples.fingerprint import fingerprint
from slipstream.benchmarks.skipping.samples.protocol import Condition
from slipstream.benchmarks.skipping.samples.results import (
    NAME,
    condition_of,
    disagreements,
    is_judged,
    keep,
    read,
    read_values,
    uses_from,
    values_key,
)
from slipstream.sampling.presets import PRESETS, Selection, Use
from slipstream.sampling.reuse import Reuse
from slipstream.sampling.samplers import SamplerKind

SEEDS = {"captions": 1, "noise": 2}


def row(sampler: str = "euler", cfg: float = 4.0, steps: int = 20, preset: str = "fast", **more: Any) -> dict[str, Any]:
    found = {
        "sampler": sampler, "scheduler": "normal", "cfg": cfg, "steps": steps,
        "condition": str(Condition(sampler, "normal", cfg, steps)), "preset": preset, "gain_db": 1.0, "ci_low": 0.5,
        "seeds": SEEDS, "fingerprint": "one",
    }  # fmt: skip
    return {**found, **more}


def values(*rows: dict[str, Any]) -> dict[str, Any]:
    return {f"{values_key(each)}-{what}": np.ones(3, np.float32) for each in rows for what in ("preset", "best_plain")}


def kept(folder: Path) -> list[dict[str, Any]]:
    return [each for each in read(folder) if is_judged(each)]


def test_newer_rows_take_the_place_of_older_ones(tmp_path: Path) -> None:
    keep(tmp_path, [row(), {"case": "overhead", "rules": {}}], values(row()))
    keep(tmp_path, [row(ci_low=-0.5), row(cfg=7.5)], values(row(), row(cfg=7.5)))
    assert [(each["cfg"], each["ci_low"]) for each in kept(tmp_path)] == [(4.0, -0.5), (7.5, 0.5)]
    assert len(read(tmp_path)) == 3 and set(read_values(tmp_path)) == set(values(row(), row(cfg=7.5)))
    judged = (tmp_path / f"{NAME}.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(is_judged(json.loads(line)) for line in judged) and len(judged) == 2


def test_rows_of_other_seeds_are_dropped_with_their_values(tmp_path: Path) -> None:
    first_look = {key: value for key, value in row(cfg=1.0).items() if key not in ("seeds", "fingerprint", "condition")}
    keep(tmp_path, [first_look, row(cfg=7.5, seeds={"captions": 9, "noise": 9})], values(first_look, row(cfg=7.5)))
    keep(tmp_path, [row()], values(row()))
    assert [each["cfg"] for each in kept(tmp_path)] == [4.0]
    assert set(read_values(tmp_path)) == set(values(row()))


def test_rows_of_the_same_preset_by_another_rule_are_dropped(tmp_path: Path) -> None:
    keep(tmp_path, [row(cfg=7.5), row(cfg=7.5, preset="quality")], {})
    keep(tmp_path, [row(fingerprint="two")], {})
    assert [(each["cfg"], each["preset"]) for each in kept(tmp_path)] == [(7.5, "quality"), (4.0, "fast")]


def test_rows_beside_the_grid_leave_the_judged_ones_alone(tmp_path: Path) -> None:
    keep(tmp_path, [row()], values(row()))
    inpainted = row(case="inpainting", seeds={"captions": 9, "noise": 9})
    keep(tmp_path, [inpainted, {"case": "fit", "seeds": {"captions": 3, "noise": 4}}], {})
    assert kept(tmp_path) == [{**row(), "shipped": False}]
    keep(tmp_path, [row(sampler="dpmpp_2m", case="inpainting")], {})
    of_case = [each["sampler"] for each in read(tmp_path) if each.get("case") == "inpainting"]
    assert of_case == ["dpmpp_2m"], "those of other seeds are dropped here, too"
    assert len(read_values(tmp_path)) == 2


def test_halves_that_are_scored_apart_come_together(tmp_path: Path) -> None:
    keep(tmp_path, [row()], values(row()))
    keep(tmp_path, [row(steps=30)], values(row(steps=30)))
    assert [each["steps"] for each in kept(tmp_path)] == [20, 30]
    assert set(read_values(tmp_path)) == set(values(row(), row(steps=30)))


def test_a_condition_keeps_its_name_where_the_schedule_has_one_step_more() -> None:
    assert condition_of(row(steps=21, condition="ddim-ddim_uniform-cfg4-20")) == "ddim-ddim_uniform-cfg4-20"
    assert condition_of({**row(), "condition": None}) == "euler-normal-cfg4-20", "of the first look"


# ------------------------------------------------------------------------------------------------- what is shipped

ONE, MULTI = SamplerKind.ONE_STEP, SamplerKind.MULTISTEP
GRID = [Condition(sampler, "normal", cfg, 20) for sampler in ("euler", "dpmpp_2m") for cfg in (1.0, 4.0, 7.5)]


def rows_of(low: dict[tuple[str, float], float], preset: str = "fast") -> list[dict[str, Any]]:
    return [row(sampler, cfg, preset=preset, ci_low=ci_low) for (sampler, cfg), ci_low in low.items()]


def test_a_preset_is_shipped_where_it_is_good_in_every_condition() -> None:
    good = {("euler", 1.0): 0.2, ("euler", 4.0): -0.09, ("euler", 7.5): 3.0}
    assert uses_from(rows_of(good), GRID) == {"fast": {Use(ONE, True), Use(ONE, False)}}
    assert uses_from(rows_of({**good, ("euler", 7.5): -0.1}), GRID) == {"fast": {Use(ONE, False)}}
    assert uses_from(rows_of({**good, ("dpmpp_2m", 1.0): 1.0}), GRID)["fast"] == {
        Use(ONE, True), Use(ONE, False), Use(MULTI, False),
    }  # fmt: skip


def test_a_use_without_all_its_rows_is_not_shipped() -> None:
    assert uses_from(rows_of({("euler", 1.0): 5.0, ("euler", 4.0): 5.0}), GRID) == {"fast": {Use(ONE, False)}}
    assert uses_from([], GRID) == {}
    beside = [{**each, "case": "inpainting"} for each in rows_of({("euler", 1.0): 5.0})]
    assert uses_from(beside, GRID) == {}


def test_the_page_says_where_presets_and_rows_disagree() -> None:
    fast = PRESETS["fast"]
    rows = [{**each, "fingerprint": fingerprint(fast)} for each in rows_of({("euler", 4.0): 5.0})]
    assert disagreements(rows, {"fast": replace(fast, uses=frozenset())}) == []
    told = disagreements(rows, {"fast": replace(fast, uses=frozenset({Use(MULTI, True)}))})
    assert told == ["fast: shipped for multistep samplers at CFG above 1, the rows do not say so"]
    other = replace(fast, uses=frozenset(), selection=Selection(0.5, power=1.0))
    assert disagreements(rows, {"fast": other}) == [
        "fast: its rows were measured with other steps, another rule or other code"
    ]
    hackathon = {"hackathon": PRESETS["hackathon"]}
    assert disagreements([row(preset="hackathon", fingerprint=fingerprint(PRESETS["hackathon"]))], hackathon) == []


def test_a_fingerprint_tells_steps_and_rules_apart_but_not_where_a_preset_is_shipped() -> None:
    fast = PRESETS["fast"]
    changed = [replace(fast, selection=Selection(0.5, power=1.0)), replace(fast, rule=Reuse.HOLD_NOISE)]
    assert len({fingerprint(each) for each in (fast, *changed)}) == 3
    assert fingerprint(replace(fast, uses=frozenset(), note="other words")) == fingerprint(fast)
