"""How the presets were chosen: shares, powers and rules on captions that no preset is judged on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...sampling.presets import Selection, custom
from ...sampling.reuse import Reuse
from ...sampling.samplers import kind_of
from .samples import protocol, ways
from .samples.protocol import FIT_POWERS, FIT_SHARES, SAME_AS, Condition
from .samples.results import Row
from .samples.runs import CostsOf, Make
from .samples.score import closeness
from .samples.shelf import Made
from .samples.ways import Schedules, Way

CASE = "fit"
_ELSEWHERE = (("dpmpp_2m", "karras"),)
"""Of the protocol's plain rivals with another sampler the one that was closest most often."""


@dataclass(frozen=True)
class Tried:
    """What is tried: each share of steps by each rule with each power."""

    shares: Sequence[float] = FIT_SHARES
    rules: Sequence[Reuse] = tuple(Reuse)
    powers: Sequence[float] = FIT_POWERS

    def selections(self) -> Iterator[Selection]:
        """One for each share; its power is that of the shortened schedule that it is compared with."""
        return (Selection(share) for share in self.shares)


def rows(
    schedules: Schedules, condition: Condition, make: Make, costs: CostsOf, commit: str | None, tried: Tried
) -> Iterator[Row]:
    """By share: dB to the full run, for each rule with each power, and of the plain ways that take the same time."""
    whole = make(ways.full(schedules, condition))
    for selection in tried.selections():
        count = len(selection.computed(whole.steps))
        found = {name: _db(make(way), whole) for name, way in tried_ways(schedules, condition, count, tried)}
        rivals = plain_ways(schedules, condition, selection, whole.steps, costs)
        plain = {way.name: _db(make(way), whole) for way in rivals}
        best = max(plain, key=lambda name: plain[name])
        yield {
            "case": CASE,
            "sampler": condition.sampler,
            "scheduler": condition.scheduler,
            "cfg": condition.cfg,
            "steps": whole.steps,
            "share": selection.share,
            "seeds": protocol.seeds(protocol.FIT_CAPTIONS_SEED, protocol.FIT_NOISE_SEED),
            "computed": count,
            "samples": len(whole.latents),
            "psnr_db": found,
            "best_plain": best,
            "best_plain_db": plain[best],
            "plain_db": plain,
            "commit": commit,
        }


def tried_ways(schedules: Schedules, condition: Condition, count: int, tried: Tried) -> Iterator[tuple[str, Way]]:
    """Every rule with every power, so many steps computed."""
    for rule, power in itertools.product(tried.rules, tried.powers):
        name = _name(rule, power)
        preset = custom(Selection(count=count, power=power), rule)
        yield name, ways.skipping(schedules, condition, f"fit-{name.replace(' ', '-')}-{count}", preset)


def plain_ways(
    schedules: Schedules, condition: Condition, selection: Selection, steps: int, costs: CostsOf
) -> Iterator[Way]:
    """Those that take as long as the steps that are selected."""
    own = costs(SAME_AS.get(condition.sampler, condition.sampler), condition.cfg)
    seconds = own.of_preset(len(selection.computed(steps)), steps)
    yield ways.shortened_to(schedules, condition, custom(selection), own.affordable(seconds))
    for sampler, schedule in dict.fromkeys((*ways.own_kinds(condition), *_ELSEWHERE)):
        afforded = costs(SAME_AS.get(sampler, sampler), condition.cfg).affordable(seconds)
        yield ways.plain(schedules, condition, sampler, schedule, afforded)


def _name(rule: Reuse, power: float) -> str:
    return f"{rule.value} {power:g}"


def _db(made: Made, whole: Made) -> float:
    return round(float(closeness(made, whole).mean()), 3)


# ------------------------------------------------------------------------------------------------------ the table


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown, by kind of sampler, guided or not, and share: what is closest in the mean of the conditions.

    `least ahead` is the smallest lead over the plain way among the conditions, by what is closest in the mean.
    """
    lines = [
        "| samplers | CFG | share | closest | dB | plain, same time, dB | least ahead | where |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in (row for row in rows if row.get("case") == CASE):
        guided = "above 1" if row["cfg"] > 1 else "1"
        groups.setdefault((kind_of(row["sampler"]).value, guided, row["share"]), []).append(row)
    for (kind, guided, share), group in sorted(groups.items()):
        lines.append(f"| {kind} | {guided} | {share:g} | {' | '.join(_cells(group))} |")
    return lines


def _cells(group: Sequence[Row]) -> list[str]:
    everywhere = set.intersection(*(set(row["psnr_db"]) for row in group))
    best = max(sorted(everywhere), key=lambda name: _mean(row["psnr_db"][name] for row in group))
    least = min(group, key=lambda row: _lead(row, best))
    return [
        best,
        f"{_mean(row['psnr_db'][best] for row in group):.2f}",
        f"{_mean(row['best_plain_db'] for row in group):.2f}",
        f"{_lead(least, best):+.2f}",
        f"{least['sampler']}, {least['scheduler']}, {least['steps']} steps, CFG {least['cfg']:g}",
    ]


def _lead(row: Row, name: str) -> float:
    return float(row["psnr_db"][name] - row["best_plain_db"])


def _mean(values: Iterable[Any]) -> float:
    listed = list(values)
    return float(sum(listed) / len(listed))
