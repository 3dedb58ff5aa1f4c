"""Engines built beside cases that are set up: several at a time, where a case would wait for one after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ..subjects.cases import CASES, Case
from ..subjects.jobs import MODEL, PARTS, Job
from ..subjects.setup import SetupContext
from ..subjects.variants import OURS, Variant
from .turns import GpuTurn, Unwanted


@dataclass(frozen=True)
class Task:
    """Engines that one process builds, one after another.

    Attributes:
        part: of a picture, see `jobs.PARTS`; `MODEL` of a single call.
    """

    case: str
    variant: str
    part: str


def tasks_of(parts: Iterable[tuple[str, Sequence[Variant]]]) -> list[Task]:
    """What there is to build for cases and their variants. Presets that skip steps need no engines of their own."""
    found = []
    for name, variants in parts:
        pieces = PARTS if CASES[name].is_job else (MODEL,)
        ours = [variant.without_steps for variant in variants if variant.kind == OURS and not variant.is_cold]
        found += [Task(name, variant.name, piece) for variant in ours for piece in pieces]
    return list(dict.fromkeys(found))


class Builders:
    """Run tasks in processes beside cases that are set up.

    Args:
        lock: of the cases, which is held together with them while a process runs, so that nobody is timed meanwhile.
        seconds: after which no process runs any more; they begin when the lock is had for the first time.
        build: runs one process for so many seconds at most; gives what went wrong.
        tell: hears how each task ended.

    Attributes:
        ended: cases that need nothing any more.
    """

    def __init__(
        self,
        lock: Path,
        seconds: float,
        build: Callable[[Task, int | None], str | None],
        tell: Callable[[str], None],
    ) -> None:
        self._lock, self._build, self._tell = lock, build, tell
        self._seconds, self._began = seconds, math.inf
        self.ended: set[str] = set()
        self._is_stopped = False

    def __call__(self, task: Task) -> None:
        try:
            with GpuTurn(self._lock, lambda: self._is_unwanted(task)):
                self._began = min(self._began, time.monotonic())
                left = self._seconds_left
                trouble = self._build(task, None if left == math.inf else math.ceil(left))
        except Unwanted:
            return
        except OSError as error:
            trouble = str(error)  # whoever measures builds by itself
        self._tell(f"{task.case}, {task.variant}, engines of {task.part}: {trouble or 'done'}")

    @property
    def _seconds_left(self) -> float:
        return self._seconds if self._began == math.inf else self._began + self._seconds - time.monotonic()

    def _is_unwanted(self, task: Task) -> bool:
        return self._is_stopped or task.case in self.ended or self._seconds_left <= 0

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_stopped = True


def build(case: Case, variant: Variant, part: str, setup_context: SetupContext) -> None:
    """Build a task's engines, for as far as the store lacks them.

    Raises:
        Exception: whatever stops it.
    """
    from . import job_variants  # takes seconds, in which whoever only asks what there is to build does not wait
    from .measure import set_up

    with torch.no_grad():
        subject = case.build()
    if reason := variant.why_left_out(case, subject):
        setup_context.tell(f"{variant.name} is left out: {reason}")
        return
    with torch.inference_mode(), ExitStack() as ending:
        if isinstance(subject, Job):
            job_variants.build(variant, subject, setup_context, part, ending)
        else:
            set_up(variant, subject, setup_context, ending)
