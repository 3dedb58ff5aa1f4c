"""One cold start, in the process that was started: its marks, its first picture, and whether that may be trusted."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..subjects.cases import Case
from ..subjects.jobs import PICTURE, Job
from ..subjects.models import SEED
from ..subjects.rows import Row
from ..subjects.setup import SetupContext
from ..subjects.subject import synchronize
from ..subjects.variants import Variant
from .cold_start import FIRST
from .measure import Challenge, Contender, circumstances, failure_of, set_up, whole_row

IMPORTS, MODEL = "imports", "model"
_LATER = 2
"""Pictures after the first: CUDA graphs may still be recorded in the first of them, and the last is the steady one."""


class Marks:
    """Seconds from the process's start until something was there for the first time.

    Args:
        started: when that was, by `time.perf_counter`, which all processes share.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str, device: torch.device | None = None) -> None:
        """
        Args:
            device: that may still be at it.
        """
        if what not in self.seconds:
            if device is not None:
                synchronize(device)
            self.seconds[what] = time.perf_counter() - self._started


def start(case: Case, variant: Variant, setup_context: SetupContext, marks: Marks, kept: Path) -> Row:
    """Paint a first picture and later ones, then compare with fp32.

    Args:
        kept: the file of what the processes of a case are all put to; made where it is missing.
    """
    with torch.no_grad():
        subject = case.build()
    marks(MODEL, subject.device)
    if reason := variant.why_left_out(case, subject):
        return {"case": case.name, "variant": variant.name, "left_out": reason}
    assert isinstance(subject, Job)
    with torch.inference_mode(), ExitStack() as ending:
        try:
            found = _painted(variant, subject, setup_context, marks, kept, ending)
        except Exception as error:
            found = failure_of(error)
    common = {**circumstances(subject), "case": case.name, "seed": SEED, "repeats": 1, "warmup": FIRST}
    return whole_row(common, variant.name, found)


def _painted(
    variant: Variant, job: Job, setup_context: SetupContext, marks: Marks, kept: Path, ending: ExitStack
) -> Row:
    job.tell = lambda what: marks(what, job.device)
    ready = set_up(variant, job, setup_context, ending)
    taken: Any = ready.prepare(job.inputs(seed=0))
    if PICTURE not in marks.seconds:
        ready.compute(taken)
    later = [job.milliseconds(lambda: ready.compute(taken)) for _ in range(_LATER)]
    contender = Contender(variant.name, ready, _challenge(job, kept))
    contender.calls = _LATER  # engines count from the end of setting up, and what went elsewhere before is a reason
    contender.check(range(job.sets))
    row = contender.row([1000 * marks.seconds[PICTURE]])
    seconds = {what: round(spent, 4) for what, spent in marks.seconds.items()}
    return {**row, "steady_ms": round(later[-1], 4), "marks": seconds}


def _challenge(job: Job, file: Path) -> Challenge:
    """The same numbers by the same seeds in every process: the first that comes here has fp32 paint for all."""
    if not file.exists():
        new = file.with_suffix(".new")  # a start that is ended in the middle leaves no half of it
        torch.save(Challenge.of(job), new)
        os.replace(new, file)
    found: Challenge = torch.load(file, weights_only=False)
    return found
