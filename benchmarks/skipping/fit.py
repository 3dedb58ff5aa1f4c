"""How the presets were chosen: powers and rules on captions that none of them is judged on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ...sampling.presets import PRESETS, Preset, Selection, custom
from ...sampling.reuse import Reuse
from ...sampling.samplers import kind_of
from ...sampling.task import Task
from . import protocol, ways
from .protocol import FIT_POWERS, SAME_AS, Condition
from .results import Row
from .runs import CostsOf, Make
from .score import closeness
from .shelf import Made
from .ways import Schedules, Way

CASE = "fit"
_ELSEWHERE = (("dpmpp_2m", "karras"),)
"""Of the protocol's plain rivals with another sampler the one that was closest most often."""


def fitted() -> list[Preset]:
    """The presets whose power and rule are chosen by it."""
    return [preset for preset in PRESETS.values() if not preset.selection.counts_down]


def rows(schedules: Schedules, condition: Condition, make: Make, costs: CostsOf, commit: str | None) -> Iterator[Row]:
    """By preset: dB to the full run, for each power by each rule, and of the plain ways that take the same time."""
    whole = make(ways.full(schedules, condition))
    for preset in fitted():
        count = len(preset.selection.computed(whole.steps))
        tried = {name: _db(make(way), whole) for name, way in tried_ways(schedules, condition, count)}
        rivals = plain_ways(schedules, condition, preset, whole.steps, costs)
        plain = {way.name: _db(make(way), whole) for way in rivals}
        best = max(plain, key=lambda name: plain[name])
        yield {
            "case": CASE,
            "sampler": condition.sampler,
            "scheduler": condition.scheduler,
            "cfg": condition.cfg,
            "steps": whole.steps,
            "preset": preset.name,
            "seeds": protocol.seeds(protocol.FIT_CAPTIONS_SEED, protocol.FIT_NOISE_SEED),
            "computed": count,
            "samples": len(whole.latents),
            "now": _name(preset.rule_for(Task(condition.sampler, whole.steps)), preset.selection.power),
            "psnr_db": tried,
            "best_plain": best,
            "best_plain_db": plain[best],
            "plain_db": plain,
            "commit": commit,
        }


def tried_ways(schedules: Schedules, condition: Condition, count: int) -> Iterator[tuple[str, Way]]:
    """Every rule with every power, so many steps computed."""
    for rule, power in itertools.product(Reuse, FIT_POWERS):
        name = _name(rule, power)
        preset = custom(Selection(count=count, power=power), rule)
        yield name, ways.skipping(schedules, condition, f"fit-{name.replace(' ', '-')}-{count}", preset)


def plain_ways(schedules: Schedules, condition: Condition, preset: Preset, steps: int, costs: CostsOf) -> Iterator[Way]:
    """Those that take the preset's time."""
    own = costs(SAME_AS.get(condition.sampler, condition.sampler), condition.cfg)
    seconds = own.of_preset(len(preset.selection.computed(steps)), steps)
    yield ways.shortened_to(schedules, condition, preset, own.affordable(seconds))
    for sampler, schedule in dict.fromkeys((*ways.own_kinds(condition), *_ELSEWHERE)):
        afforded = costs(SAME_AS.get(sampler, sampler), condition.cfg).affordable(seconds)
        yield ways.plain(schedules, condition, sampler, schedule, afforded)


def _name(rule: Reuse, power: float) -> str:
    return f"{rule.value} {power:g}"


def _db(made: Made, whole: Made) -> float:
    return round(float(closeness(made, whole).mean()), 3)


# ------------------------------------------------------------------------------------------------------ the table


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown, by kind of sampler, guided or not, and preset: what is closest in the mean of the conditions.

    `least ahead` is the smallest lead over the plain way among the conditions, by what is closest in the mean.
    """
    lines = [
        "| samplers | CFG | preset | closest | dB | least ahead | now | dB | plain, same time, dB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in (row for row in rows if row.get("case") == CASE):
        guided = "above 1" if row["cfg"] > 1 else "1"
        groups.setdefault((kind_of(row["sampler"]).value, guided, row["preset"]), []).append(row)
    order = {name: number for number, name in enumerate(PRESETS)}
    for (kind, guided, preset), group in sorted(groups.items(), key=lambda item: (*item[0][:2], order[item[0][2]])):
        lines.append(f"| {kind} | {guided} | `{preset}` | {' | '.join(_cells(group))} |")
    return lines


def _cells(group: Sequence[Row]) -> list[str]:
    best = max(group[0]["psnr_db"], key=lambda name: _mean([row["psnr_db"][name] for row in group]))
    least = min(row["psnr_db"][best] - row["best_plain_db"] for row in group)
    now = group[0]["now"]
    return [
        best,
        f"{_mean([row['psnr_db'][best] for row in group]):.2f}",
        f"{least:+.2f}",
        now,
        f"{_mean([row['psnr_db'][now] for row in group]):.2f}",
        f"{_mean([row['best_plain_db'] for row in group]):.2f}",
    ]


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values) / len(values))
