"""What a calibration comes to is said in one plain sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.sampling.calibration.calibrated import Calibration, Candidate, Choice
from slipstream.sampling.calibration.conclusion import built_in, conclusion
from slipstream.sampling.presets import PRESETS
from slipstream.sampling.schedule import power_law
from slipstream.sampling.task import Task

OURS = PRESETS["balanced"].selection.computed(20)
THEIRS = power_law(20, 14, 2.0)
RUN = Task("euler", 20)
KARRAS = Task("dpmpp_2m", 20, cfg=7.0, named_schedule="karras")


def calibration(found: float, preset: float, shortened: float = 20.0) -> Calibration:
    candidates = Candidate("calibrated", THEIRS, (found,)), Candidate("balanced (14 steps)", OURS, (preset,))
    return Calibration(20, 14, (Choice(*candidates, Candidate("shortened sigmas", OURS, (shortened,))),), 1, 1)


@pytest.mark.parametrize(
    ("decibels", "close"),
    [
        (47.0, "is hard to tell from the one of all steps (47 dB)"),
        (40.0, "differs a little from the one of all steps (40 dB)"),
        (31.0, "visibly differs from the one of all steps (31 dB)"),
    ],
)
@pytest.mark.parametrize(("name", "chosen"), [("Mine", "Mine"), ("", "custom with the steps below")])
def test_steps_that_were_found(decibels: float, close: str, name: str, chosen: str) -> None:
    said = conclusion(calibration(decibels, decibels - 1), None, RUN, name, 0.283)
    assert (
        said
        == f"Choose {chosen}: of 20 steps 14 are computed, and your picture takes about 28 % less time and {close}."
    )


def test_a_preset_that_is_as_close() -> None:
    found = calibration(45.0, 46.0)
    said = conclusion(found, PRESETS["balanced"], RUN, "Mine", 0.3)
    assert said.startswith(
        "Choose balanced: no steps closer than its own were found, and your picture takes about 30 %"
    )


@pytest.mark.parametrize(
    ("count", "run", "choose"),
    [
        (17, KARRAS, "Choose balanced: no steps closer than its own were found, and"),
        (14, KARRAS, "Choose custom with share 0.7 and power 1.5, {its}17 steps here: "),
        (14, Task("deis", 20), "Choose custom with share 0.7 and power 1.5, {its}every step here: "),
        (14, replace(RUN, is_distilled=True), "Choose custom with share 0.7 and power 1.5, {its}every step here: "),
        (17, replace(KARRAS, is_distilled=True), "Choose custom with share 0.85 and power 1.5, {its}every step here: "),
    ],
)
def test_a_preset_is_proposed_by_its_name_only_where_it_computes_these_steps(
    count: int, run: Task, choose: str
) -> None:
    computed = power_law(20, count, 1.5)
    builtin, ours = built_in(run, computed), Candidate("calibrated", computed, (46.0,))
    assert builtin is PRESETS["balanced"]
    choices = (Choice(ours, ours, Candidate("shortened sigmas", computed, (20.0,))),)
    said = conclusion(Calibration(20, count, choices, 1, 1), builtin, run, "Mine", 0.3)
    assert said.startswith(choose.format(its="the steps of balanced, which by itself computes "))


def test_a_shorter_schedule_that_is_closer() -> None:
    said = conclusion(calibration(45.0, 44.0, shortened=47.5), None, RUN, "Mine", 0.3)
    assert (
        said == "Do not skip steps here: Skip Sigmas comes 2.5 dB closer to your pictures with as many steps computed."
    )


def test_the_presets_whose_steps_they_are() -> None:
    run = Task("euler", 20)
    assert built_in(run, OURS) is PRESETS["balanced"] and built_in(run, THEIRS) is None
    assert built_in(run, PRESETS["hackathon"].selection.computed(20)) is None, "which holds each step"
    karras = Task("dpmpp_2m", 20, cfg=8.0, named_schedule="karras")
    assert built_in(karras, power_law(20, 17, 1.5)) is PRESETS["balanced"] is built_in(karras, OURS)
