"""How close presets came to the full run, condition by condition; see `docs/step-skipping.md`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

from .samplers import SamplerKind, kind_of, method_of
from .task import KARRAS, Task

MEASURED = Path(__file__).resolve().with_name("measured.json")
"""By preset, a list for each condition. `benchmarks/` writes it from its rows."""


class Figure(NamedTuple):
    """A preset in one condition of the protocol, on the demo model.

    Attributes:
        sampler, scheduler: ComfyUI's names.
        cfg, steps: of the condition.
        share: of the steps that were computed, as the preset's selection has it.
        picture_db: PSNR of the decoded picture to that of all steps, the mean of the samples.
        gain_db: by how much the latent was closer than that of the closest plain way in the same time, in the mean.
    """

    sampler: str
    scheduler: str
    cfg: float
    steps: int
    share: float
    picture_db: float
    gain_db: float

    @property
    def kind(self) -> SamplerKind:
        return kind_of(self.sampler)

    @property
    def guided(self) -> bool:
        return self.cfg > 1


def figures(preset: str) -> tuple[Figure, ...]:
    """All that was measured of a preset; nothing of those that Slipstream does not bring."""
    return _all_figures().get(preset, ())


def nearest(preset: str, share: float, task: Task) -> Figure | None:
    """The least close of the measurements that are most like a run; None where there is none of its kind of sampler.

    Those are of the run's own sampler, else of its kind; of such a schedule, else of all; at the next measured CFG
    that is no lower and the next number of steps that is no higher, since that is the harder case.

    Args:
        share: of the computed steps.
    """
    alike = [each for each in figures(preset) if each.share == share and _is_of(each, task)]
    alike = [each for each in alike if method_of(each.sampler) == method_of(task.sampler)] or alike
    named = [each for each in alike if each.scheduler == task.schedule]
    alike = named or [each for each in alike if _has_schedule(each, task)] or alike
    if not alike:
        return None
    cfgs = sorted({each.cfg for each in alike})
    cfg = next((each for each in cfgs if task.cfg is not None and each >= task.cfg), cfgs[-1])
    lengths = sorted({each.steps for each in alike if each.cfg == cfg}, reverse=True)
    steps = next((each for each in lengths if each <= task.steps), lengths[-1])
    return min((each for each in alike if (each.cfg, each.steps) == (cfg, steps)), key=lambda each: each.picture_db)


def read_again() -> None:
    """Have the file read again, which was written anew."""
    _all_figures.cache_clear()


def _is_of(figure: Figure, task: Task) -> bool:
    return figure.kind is task.kind and figure.guided == task.guided


def _has_schedule(figure: Figure, task: Task) -> bool:
    """Whether it may be the run's: noise levels tell that of Karras and its like apart from the others."""
    if not (task.schedule or task.sigmas):
        return True
    return (figure.scheduler == KARRAS) == (task.schedule == KARRAS)


@functools.cache
def _all_figures() -> dict[str, tuple[Figure, ...]]:
    read = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {preset: tuple(Figure(*each) for each in found) for preset, found in read.items()}
