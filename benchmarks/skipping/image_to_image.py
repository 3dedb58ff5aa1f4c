"""Runs that begin with a picture (denoise below 1, hires fix): how the computed steps should be spread in them.

Presets compute more of the early steps, as in a run that begins with noise. The steps of `balanced` are spread by
several powers (1: evenly) beside as many steps of the same sampler, on the judged captions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from ...sampling.metrics import capped, psnr
from ...sampling.presets import PRESETS, Preset
from ...sampling.task import Task
from .samples import protocol, ways
from .samples.averages import averages
from .samples.bootstrap import paired_bootstrap
from .samples.fingerprint import fingerprint
from .samples.protocol import Condition
from .samples.results import Row
from .samples.runs import Make, Say, sampled
from .samples.score import closeness
from .samples.shelf import Made, Shelf
from .samples.subject import Subject
from .samples.ways import Schedules, Way

IMAGE_TO_IMAGE = "image-to-image"
SAMPLES, SIDE, STEPS = 8, 16, 20
"""Few pictures of 128×128, so that it runs without a GPU."""

POWERS = (1.0, 1.25, 1.5)
SAMPLERS = EULER, DPMPP_2M = (("euler", "normal"), ("dpmpp_2m", "karras"))
CFG, LOWER_CFG = 7.5, 4.0
OTHER, SAME, ENLARGED = "another caption's", "its own", "its own, halved and enlarged"
BEGINS_WITH = (OTHER, SAME, ENLARGED)
"""Whose picture a run begins with; the last is much as a hires fix."""


@dataclass(frozen=True)
class LastPart:
    """Noise levels as KSampler makes them with `denoise`: the last of a longer schedule."""

    whole: Schedules
    denoise: float

    def sigmas(self, sampler: str, scheduler: str, steps: int) -> Tensor:
        return self.whole.sigmas(sampler, scheduler, int(steps / self.denoise))[-(steps + 1) :]


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        begins_with: of `BEGINS_WITH`.
        denoise: as KSampler has it.
    """

    condition: Condition
    begins_with: str
    denoise: float


def cases() -> list[Case]:
    """Half of the way from every beginning; more and less of it from where most changes."""
    half = [Case(Condition(*sampler, CFG, STEPS), each, 0.5) for sampler in SAMPLERS for each in BEGINS_WITH]
    parts = [(CFG, 0.3), (CFG, 0.75), (LOWER_CFG, 0.3), (LOWER_CFG, 0.5)]
    return half + [Case(Condition(*EULER, cfg, STEPS), OTHER, denoise) for cfg, denoise in parts]


def preset_for(case: Case, sigmas: Tensor) -> Preset:
    """`balanced` with the selection that it has in such a run."""
    balanced, asked = PRESETS[ways.BALANCED], case.condition
    task = Task(asked.sampler, len(sigmas) - 1, cfg=asked.cfg, sigmas=tuple(sigmas.tolist()))
    return replace(balanced, selection=balanced.selection_for(task))


def ways_of(schedules: Schedules, case: Case) -> tuple[dict[float, Way], list[Way]]:
    """The preset's steps by power, and their rivals: the same sampler on the preset's own steps, and on as many."""
    condition, part = case.condition, LastPart(schedules, case.denoise)
    preset = preset_for(case, ways.full(part, condition).sigmas)
    count = len(preset.selection.computed(STEPS))
    spread = {
        power: ways.skipping(part, condition, f"power-{power:g}", replace(preset, selection=selection))
        for power in POWERS
        for selection in [replace(preset.selection, power=power)]
    }
    rivals = [
        ways.shortened_to(part, condition, preset, count),
        ways.plain(part, condition, condition.sampler, condition.scheduler, count),
    ]
    return spread, rivals


def rows(subject: Subject, chosen: Sequence[Case], shelf: Shelf, facts: dict[str, Any], say: Say) -> Iterator[Row]:
    """The subject begins with pictures from then on.

    Args:
        facts: of the machine and the code.
    """
    noise = subject.noise[..., :SIDE, :SIDE]
    beginnings = _beginnings(subject, noise.roll(1, 0))
    for case in chosen:
        subject.begin(noise, beginnings[case.begins_with])
        kept = shelf.within(f"{IMAGE_TO_IMAGE}-{case.denoise:g}-{BEGINS_WITH.index(case.begins_with)}")
        yield row_of(subject, case, sampled(subject, kept, say), facts)


def _beginnings(subject: Subject, noise: Tensor) -> dict[str, Tensor]:
    """Latents of what runs begin with, made from other noise than theirs."""
    subject.begin(noise)
    way = ways.full(subject, Condition(*EULER, CFG, STEPS))
    own = subject.sample(way.sampler, way.sigmas, way.cfg).latents
    enlarged = interpolate(interpolate(own, scale_factor=0.5, mode="area"), scale_factor=2, mode="bilinear")
    return {OTHER: own.roll(1, 0), SAME: own, ENLARGED: enlarged}


def row_of(subject: Subject, case: Case, make: Make, facts: dict[str, Any]) -> Row:
    condition, (spread, rivals) = case.condition, ways_of(subject, case)
    whole = make(ways.full(LastPart(subject, case.denoise), condition))
    pictures = subject.decode(whole.latents)

    def decoded(made: Made) -> dict[str, float]:
        return averages(capped(psnr(subject.decode(made.latents), pictures)))

    shipped = PRESETS[ways.BALANCED].selection.power
    own = {power: make(way) for power, way in spread.items()}
    plain = {way.name: make(way) for way in rivals}
    near = {name: closeness(made, whole) for name, made in plain.items()}
    best = max(near, key=lambda name: float(near[name].mean()))
    latents = {power: closeness(made, whole) for power, made in own.items()}
    gain = paired_bootstrap(latents[shipped] - near[best])
    return {
        "case": IMAGE_TO_IMAGE,
        "sampler": condition.sampler,
        "scheduler": condition.scheduler,
        "cfg": condition.cfg,
        "steps": whole.steps,
        "condition": str(condition),
        "denoise": case.denoise,
        "begins_with": case.begins_with,
        "preset": ways.BALANCED,
        "fingerprint": fingerprint(PRESETS[ways.BALANCED]),
        "seeds": protocol.seeds(),
        "computed": own[shipped].calls,
        "samples": len(whole.latents),
        "size": SIDE * 8,
        "by_power": {f"{power:g}": averages(each) for power, each in latents.items()},
        "best_plain": best,
        "rivals_db": {name: averages(each) for name, each in near.items()},
        "gain_db": round(gain.mean, 3),
        "ci_low": round(gain.low, 3),
        "ci_high": round(gain.high, 3),
        "decoded": {**{f"{power:g}": decoded(each) for power, each in own.items()}, "best_plain": decoded(plain[best])},
        **facts,
    }
