"""What a user picks: selections for every length of run, reasons to skip nothing, the rule for each sampler."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from slipstream.sampling.presets import (
    CUSTOM,
    DEFAULT,
    EVERYWHERE,
    FEWEST_MEASURED,
    FEWEST_STEPS,
    HISTORICAL,
    PRESETS,
    Preset,
    Selection,
    Use,
    custom,
    why_too_short,
)
from slipstream.sampling.reuse import Reuse
from slipstream.sampling.samplers import SamplerKind, kind_of, method_of, rule_for
from slipstream.sampling.task import Task

LENGTHS = range(12, 101)
SHARES = {"quality": 0.75, "balanced": 0.7, "fast": 0.5, "extreme": 0.35, "hackathon": 0.5}
CALLS_ONCE = [kind for kind in SamplerKind if kind not in (SamplerKind.SEVERAL_CALLS, SamplerKind.UNKNOWN)]
SAMPLERS = {
    SamplerKind.ONE_STEP: "euler",
    SamplerKind.MULTISTEP: "dpmpp_2m",
    SamplerKind.LINEAR_MULTISTEP: "deis",
    SamplerKind.ANCESTRAL: "euler_ancestral",
    SamplerKind.STOCHASTIC_MULTISTEP: "dpmpp_2m_sde",
    SamplerKind.SEVERAL_CALLS: "heun",
    SamplerKind.UNKNOWN: "of_another_extension",
}
SELDOM = Preset("seldom", Selection(0.5), "for a test", uses=frozenset({Use(SamplerKind.ONE_STEP, True)}))

each_preset = pytest.mark.parametrize("name", PRESETS)
each_kind = pytest.mark.parametrize("kind", SamplerKind)


def task(kind: SamplerKind, steps: int = 20, guided: bool = True, **more: Any) -> Task:
    return Task(SAMPLERS[kind], steps, guided, **more)


# ---- presets


def test_the_presets() -> None:
    assert list(PRESETS) == list(SHARES), "in the order of what they compute, the historical one last"
    assert list(PRESETS)[-1] == HISTORICAL
    assert all(name == preset.name for name, preset in PRESETS.items())
    assert DEFAULT in PRESETS and CUSTOM not in PRESETS
    assert all(preset.note for preset in PRESETS.values())


@each_preset
def test_a_preset_computes_its_share_of_every_run(name: str) -> None:
    for steps in LENGTHS:
        computed = PRESETS[name].selection.computed(steps)
        assert abs(len(computed) - SHARES[name] * steps) <= 0.5 + 1e-9, steps
        assert all(a < b for a, b in itertools.pairwise(computed)), steps
        assert computed[0] == 0 and computed[-1] < steps, steps
        if name != "hackathon":
            assert computed[-1] == steps - 1, "the last step is computed"


@each_preset
def test_a_preset_computes_more_of_the_early_steps(name: str) -> None:
    for steps in LENGTHS:
        computed = PRESETS[name].selection.computed(steps)
        early = sum(2 * step < steps for step in computed)
        assert early >= len(computed) / 2, steps


def test_a_faster_preset_computes_less() -> None:
    for steps in LENGTHS:
        counts = [len(PRESETS[name].selection.computed(steps)) for name in ("quality", "balanced", "fast", "extreme")]
        most, more, less, least = counts
        assert most >= more > less > least, steps
        assert most > more or steps == 14, "which is too few to tell seven in ten from three in four"


@pytest.mark.parametrize(
    ("steps", "counts"), [(20, (15, 14, 10, 7, 10)), (30, (22, 21, 15, 10, 15)), (50, (38, 35, 25, 18, 25))]
)
def test_counts_that_are_documented(steps: int, counts: tuple[int, ...]) -> None:
    assert tuple(len(preset.selection.computed(steps)) for preset in PRESETS.values()) == counts


def test_the_hackathons_list() -> None:
    listed = [19 - step for step in PRESETS["hackathon"].selection.computed(20)]
    assert listed == [19, 18, 17, 16, 15, 14, 13, 11, 8, 4]
    assert all(PRESETS["hackathon"].rule_for(task(kind)) is Reuse.HOLD for kind in SamplerKind)


@each_preset
@each_kind
def test_a_preset_has_the_rule_of_the_sampler_unless_its_own(name: str, kind: SamplerKind) -> None:
    assert PRESETS[name].rule_for(task(kind)) is (Reuse.HOLD if name == "hackathon" else rule_for(kind))


# ---- reasons to compute every step


@each_preset
def test_samplers_that_presets_are_for(name: str) -> None:
    """Without a floor, which is a matter of its own."""
    preset = dataclasses.replace(PRESETS[name], floor=0.0)
    for kind, guided, steps in itertools.product(CALLS_ONCE, (True, False), range(FEWEST_MEASURED, 101)):
        assert (preset.why_not(task(kind, steps, guided)) is None) == (Use(kind, guided) in preset.uses)


@each_preset
@pytest.mark.parametrize("steps", [1, 11, 20, 50])
def test_samplers_that_presets_are_not_for(name: str, steps: int) -> None:
    several = PRESETS[name].why_not(task(SamplerKind.SEVERAL_CALLS, steps))
    unknown = PRESETS[name].why_not(task(SamplerKind.UNKNOWN, steps))
    assert several is not None and "several times a step" in several
    assert unknown is not None and f"choose {CUSTOM}" in unknown


@each_kind
@pytest.mark.parametrize("guided", [True, False])
def test_a_sampler_that_a_preset_was_worse_with(kind: SamplerKind, guided: bool) -> None:
    reason = SELDOM.why_not(task(kind, 20, guided))
    if kind is SamplerKind.ONE_STEP and guided:
        assert reason is None
    else:
        assert reason is not None
        where = f"with {kind.value} samplers at CFG {'above 1' if guided else '1'}"
        assert (where in reason and "seldom was not measured" in reason) == (kind in CALLS_ONCE)


def test_a_refusal_says_what_was_measured() -> None:
    """Closer in the mean everywhere is not said to be further off."""
    said = PRESETS["quality"].why_not(task(SamplerKind.MULTISTEP))
    assert said == (
        "with multistep samplers at CFG above 1, quality was measured closer than a run without skipping in the same "
        "time, but not surely in each of 18 cases (the least lead is 0.3 dB); choose custom to skip steps all the same"
    )
    behind = PRESETS["quality"].why_not(task(SamplerKind.ANCESTRAL))
    assert behind is not None and "was measured closer in 3 of 6 cases, by up to 2.1 dB" in behind
    at_low_cfg = PRESETS["quality"].why_not(task(SamplerKind.MULTISTEP, cfg=4.0))
    assert at_low_cfg is not None and at_low_cfg.endswith("; choose balanced there")


def test_a_short_run() -> None:
    assert FEWEST_STEPS == 12 and FEWEST_MEASURED == 20
    for name, kind, guided in itertools.product(PRESETS, CALLS_ONCE, (True, False)):
        preset = dataclasses.replace(PRESETS[name], uses=EVERYWHERE, floor=0.0)
        for steps in range(FEWEST_MEASURED):
            reason = f"a run of {steps} steps is short: the presets were measured with 20 and more; choose custom"
            assert str(preset.why_not(task(kind, steps, guided))).startswith(reason)
        assert preset.why_not(task(kind, FEWEST_MEASURED, guided)) is None
    assert why_too_short(12) is None and "each of fewer than 12" in str(why_too_short(11))


# ---- the floor


def reached(name: str, steps: int, **more: Any) -> float | None:
    """dB of a preset where it skips."""
    run = Task(steps=steps, **more)
    preset = PRESETS[name]
    if preset.why_not(run) is not None:
        return None
    figure = preset.figure_for(run)
    assert figure is not None
    return figure.picture_db


def test_what_skips_was_measured_to_reach_its_floor() -> None:
    assert (PRESETS[DEFAULT].floor, {each.floor for each in PRESETS.values() if each.name != DEFAULT}) == (40.0, {30.0})
    skipping = 0
    for name, sampler, steps, cfg in itertools.product(
        PRESETS, SAMPLERS.values(), (20, 25, 30, 50, 80), (1.0, 2.0, 4.0, 7.0, 8.0, None)
    ):
        found = reached(name, steps, sampler=sampler, guided=cfg != 1.0, cfg=cfg)
        assert found is None or found >= PRESETS[name].floor
        skipping += found is not None
    assert skipping > 100


@pytest.mark.parametrize(
    ("name", "sampler", "steps", "cfg", "skips"),
    [
        ("balanced", "euler", 20, 8.0, 14),
        ("balanced", "dpmpp_2m", 20, 4.0, 14),
        ("balanced", "dpmpp_2m karras", 20, 4.0, 14),
        ("balanced", "dpmpp_2m karras", 20, 4.5, 17),
        ("balanced", "dpmpp_2m karras", 29, 8.0, 25),
        ("balanced", "dpmpp_2m karras", 30, 8.0, 21),
        ("balanced", "dpmpp_2m karras", 20, None, 17),
        ("balanced", "dpmpp_2m normal", 20, 8.0, None),
        ("balanced", "dpmpp_2m beta", 20, 8.0, None),
        ("balanced", "dpmpp_2m", 20, 8.0, None),
        ("balanced", "dpmpp_2m", 30, 8.0, 21),
        ("balanced", "uni_pc", 20, 4.0, 14),
        ("balanced", "uni_pc", 20, 8.0, None),
        ("balanced", "uni_pc", 30, 8.0, None),
        ("balanced", "uni_pc", 50, 8.0, 35),
        ("balanced", "res_multistep", 20, 8.0, None),
        ("balanced", "res_multistep", 20, 1.0, 14),
        ("fast", "euler", 20, 8.0, 10),
        ("fast", "euler_ancestral", 20, 8.0, None),
        ("fast", "euler_ancestral", 20, 4.0, None),
        ("fast", "euler_ancestral", 30, 4.0, 15),
        ("fast", "euler_ancestral", 50, 8.0, 25),
        ("extreme", "euler_ancestral", 50, 1.0, None),
        ("extreme", "euler_ancestral", 50, 4.0, 18),
        ("hackathon", "euler", 20, 7.5, 10),
        ("hackathon", "deis", 20, 7.5, None),
    ],
)
def test_presets_that_miss_their_floor_skip_less_or_nothing(
    name: str, sampler: str, steps: int, cfg: float | None, skips: int | None
) -> None:
    method, _, scheduler = sampler.partition(" ")
    run = Task(method, steps, guided=cfg != 1.0, cfg=cfg, named_schedule=scheduler)
    reason = PRESETS[name].why_not(run)
    assert (reason is None) == (skips is not None)
    if skips is not None:
        assert len(PRESETS[name].computed(run)) == skips
    else:
        assert reason is not None and f"{name} was measured too far from the picture of all steps: " in reason


def test_the_schedule_of_karras_is_known_by_its_noise_levels() -> None:
    first, last = 14.6 ** (1 / 7), 0.03 ** (1 / 7)
    karras = tuple((first + place / 19 * (last - first)) ** 7 for place in range(20))
    even = tuple(14.6 * (1 - place / 20) for place in range(20))
    assert Task("dpmpp_2m", 20, sigmas=(*karras, 0.0)).schedule == "karras"
    assert Task("dpmpp_2m", 10, sigmas=(*karras[10:], 0.0)).schedule == "karras", "its later part too"
    assert (
        Task("dpmpp_2m", 20, sigmas=(*even, 0.0)).schedule == Task("dpmpp_2m", 2, sigmas=(2.0, 1.0, 0.0)).schedule == ""
    )
    assert Task("dpmpp_2m", 20, named_schedule="beta").schedule == "beta"
    assert len(PRESETS["balanced"].computed(Task("dpmpp_2m", 20, cfg=7.0, sigmas=(*karras, 0.0)))) == 17


def test_a_floor_is_no_matter_for_custom() -> None:
    for sampler in SAMPLERS.values():
        preset = custom(Selection(share=0.1))
        run = Task(sampler, 50)
        assert (preset.why_not(run) is None) == (run.kind is not SamplerKind.SEVERAL_CALLS)
        assert preset.computed(run) == preset.selection.computed(50)


def test_high_guidance_is_remarked() -> None:
    assert PRESETS["balanced"].remark(Task("euler", 20, cfg=8.0)) == ""
    assert PRESETS["balanced"].remark(Task("euler", 20, cfg=12.0)) == "measured up to CFG 7.5"


UNMEASURED: dict[str, tuple[dict[str, Any], str]] = {
    "distilled": ({"is_distilled": True}, "this is a distilled model, for few steps"),
    "of a file": (
        {"is_distilled": True, "distilled_by": "dmd2.safetensors"},
        "this is a distilled model (dmd2.safetensors), for few",
    ),
    "inpainting": ({"has_mask": True}, "with a mask for inpainting, balanced was measured ahead with Euler and behind"),
    "packed": ({"has_parts": True}, "not measured with latents of several parts"),
}


@pytest.mark.parametrize(("what", "said"), UNMEASURED.values(), ids=UNMEASURED)
@each_preset
def test_runs_that_only_custom_is_for(name: str, what: dict[str, Any], said: str) -> None:
    for kind in CALLS_ONCE:
        reason = dataclasses.replace(PRESETS[name], uses=EVERYWHERE, floor=0.0).why_not(task(kind, **what))
        assert reason is not None and said in reason and f"choose {CUSTOM}" in reason
        assert custom(Selection()).why_not(task(kind, **what)) is None


def test_nothing_is_followed_through_the_parts_of_a_packed_latent() -> None:
    """A share that is fitted over all of it would be that of the largest part."""
    for kind in SamplerKind:
        assert custom(Selection()).rule_for(task(kind, has_parts=True)) is Reuse.HOLD
        assert custom(Selection(), Reuse.LINEAR).rule_for(task(kind, has_parts=True)) is Reuse.LINEAR
        assert custom(Selection()).rule_for(task(kind, has_mask=True)) is rule_for(kind)


@each_preset
def test_presets_of_ours_have_nothing_to_remark(name: str) -> None:
    assert PRESETS[name].remark(task(SamplerKind.ONE_STEP, cfg=7.0, model="SDXL", sigmas=(1.0, 0.0))) == ""


# ---- custom


@each_kind
@pytest.mark.parametrize("steps", [2, 11, 12, 50])
def test_custom_goes_with_any_sampler_that_calls_once_a_step(kind: SamplerKind, steps: int) -> None:
    reason = custom(Selection(0.5)).why_not(task(kind, steps))
    if kind is SamplerKind.SEVERAL_CALLS:
        assert reason is not None and "several times a step" in reason
    else:
        assert reason is None


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Task("euler", 20), ""),
        (Task("euler", 8), "a run of 8 steps is short: the presets were measured with 20 and more"),
        (Task("euler", 20, is_distilled=True), "this is a distilled model"),
        (
            Task("euler", 20, is_distilled=True, distilled_by="sdxl_turbo.sft"),
            "this is a distilled model (sdxl_turbo.sft)",
        ),
        (Task("euler_cfg_pp", 20), "CFG++ samplers go on from the negative prompt's part too"),
    ],
)
def test_custom_says_what_speaks_against_it(run: Task, said: str) -> None:
    assert custom(Selection()).why_not(run) is None
    assert custom(Selection()).remark(run).startswith(said) and bool(said) == bool(custom(Selection()).remark(run))
    assert not said or any(said in str(PRESETS[name].why_not(run)) for name in PRESETS)


@each_kind
@pytest.mark.parametrize("rule", [None, *Reuse])
def test_custom_has_the_users_rule(kind: SamplerKind, rule: Reuse | None) -> None:
    preset = custom(Selection(count=3), rule)
    assert preset.name == CUSTOM and preset.selection.count == 3
    assert preset.rule_for(task(kind)) is (rule if rule is not None else rule_for(kind))


# ---- selections


def test_a_selection_by_share_count_and_list() -> None:
    assert Selection(0.5, power=1).computed(9) == (0, 3, 5, 8)
    assert Selection(0.5, count=5, power=1).computed(9) == (0, 2, 4, 6, 8)
    assert Selection(0.5, count=5, listed="0,7").computed(9) == (0, 7)
    assert Selection(0.5, listed="8 7 1").computed(9) == (0, 1, 7)
    assert Selection(0.5, power=1, listed=" \n").computed(9) == (0, 3, 5, 8)
    assert Selection(count=5, power=1, counts_down=True).computed(10) == (0, 2, 4, 6, 8)
    assert Selection(count=5, listed="0 2", counts_down=True).computed(10) == (0, 2)
    assert Selection(1.0).computed(30) == tuple(range(30))


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(count=21), "21 of 20 steps cannot be computed; choose from 2 to 20"),
        (Selection(count=1), "choose from 2 to 20"),
        (Selection(count=-1), "choose from 2 to 20"),
        (Selection(share=0), "choose one above 0 and at most 1"),
        (Selection(share=1.5), "choose one above 0 and at most 1"),
        (Selection(power=0), "1 spreads the steps evenly"),
        (Selection(power=0, counts_down=True), "1 spreads the steps evenly"),
        (Selection(power=math.nan), "The power is not a number. Choose one above 0: 1 spreads the steps evenly"),
        (Selection(listed="0 30"), "not in a run of 20 steps"),
        (Selection(listed="18 17"), "Begin it with 19"),
        (Selection(listed="some"), "write it as"),
    ],
    ids=str,
)
def test_a_selection_that_a_run_has_not(selection: Selection, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        selection.computed(20)


# ---- samplers


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ("euler", SamplerKind.ONE_STEP),
        ("ddim", SamplerKind.ONE_STEP),
        ("dpmpp_2m", SamplerKind.MULTISTEP),
        ("uni_pc", SamplerKind.MULTISTEP),
        ("unipc_bh2", SamplerKind.MULTISTEP),
        ("deis", SamplerKind.LINEAR_MULTISTEP),
        ("euler_ancestral", SamplerKind.ANCESTRAL),
        ("dpmpp_2m_sde", SamplerKind.STOCHASTIC_MULTISTEP),
        ("dpmpp_2m_sde_gpu", SamplerKind.STOCHASTIC_MULTISTEP),
        ("dpmpp_3m_sde_gpu", SamplerKind.STOCHASTIC_MULTISTEP),
        ("heun", SamplerKind.SEVERAL_CALLS),
        ("dpm_2", SamplerKind.SEVERAL_CALLS),
        ("dpm_adaptive", SamplerKind.SEVERAL_CALLS),
        ("dpmpp_sde_gpu", SamplerKind.SEVERAL_CALLS),
        ("lcm", SamplerKind.UNKNOWN),
        ("euler_cfg_pp", SamplerKind.UNKNOWN),
        ("rk_beta", SamplerKind.UNKNOWN),
        ("Euler", SamplerKind.UNKNOWN),
        ("", SamplerKind.UNKNOWN),
    ],
)
def test_kinds_of_samplers(sampler: str, kind: SamplerKind) -> None:
    assert kind_of(sampler) is kind


def test_methods_are_told_apart_and_their_names_are_not() -> None:
    same = [("ddim", "euler"), ("dpmpp_2m_sde_gpu", "dpmpp_2m_sde"), ("unipc_bh2", "uni_pc_bh2"), ("deis", "deis")]
    assert all(method_of(one) == method_of(other) for one, other in same)
    assert len({method_of(name) for name in ("euler", "euler_ancestral", "uni_pc", "uni_pc_bh2", "dpmpp_2m")}) == 5


def test_each_kind_of_sampler_has_the_rule_that_was_closest() -> None:
    assert {kind: rule_for(kind) for kind in SamplerKind} == {
        SamplerKind.ONE_STEP: Reuse.BENT,
        SamplerKind.MULTISTEP: Reuse.BENT,
        SamplerKind.LINEAR_MULTISTEP: Reuse.BENT,
        SamplerKind.ANCESTRAL: Reuse.MEASURED,
        SamplerKind.STOCHASTIC_MULTISTEP: Reuse.MEASURED,
        SamplerKind.SEVERAL_CALLS: Reuse.HOLD,
        SamplerKind.UNKNOWN: Reuse.HOLD,
    }
