"""Ways to make a picture in a condition: the full run, presets, and all that is plain."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...hosts.comfy.step_skip import skip_steps
from ...sampling.presets import PRESETS, Preset, Selection, custom
from ...sampling.schedule import Steps, shortened
from .protocol import ELSEWHERE, SCHEDULES, THRESHOLDS, Condition
from .subject import Patch, Subject

BALANCED = "balanced"


@dataclass(frozen=True)
class Way:
    """
    Attributes:
        name: tells it from others of the same condition.
    """

    name: str
    sampler: str
    sigmas: Tensor
    patch: Patch | None = None


def full(subject: Subject, condition: Condition) -> Way:
    return Way("full", condition.sampler, _sigmas(subject, condition))


def presets(subject: Subject, condition: Condition) -> Iterator[Way]:
    """Each preset, and the sigmas of its steps."""
    sigmas = _sigmas(subject, condition)
    for preset in PRESETS.values():
        yield Way(f"preset-{preset.name}", condition.sampler, sigmas, _skipping(preset))
        short = shortened(sigmas, computed(preset, sigmas))
        yield Way(f"shortened-{preset.name}", condition.sampler, short)


def plain(subject: Subject, condition: Condition, steps: int) -> Iterator[Way]:
    """Fewer steps."""
    samplers = [(condition.sampler, schedule) for schedule in (condition.scheduler, *SCHEDULES)]
    for sampler, schedule in dict.fromkeys([*samplers, *ELSEWHERE]):
        sigmas = subject.sigmas(sampler, schedule, steps)
        yield Way(plain_name(sampler, schedule, steps), sampler, sigmas)


def plain_name(sampler: str, schedule: str, steps: int) -> str:
    return f"plain-{sampler}-{schedule}-{steps}"


def caches(subject: Subject, condition: Condition) -> Iterator[Way]:
    sigmas = _sigmas(subject, condition)
    for node, thresholds in THRESHOLDS.items():
        for threshold in thresholds:
            yield Way(f"{node}-{threshold:g}", condition.sampler, sigmas, _cached(node, threshold))


def random_places(subject: Subject, condition: Condition) -> Way:
    """The negative control; the same places wherever it runs."""
    sigmas = _sigmas(subject, condition)
    steps, count = len(sigmas) - 1, len(computed(PRESETS[BALANCED], sigmas))
    places = random.Random(str(condition)).sample(range(1, steps - 1), count - 2)
    listed = " ".join(map(str, sorted([0, *places, steps - 1])))
    return Way("random", condition.sampler, sigmas, _skipping(custom(Selection(listed=listed))))


def computed(preset: Preset, sigmas: Tensor) -> Steps:
    return preset.selection.computed(len(sigmas) - 1)


def _sigmas(subject: Subject, condition: Condition) -> Tensor:
    return subject.sigmas(condition.sampler, condition.scheduler, condition.steps)


def _skipping(preset: Preset) -> Patch:
    return lambda model: skip_steps(model, preset)


def _cached(node: str, threshold: float) -> Patch:
    def patch(model: Any) -> Any:
        from comfy_extras import nodes_easycache

        kind = getattr(nodes_easycache, f"{node}Node")
        return kind.execute(model, threshold, 0.15, 0.95, False).result[0]

    return patch
