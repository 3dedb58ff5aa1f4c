"""How the presets were chosen: shares, powers and rules on captions that no preset is judged on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...sampling.presets import Selection, custom
from ...sampling.reuse import Reuse
from ...sampling.samplers import SamplerKind, kind_of
from .samples import protocol, ways
from .samples.averages import averages
from .samples.protocol import FIT_POWERS, FIT_SHARES, SAME_AS, Condition
from .samples.results import Row
from .samples.runs import CostsOf, Make
from .samples.score import closeness
from .samples.ways import Schedules, Way

CASE = "fit"
_AVERAGES = ("psnr_db", "median_db", "pooled_db")
_ELSEWHERE = (("dpmpp_2m", "karras"),)
"""Of the protocol's plain rivals with another sampler the one that was closest most often."""


@dataclass(frozen=True)
class Tried:
    """What is tried: each share of steps by each rule with each power."""

    shares: Sequence[float] = FIT_SHARES
    rules: Sequence[Reuse] = tuple(Reuse)
    powers: Sequence[float] = FIT_POWERS

    def selections(self) -> Iterator[Selection]:
        """One for each share."""
        return (Selection(share) for share in self.shares)


def rows(
    schedules: Schedules, condition: Condition, make: Make, costs: CostsOf, commit: str | None, tried: Tried
) -> Iterator[Row]:
    """By share: dB to the full run, for each rule with each power, and of the plain ways that take the same time."""
    whole = make(ways.full(schedules, condition))
    for selection in tried.selections():
        count = len(selection.computed(whole.steps))
        near = {
            name: averages(closeness(make(way), whole)) for name, way in tried_ways(schedules, condition, count, tried)
        }
        rivals = plain_ways(schedules, condition, selection, whole.steps, costs, tried.powers)
        plain = {name: averages(closeness(make(way), whole)) for name, way in rivals}
        best = max(plain, key=lambda name: plain[name]["psnr_db"])
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
            **{average: {name: each[average] for name, each in near.items()} for average in _AVERAGES},
            "best_plain": best,
            "best_plain_db": plain[best]["psnr_db"],
            "plain_db": {name: each["psnr_db"] for name, each in plain.items()},
            "plain_powers": list(tried.powers),
            "commit": commit,
        }


def tried_ways(schedules: Schedules, condition: Condition, count: int, tried: Tried) -> Iterator[tuple[str, Way]]:
    """Every rule with every power, so many steps computed."""
    for rule, power in itertools.product(tried.rules, tried.powers):
        name = _name(rule, power)
        preset = custom(Selection(count=count, power=power), rule)
        yield name, ways.skipping(schedules, condition, f"fit-{name.replace(' ', '-')}-{count}", preset)


def plain_ways(
    schedules: Schedules,
    condition: Condition,
    selection: Selection,
    steps: int,
    costs: CostsOf,
    powers: Sequence[float] = FIT_POWERS,
) -> Iterator[tuple[str, Way]]:
    """Those that take as long as the steps that are selected, by name.

    Args:
        powers: of the shortened schedules, the same as of the selections: with one power alone they would be a weaker
            rival of selections that have another.
    """
    own = costs(SAME_AS.get(condition.sampler, condition.sampler), condition.cfg)
    seconds = own.of_preset(len(selection.computed(steps)), steps)
    for power in powers:
        chosen = custom(replace(selection, power=power))
        way = ways.shortened_to(schedules, condition, chosen, own.affordable(seconds))
        yield f"{way.name} {power:g}", way
    for sampler, schedule in dict.fromkeys((*ways.own_kinds(condition), *_ELSEWHERE)):
        afforded = costs(SAME_AS.get(sampler, sampler), condition.cfg).affordable(seconds)
        way = ways.plain(schedules, condition, sampler, schedule, afforded)
        yield way.name, way


def _name(rule: Reuse, power: float) -> str:
    return f"{rule.value} {power:g}"


# ------------------------------------------------------------------------------------------------------ the table


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown, by kind of sampler, guided or not, and share: what is closest in the mean of the conditions.

    `least ahead` is the smallest lead over the plain way among the conditions, by what is closest in the mean.
    """
    lines = [
        "| samplers | CFG | share | conditions | closest | dB: mean, median, pooled | plain, same time, dB | "
        "least ahead | where |",
        "|---" * 9 + "|",
    ]
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in (row for row in rows if row.get("case") == CASE):
        guided = "above 1" if row["cfg"] > 1 else "1"
        groups.setdefault((kind_of(row["sampler"]).value, guided, row["share"]), []).append(row)
    for (kind, guided, share), group in sorted(groups.items()):
        most = max(len(each) for key, each in groups.items() if key[:2] == (kind, guided))
        conditions = str(most) if len(group) == most else f"{len(group)} of {most}"
        lines.append(f"| {kind} | {guided} | {share:g} | {conditions} | {' | '.join(_cells(group))} |")
    return lines


def _cells(group: Sequence[Row]) -> list[str]:
    everywhere = set.intersection(*(set(row["psnr_db"]) for row in group))
    best = max(sorted(everywhere), key=lambda name: _mean(row["psnr_db"][name] for row in group))
    averaged = [_mean(row[of][best] for row in group) if all(of in row for row in group) else None for of in _AVERAGES]
    least = min(group, key=lambda row: _lead(row, best))
    mark = "" if all(best.rsplit(" ", 1)[1] in _shortened_powers(row) for row in group) else " ‡"
    return [
        best,
        ", ".join("–" if each is None else f"{each:.2f}" for each in averaged),
        f"{_mean(map(_plain_db, group)):.2f}",
        f"{_lead(least, best):+.2f}{mark}",
        f"{least['sampler']}, {least['scheduler']}, {least['steps']} steps, CFG {least['cfg']:g}",
    ]


def _lead(row: Row, name: str) -> float:
    return float(row["psnr_db"][name]) - _plain_db(row)


def _plain_db(row: Row) -> float:
    return max((float(row["best_plain_db"]), *_held(row).values()))


def _held(row: Row) -> dict[str, float]:
    """By power: with one-step samplers a selection whose steps are held is a shortened schedule, and takes no less time
    than that."""
    if kind_of(row["sampler"]) is not SamplerKind.ONE_STEP:
        return {}
    prefix = f"{Reuse.HOLD.value} "
    return {
        name.removeprefix(prefix): float(decibels)
        for name, decibels in row["psnr_db"].items()
        if name.startswith(prefix) and not name.startswith(Reuse.HOLD_NOISE.value)
    }


def _shortened_powers(row: Row) -> set[str]:
    """Of the shortened schedules that a row's selections are compared with; older rows had only one."""
    return {f"{power:g}" for power in row.get("plain_powers", [Selection().power])} | set(_held(row))


def _mean(values: Iterable[Any]) -> float:
    listed = list(values)
    return float(sum(listed) / len(listed))
