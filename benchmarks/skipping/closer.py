"""Selections of more steps, for conditions in which a preset misses its floor.

Beside each, as many steps of the plain ways that were closest there most often: the shortened schedule and DPM++ 2M on
`karras`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...sampling.measured import figures as measured_figures
from ...sampling.metrics import capped, psnr
from ...sampling.presets import PRESETS, Preset, Selection
from ...sampling.samplers import method_of
from .samples import protocol, ways
from .samples.averages import averages, mean
from .samples.bootstrap import paired_bootstrap
from .samples.fingerprint import fingerprint
from .samples.protocol import Condition
from .samples.results import Row
from .samples.runs import Make
from .samples.score import closeness
from .samples.subject import Subject
from .samples.ways import Schedules, Way

CLOSER = "closer"
SAMPLES = 16
_RIVAL = ("dpmpp_2m", "karras")

Case = tuple[Condition, Preset, Selection]


def cases(conditions: Sequence[Condition]) -> list[Case]:
    """Conditions in which a preset's own selection was measured below its floor, and what it selects in place of it."""
    return [
        (condition, preset, selection)
        for preset in PRESETS.values()
        for method, selection in preset.closer.items()
        for condition in conditions
        if method_of(condition.sampler) == method and _misses(preset, condition)
    ]


def _misses(preset: Preset, condition: Condition) -> bool:
    found = [
        each.picture_db
        for each in measured_figures(preset.name)
        if Condition(each.sampler, each.scheduler, each.cfg, each.steps) == condition
        and each.share == preset.selection.share
    ]
    return bool(found) and min(found) < preset.floor


def ways_of(schedules: Schedules, case: Case) -> tuple[Way, list[Way]]:
    """The selection's, and its rivals'."""
    condition, preset, selection = case
    chosen = replace(preset, selection=selection)
    own = ways.skipping(schedules, condition, f"closer-{preset.name}", chosen)
    count = len(ways.computed_steps(chosen, own.sigmas))
    rivals = [
        ways.shortened_to(schedules, condition, chosen, count),
        ways.plain(schedules, condition, *_RIVAL, count),
    ]
    return own, rivals


def rows(subject: Subject, case: Case, make: Make, facts: dict[str, Any]) -> Row:
    """
    Args:
        facts: of the machine and the code.
    """
    condition, preset, selection = case
    whole, (own_way, rival_ways) = make(ways.full(subject, condition)), ways_of(subject, case)
    own = make(own_way)
    near = {way.name: closeness(make(way), whole) for way in rival_ways}
    best = max(near, key=lambda name: float(near[name].mean()))
    latents = closeness(own, whole)
    gain = paired_bootstrap(latents - near[best])
    pictures = averages(capped(psnr(subject.decode(own.latents), subject.decode(whole.latents))))
    return {
        "case": CLOSER,
        "sampler": condition.sampler,
        "scheduler": condition.scheduler,
        "cfg": condition.cfg,
        "steps": whole.steps,
        "condition": str(condition),
        "preset": preset.name,
        "share": selection.share,
        "fingerprint": fingerprint(replace(preset, selection=selection)),
        "seeds": protocol.seeds(),
        "computed": own.calls,
        "samples": len(latents),
        **averages(latents),
        "best_plain": best,
        "best_plain_db": mean(near[best]),
        "gain_db": round(gain.mean, 3),
        "ci_low": round(gain.low, 3),
        "ci_high": round(gain.high, 3),
        "rivals_db": {name: mean(each) for name, each in near.items()},
        "decoded": {"preset": pictures},
        **facts,
    }


def all_rows(subject: Subject, conditions: Sequence[Condition], make: Make, facts: dict[str, Any]) -> Iterator[Row]:
    for case in cases(conditions):
        yield rows(subject, case, make, facts)
