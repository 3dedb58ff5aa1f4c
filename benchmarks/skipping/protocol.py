"""The protocol's numbers; `benchmarks/step_skipping.md` says why."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

CAPTIONS_SEED, NOISE_SEED = 990_000_777, 2026
SAMPLES, DECODED = 200, 32
LATENT = (4, 32, 32)

STEPS = (20, 30, 50)
CFGS = (1.0, 4.0, 7.5)
SAMPLERS = (
    ("euler", "normal"),
    ("ddim", "ddim_uniform"),
    ("dpmpp_2m", "normal"),
    ("dpmpp_2m", "karras"),
    ("uni_pc", "normal"),
    ("deis", "normal"),
    ("euler_ancestral", "normal"),
    ("dpmpp_2m_sde_gpu", "karras"),
)
SCHEDULES = ("normal", "karras", "beta", "ays")
ELSEWHERE = (("dpmpp_2m", "normal"), ("dpmpp_2m", "karras"), ("uni_pc", "normal"))
THRESHOLDS = {"EasyCache": (0.3, 0.8, 2.0), "LazyCache": (0.1, 0.2, 0.4)}
CONVERGED_STEPS = 256
CONVERGED_BY = ("dpmpp_2m", "karras")
NO_CONVERGED = ("euler_ancestral",)
OF_THEMSELVES = ("dpmpp_2m_sde_gpu",)
"""Samplers that converge to a picture of their own."""

WORST_GAIN = -0.1


@dataclass(frozen=True)
class Condition:
    """What a user chose before steps are skipped."""

    sampler: str
    scheduler: str
    cfg: float
    steps: int

    def __str__(self) -> str:
        return f"{self.sampler}-{self.scheduler}-cfg{self.cfg:g}-{self.steps}"


def conditions() -> list[Condition]:
    """Those that others borrow from first."""
    chosen = itertools.product(STEPS, CFGS, SAMPLERS)
    return [Condition(sampler, scheduler, cfg, steps) for steps, cfg, (sampler, scheduler) in chosen]


def converged(condition: Condition) -> Condition | None:
    """Whose full run is the converged picture; None where there is none."""
    if condition.sampler in NO_CONVERGED:
        return None
    own = condition.sampler in OF_THEMSELVES
    sampler, scheduler = (condition.sampler, condition.scheduler) if own else CONVERGED_BY
    return Condition(sampler, scheduler, condition.cfg, CONVERGED_STEPS)
