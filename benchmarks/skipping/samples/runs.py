"""All runs that a condition needs, and which of them are rivals at equal time.

Sampling, planning and scoring go through the same code and differ only in where a run comes from: what was sampled is
what is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ....sampling.presets import PRESETS, Preset
from . import caches, ways
from .costs import Costs
from .protocol import CACHES, SAME_AS, Condition, converged
from .shelf import Made, Shelf
from .subject import Subject
from .ways import Schedules, Way

Say = Callable[[str], None]
Make = Callable[[Way], Made]
CostsOf = Callable[[str, float], Costs]
"""By sampler and CFG."""
NODES = tuple(CACHES)


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        key: the same for the same picture.
        seconds: by the costs of its steps.
    """

    key: str
    made: Made
    seconds: float


@dataclass(frozen=True)
class Compared:
    """A preset in a condition.

    Attributes:
        rivals: by name.
        has_cache: whether one of the caches is among them.
    """

    run: Run
    costs: Costs
    rivals: dict[str, Run]
    has_cache: bool


class Runs:
    """One condition's.

    Args:
        kinds: sampler and schedule of the plain rivals.
        nodes: caches that are rivals.
    """

    def __init__(
        self,
        schedules: Schedules,
        condition: Condition,
        make: Make,
        costs: CostsOf,
        kinds: Sequence[tuple[str, str]],
        nodes: Sequence[str] = NODES,
    ) -> None:
        self._schedules, self._condition, self._make = schedules, condition, make
        self._costs, self._kinds, self._nodes = costs, kinds, nodes
        self._own = self._costs_of(condition.sampler)
        self._cached: dict[str, dict[float, Made]] = {}

    @classmethod
    def of_protocol(cls, schedules: Schedules, condition: Condition, make: Make, costs: CostsOf) -> Runs:
        return cls(schedules, condition, make, costs, ways.plain_kinds(condition))

    def full(self) -> Made:
        return self._make(ways.full(self._schedules, self._condition))

    def converged(self) -> Made | None:
        last = converged(self._condition)
        return None if last is None else self._make(ways.full(self._schedules, last))

    def randoms(self) -> list[Made]:
        return [self._make(way) for way in ways.random_places(self._schedules, self._condition)]

    def compared(self, presets: Sequence[Preset] = tuple(PRESETS.values())) -> Iterator[tuple[Preset, Compared]]:
        """Each preset and its rivals."""
        runs = {preset.name: self._preset(preset) for preset in presets}
        for preset in presets:
            run = runs[preset.name]
            rivals = {way.name: self._timed(way) for way in self._plain_ways(preset, run)}
            cached = dict(self._cache_rivals(run, [each.seconds for each in runs.values()]))
            yield preset, Compared(run, self._own, rivals | cached, bool(cached))

    def _preset(self, preset: Preset) -> Run:
        way = ways.preset(self._schedules, self._condition, preset)
        made = self._make(way)
        return Run(way.key, made, self._own.of_preset(made.calls, made.steps))

    def _plain_ways(self, preset: Preset, run: Run) -> Iterator[Way]:
        """Without those that are the same run under another name."""
        counts = sorted({run.made.calls, self._own.affordable(run.seconds)})
        found = [ways.shortened_to(self._schedules, self._condition, preset, count) for count in counts]
        for sampler, schedule in self._kinds:
            steps = self._costs_of(sampler).affordable(run.seconds)
            found.append(ways.plain(self._schedules, self._condition, sampler, schedule, steps))
        unlike: dict[str, Way] = {}
        for way in found:
            unlike.setdefault(way.key, way)
        yield from unlike.values()

    def _timed(self, way: Way) -> Run:
        return Run(way.key, self._make(way), self._costs_of(way.sampler).of_plain(len(way.sigmas) - 1))

    def _cache_rivals(self, run: Run, wanted: Sequence[float]) -> Iterator[tuple[str, Run]]:
        for node in self._nodes:
            tried = self._tried(node, run.made.steps, wanted)
            found = [self._cache_run(node, each, made) for each, made in tried.items() if made.calls < made.steps]
            nearest = caches.nearest(found, lambda each: each[1].seconds, run.seconds)
            if nearest is not None and self._own.is_near(nearest[1].seconds, run.seconds):
                yield nearest

    def _cache_run(self, node: str, threshold: float, made: Made) -> tuple[str, Run]:
        way = ways.cached(self._schedules, self._condition, node, threshold)
        return way.name, Run(way.key, made, self._own.of_cache(node, made.calls, made.steps))

    def _tried(self, node: str, steps: int, wanted: Sequence[float]) -> dict[float, Made]:
        if node not in self._cached:
            counts = [self._own.affordable_by_cache(node, seconds, steps) for seconds in wanted]
            self._cached[node] = caches.try_thresholds(partial(self._cache, node), steps, counts, CACHES[node])
        return self._cached[node]

    def _cache(self, node: str, threshold: float) -> Made:
        return self._make(ways.cached(self._schedules, self._condition, node, threshold))

    def _costs_of(self, sampler: str) -> Costs:
        return self._costs(SAME_AS.get(sampler, sampler), self._condition.cfg)


def make_all(runs: Runs) -> None:
    """Have everything made that the protocol compares in a condition."""
    runs.full()
    runs.converged()
    for _ in runs.compared():
        pass
    runs.randoms()


def sampled(subject: Subject, shelf: Shelf, say: Say) -> Make:
    """What the shelf lacks is sampled, and kept there."""

    def make(way: Way) -> Made:
        if shelf.has(way.key):
            return shelf.take(way.key)
        done = subject.sample(way.sampler, way.sigmas, way.cfg, way.patch)
        if way.computed is not None and done.calls != way.computed:
            raise RuntimeError(f"{way.key} computed {done.calls} steps where it should have computed {way.computed}")
        made = Made(done.latents, done.calls, len(way.sigmas) - 1)
        shelf.add(way.key, made)
        say(f"{way.key}: {made.calls} of {made.steps} steps, {done.seconds:.2f} s")
        return made

    return make


def taken(shelf: Shelf) -> Make:
    """Only what is on the shelf.

    Raises:
        FileNotFoundError: on use, where it is not.
    """
    return lambda way: shelf.take(way.key)
