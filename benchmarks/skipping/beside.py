"""What is measured beside the grid: inpainting, and samplers that are shipped with others of their kind.

The `balanced` preset against the same sampler in the same time, at 20 steps and CFG 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...sampling.presets import PRESETS
from .samples import ways
from .samples.protocol import BESIDE_CFG, BESIDE_STEPS, INPAINTED, UNTESTED, Condition
from .samples.results import Row
from .samples.runs import Runs, sampled
from .samples.score import figures
from .samples.shelf import Shelf
from .samples.subject import Subject
from .samples.timing import time_steps

Say = Callable[[str], None]

INPAINTING, UNTESTED_SAMPLERS = "inpainting", "untested-samplers"


def conditions(samplers: Sequence[tuple[str, str]]) -> list[Condition]:
    return [Condition(sampler, scheduler, BESIDE_CFG, BESIDE_STEPS) for sampler, scheduler in samplers]


def rows(subject: Subject, shelf: Shelf, commit: str | None, say: Say) -> Iterator[Row]:
    """The subject inpaints from then on."""
    yield from _rows(UNTESTED_SAMPLERS, subject, shelf, conditions(UNTESTED), _whole, commit, say)
    inpaint_half(subject)
    yield from _rows(INPAINTING, subject, shelf.within(INPAINTING), conditions(INPAINTED), _right_half, commit, say)


def inpaint_half(subject: Subject) -> None:
    """The right half anew, beside the left half of another caption's picture."""
    condition = Condition("euler", "normal", BESIDE_CFG, BESIDE_STEPS)
    way = ways.full(subject, condition)
    pictures = subject.sample(way.sampler, way.sigmas, way.cfg).latents
    mask = torch.zeros(len(pictures), 1, *pictures.shape[-2:])
    _right_half(mask).fill_(1.0)
    subject.inpaint(pictures.roll(1, 0), mask)


def _rows(
    case: str,
    subject: Subject,
    shelf: Shelf,
    chosen: Sequence[Condition],
    judged: Callable[[Tensor], Tensor],
    commit: str | None,
    say: Say,
) -> Iterator[Row]:
    time_steps(subject, shelf, [(condition.sampler, condition.cfg) for condition in chosen], say, nodes=())
    make = sampled(subject, shelf, say)
    for condition in chosen:
        runs = Runs(subject, condition, make, shelf.costs, ways.own_kinds(condition), nodes=())
        whole = runs.full()
        for preset, compared in runs.compared([PRESETS[ways.BALANCED]]):
            yield {"case": case, **figures(condition, preset, compared, whole, commit, judged).row}


def _whole(latents: Tensor) -> Tensor:
    return latents


def _right_half(latents: Tensor) -> Tensor:
    return latents[..., latents.shape[-1] // 2 :]
