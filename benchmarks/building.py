"""Engines built beside cases that are set up: several at a time, where a case would wait for one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from . import job_variants, model_variants
from .cases import CASES, Case
from .jobs import Job
from .models import Model
from .variants import OURS, Variant
from .workshop import Workshop

ALL = "all"
"""Of a single call, which has one engine."""


@dataclass(frozen=True)
class Task:
    """Engines that one process builds, one after another.

    Attributes:
        part: of a picture, see `job_variants.PARTS`; `ALL` of a single call.
    """

    case: str
    variant: str
    part: str


def tasks_of(parts: Iterable[tuple[str, Sequence[Variant]]]) -> list[Task]:
    """What there is to build for cases and their variants. Presets that skip steps need no engines of their own."""
    found = []
    for name, variants in parts:
        pieces = job_variants.PARTS if CASES[name].is_job else (ALL,)
        ours = [variant.without_steps for variant in variants if variant.kind == OURS and not variant.is_cold]
        found += [Task(name, variant.name, piece) for variant in ours for piece in pieces]
    return list(dict.fromkeys(found))


def build(case: Case, variant: Variant, part: str, workshop: Workshop) -> None:
    """Build a task's engines, for as far as the store lacks them.

    Raises:
        Exception: whatever stops it; whoever measures is told again.
    """
    with torch.no_grad():
        subject = case.build()
    if variant.why_left_out(case, subject):
        return
    with torch.inference_mode(), ExitStack() as ending:
        if isinstance(subject, Job):
            job_variants.build(variant, subject, workshop, part, ending)
        else:
            assert isinstance(subject, Model)
            model_variants.set_up(variant, subject, workshop, ending)
