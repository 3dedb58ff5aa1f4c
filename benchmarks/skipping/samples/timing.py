"""Times the runs that `costs` are made of; the machine has to be quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ....sampling.presets import Selection, custom
from . import ways
from .costs import LONG, SHORT, Costs, Timed, costs_from
from .protocol import CACHES, ELSEWHERE, SAME_AS, Condition
from .shelf import Shelf
from .subject import Subject
from .ways import Schedules, Way

Say = Callable[[str], None]

REPEATS = 7
NODES = tuple(CACHES)
_SCHEDULER = "normal"
_SHORT, _LONG, _SKIPPING = "short", "long", "skipping"


def timed_samplers(conditions: Iterable[Condition]) -> list[tuple[str, float]]:
    """Samplers and CFGs whose costs such conditions ask for, their rivals' among them."""
    found = []
    for condition in conditions:
        found += [(SAME_AS.get(condition.sampler, condition.sampler), condition.cfg)]
        found += [(sampler, condition.cfg) for sampler, _ in ELSEWHERE]
    return list(dict.fromkeys(found))


def time_steps(
    subject: Subject, shelf: Shelf, wanted: Iterable[tuple[str, float]], say: Say, nodes: Sequence[str] = NODES
) -> None:
    """Put on the shelf what steps cost, where that is missing.

    Args:
        nodes: caches that are timed, too.
    """
    for sampler, cfg in wanted:
        if not shelf.has_costs(sampler, cfg):
            costs = measure(subject, sampler, cfg, nodes)
            shelf.add_costs(sampler, cfg, costs)
            say(f"{sampler}, cfg {cfg:g}: {costs}")


def measure(subject: Subject, sampler: str, cfg: float, nodes: Sequence[str] = NODES) -> Costs:
    """Kinds of runs take turns, so that a drift of the device's clock meets all of them alike."""
    kinds = timed_ways(subject, sampler, cfg, nodes)
    subject.sample(sampler, subject.sigmas(sampler, _SCHEDULER, 4), cfg)  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    calls = {}
    for _ in range(REPEATS):
        for name, way in kinds.items():
            done = subject.sample(way.sampler, way.sigmas, cfg, way.patch)
            seconds[name].append(done.seconds)
            calls[name] = done.calls
    timed = {name: Timed(seconds[name], calls[name], len(way.sigmas) - 1) for name, way in kinds.items()}
    return costs_from(timed[_SHORT], timed[_LONG], timed[_SKIPPING], {node: timed[node] for node in nodes})


def timed_ways(schedules: Schedules, sampler: str, cfg: float, nodes: Sequence[str]) -> dict[str, Way]:
    """What is timed, by name."""
    condition = Condition(sampler, _SCHEDULER, cfg, LONG)
    half = custom(Selection(count=LONG // 2))
    return {
        _SHORT: ways.plain(schedules, condition, sampler, _SCHEDULER, SHORT),
        _LONG: ways.full(schedules, condition),
        _SKIPPING: ways.skipping(schedules, condition, "timed", half),
        **{node: ways.cached(schedules, condition, node, _middle(*CACHES[node])) for node in nodes},
    }


def _middle(low: float, high: float) -> float:
    return float((low * high) ** 0.5)
