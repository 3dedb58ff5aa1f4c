"""Ways to make a picture in a condition: the full run, presets, and all that is plain."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from ....hosts.comfy.skip.step_skip import skip_steps
from ....sampling.presets import PRESETS, Preset, Selection, custom
from ....sampling.schedule import Steps, shortened
from .fingerprint import fingerprint
from .protocol import ELSEWHERE, RANDOM_MASKS, SAME_AS, SCHEDULES, Condition
from .subject import Patch

BALANCED = "balanced"


class Schedules(Protocol):
    """What knows a model's noise levels."""

    def sigmas(self, sampler: str, scheduler: str, steps: int) -> Tensor: ...


@dataclass(frozen=True)
class Way:
    """
    Attributes:
        name: tells it from others of the same condition.
        key: what it gives hangs on nothing else, so whoever asks for the same again finds it on the shelf.
        computed: steps that it has to compute; None where it finds out by itself.
    """

    name: str
    key: str
    sampler: str
    sigmas: Tensor
    cfg: float
    patch: Patch | None = None
    computed: int | None = None


def full(subject: Schedules, condition: Condition) -> Way:
    return _plain("full", condition.sampler, _sigmas(subject, condition), condition.cfg)


def skipping(subject: Schedules, condition: Condition, name: str, preset: Preset) -> Way:
    """A preset wherever it is judged, shipped there or not."""
    sigmas, judged = _sigmas(subject, condition), everywhere(preset)
    key, computed = f"{condition}-{name}-{fingerprint(preset)}", len(computed_steps(preset, sigmas))
    return Way(name, key, condition.sampler, sigmas, condition.cfg, lambda model: skip_steps(model, judged), computed)


def everywhere(preset: Preset) -> Preset:
    """The preset as people get it by `custom`: by itself it computes all steps where it is not shipped."""
    return custom(preset.selection, preset.rule)


def preset(subject: Schedules, condition: Condition, of: Preset) -> Way:
    return skipping(subject, condition, f"preset-{of.name}", of)


def shortened_to(subject: Schedules, condition: Condition, preset: Preset, count: int) -> Way:
    """The same sampler on the sigmas of as many steps, chosen as the preset chooses."""
    sigmas = _sigmas(subject, condition)
    chosen = replace(preset.selection, count=min(count, len(sigmas) - 1)).computed(len(sigmas) - 1)
    return _plain(f"shortened-{len(chosen)}", condition.sampler, shortened(sigmas, chosen), condition.cfg)


def own_kinds(condition: Condition) -> list[tuple[str, str]]:
    """Sampler and schedule of plain rivals with the condition's own sampler."""
    return list(dict.fromkeys((condition.sampler, schedule) for schedule in (condition.scheduler, *SCHEDULES)))


def plain_kinds(condition: Condition) -> list[tuple[str, str]]:
    """Sampler and schedule of all plain rivals."""
    return list(dict.fromkeys([*own_kinds(condition), *ELSEWHERE]))


def plain(subject: Schedules, condition: Condition, sampler: str, schedule: str, steps: int) -> Way:
    """Fewer steps."""
    return _plain(f"{sampler}-{schedule}-{steps}", sampler, subject.sigmas(sampler, schedule, steps), condition.cfg)


def cached(subject: Schedules, condition: Condition, node: str, threshold: float) -> Way:
    name = f"{node}-{threshold:g}"
    sigmas = _sigmas(subject, condition)
    return Way(name, f"{condition}-{name}", condition.sampler, sigmas, condition.cfg, _cached(node, threshold))


def random_places(subject: Schedules, condition: Condition) -> Iterator[Way]:
    """The negative control: as many steps as `balanced` has; the same places wherever it runs."""
    sigmas = _sigmas(subject, condition)
    steps, count = len(sigmas) - 1, len(computed_steps(PRESETS[BALANCED], sigmas))
    drawn = random.Random(str(condition))
    for number in range(RANDOM_MASKS):
        places = drawn.sample(range(1, steps - 1), count - 2)
        listed = " ".join(map(str, sorted([0, *places, steps - 1])))
        yield skipping(subject, condition, f"random-{number}", custom(Selection(listed=listed)))


def computed_steps(preset: Preset, sigmas: Tensor) -> Steps:
    return preset.selection.computed(len(sigmas) - 1)


def _plain(name: str, sampler: str, sigmas: Tensor, cfg: float) -> Way:
    """It hangs on sampler, sigmas and CFG alone, whosever rival it is."""
    told = " ".join(f"{sigma:.5g}" for sigma in sigmas.tolist())
    steps, digest = len(sigmas) - 1, hashlib.sha256(told.encode()).hexdigest()[:10]
    key = f"cfg{cfg:g}-plain-{SAME_AS.get(sampler, sampler)}-{steps}-{digest}"
    return Way(name, key, sampler, sigmas, cfg, computed=steps)


def _sigmas(subject: Schedules, condition: Condition) -> Tensor:
    return subject.sigmas(condition.sampler, condition.scheduler, condition.steps)


def _cached(node: str, threshold: float) -> Patch:
    def patch(model: Any) -> Any:
        from comfy_extras import nodes_easycache

        kind = getattr(nodes_easycache, f"{node}Node")
        return kind.execute(model, threshold, 0.15, 0.95, False).result[0]

    return patch
