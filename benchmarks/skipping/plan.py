"""What the protocol will cost before it is run: the same code with runs that are counted and not made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from ...sampling.presets import PRESETS
from . import beside, fit, hackathon
from .fit import Tried
from .samples import timing, ways
from .samples.costs import LONG, Costs
from .samples.protocol import (
    BESIDE_CFG,
    CACHES,
    FIT_SAMPLES,
    INPAINTED,
    SAMPLES,
    UNTESTED,
    Condition,
)
from .samples.runs import Runs, make_all
from .samples.shelf import Made
from .samples.ways import Schedules, Way

STEP_SECONDS = 0.018
"""Of a computed step of 200 samples at CFG above 1, on engines. The plain model takes twice as long."""

_FIXED, _SKIPPED, _CACHE = 2.0, 0.05, 0.05
"""In computed steps: of a run, of a skipped step, of a cache's work in each step. Only for the plan."""

Stage = tuple[str, int, float]
"""Its command's option, runs, and computed steps of 200 samples at CFG above 1."""


class Counting:
    """In the place of sampling: the same run is counted once.

    Attributes:
        runs: so far.
        steps: computed, in steps of 200 samples at CFG above 1.
    """

    def __init__(self, samples: int = SAMPLES) -> None:
        self._share = samples / SAMPLES
        self._made: dict[str, Made] = {}
        self.runs, self.steps = 0, 0.0

    def __call__(self, way: Way) -> Made:
        if way.key not in self._made:
            steps = len(way.sigmas) - 1
            calls = _cached_calls(way, steps) if way.computed is None else way.computed
            self._made[way.key] = Made(torch.empty(0), calls, steps)
            self.count(calls, way.cfg)
        return self._made[way.key]

    def count(self, calls: int, cfg: float) -> None:
        self.runs += 1
        self.steps += calls * self._share * (1.0 if cfg > 1 else 0.5)


def plan(
    schedules: Schedules, chosen: Iterable[Condition], fit_chosen: Iterable[Condition], tried: Tried
) -> list[Stage]:
    """Each stage of the protocol, without what was loaded and decoded."""
    chosen = list(chosen)
    return [
        _stage("--time-only", lambda make: _time(schedules, timing.timed_samplers(chosen), make)),
        _stage("--fit", lambda make: _fit(schedules, fit_chosen, tried, make), FIT_SAMPLES),
        _stage("--sample-only, all processes", lambda make: _sample(schedules, chosen, make)),
        _stage("--beside", lambda make: _beside(schedules, make)),
    ]


def lines(stages: Iterable[Stage]) -> list[str]:
    unit = f"steps of {SAMPLES} samples at CFG above 1"
    return [
        f"{name}: {runs} runs, {steps:.0f} {unit}, about {steps * STEP_SECONDS:.0f} s" for name, runs, steps in stages
    ]


def costs(sampler: str, cfg: float) -> Costs:
    """Made up, about as they were measured."""
    step = STEP_SECONDS * (1.0 if cfg > 1 else 0.5)
    return Costs(_FIXED * step, step, _SKIPPED * step, {node: _CACHE * step for node in CACHES})


def _stage(name: str, count: Callable[[Counting], None], samples: int = SAMPLES) -> Stage:
    make = Counting(samples)
    count(make)
    return name, make.runs, make.steps


def _time(schedules: Schedules, wanted: Iterable[tuple[str, float]], make: Counting) -> None:
    for sampler, cfg in wanted:
        _count_timed(schedules, sampler, cfg, timing.NODES, make)


def _count_timed(schedules: Schedules, sampler: str, cfg: float, nodes: Iterable[str], make: Counting) -> None:
    for way in timing.timed_ways(schedules, sampler, cfg, tuple(nodes)).values():
        for _ in range(timing.REPEATS):
            make.count(_cached_calls(way, LONG) if way.computed is None else way.computed, cfg)


def _fit(schedules: Schedules, chosen: Iterable[Condition], tried: Tried, make: Counting) -> None:
    for condition in chosen:
        whole = make(ways.full(schedules, condition))
        for selection in tried.selections():
            count = len(selection.computed(whole.steps))
            found = [way for _, way in fit.tried_ways(schedules, condition, count, tried)]
            plain = fit.plain_ways(schedules, condition, selection, whole.steps, costs, tried.powers)
            for way in (*found, *(way for _, way in plain)):
                make(way)


def _sample(schedules: Schedules, chosen: Iterable[Condition], make: Counting) -> None:
    for condition in chosen:
        make_all(Runs.of_protocol(schedules, condition, make, costs))


def _beside(schedules: Schedules, make: Counting) -> None:
    for samplers in (UNTESTED, INPAINTED):
        for condition in beside.conditions(samplers):
            _count_timed(schedules, condition.sampler, BESIDE_CFG, (), make)
            runs = Runs(schedules, condition, make, costs, ways.own_kinds(condition), nodes=())
            runs.full()
            list(runs.compared([PRESETS[ways.BALANCED]]))
    for cfg in hackathon.CFGS:
        make.count(3 * hackathon.STEPS, cfg)


def _cached_calls(way: Way, steps: int) -> int:
    """They do not quite fall evenly with the threshold's logarithm, as the search takes for granted."""
    node, _, threshold = way.name.partition("-")
    low, high = CACHES[node]
    part = math.log(float(threshold) / low) / math.log(high / low)
    return max(1, round(steps * (1 - 2 / 3 * math.pow(part, 1.5))))
