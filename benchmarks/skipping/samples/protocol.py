"""The protocol's numbers; `benchmarks/step_skipping.md` says why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

CAPTIONS_SEED, NOISE_SEED = 990_001_333, 4051
FIRST_LOOK_SEEDS = 990_000_777, 2026
"""Captions and noise of the first rows, which had a part in the design: never again."""
FIT_CAPTIONS_SEED, FIT_NOISE_SEED = 12_345, 7
SAMPLES, DECODED, FIT_SAMPLES = 200, 32, 48
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
CACHES = {"EasyCache": (0.004, 4.0), "LazyCache": (0.002, 2.0)}
"""Between which thresholds those are looked for that take a preset's time."""

RANDOM_MASKS = 5
CONVERGED_STEPS = 256
CONVERGED_BY = ("dpmpp_2m", "karras")
NO_CONVERGED = ("euler_ancestral",)
OF_THEMSELVES = ("dpmpp_2m_sde_gpu",)
"""Samplers that converge to a picture of their own."""

SAME_AS = {"ddim": "euler"}
"""ComfyUI's samplers that are others under another name, as long as nothing is inpainted."""

INPAINTED = (("euler", "normal"), ("dpmpp_2m", "normal"))
UNTESTED = (("lms", "normal"), ("ipndm", "normal"), ("res_multistep", "normal"), ("er_sde", "normal"))
BESIDE_STEPS, BESIDE_CFG = 20, 4.0

FIT_SAMPLERS = tuple(pair for pair in SAMPLERS if pair[0] not in SAME_AS)
FIT_SHARES = (0.35, 0.5, 0.6, 0.667, 0.7, 0.75)
FIT_POWERS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)

TIME_TOLERANCE = 0.25
"""Of a rival's computed step: so much longer than the preset it may take."""
NEAR = 0.1
"""Of a preset's time, or a computed step where that is more: a cache further off is no rival at equal time."""
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
    return _conditions(STEPS, SAMPLERS)


def fit_conditions() -> list[Condition]:
    return _conditions(STEPS, FIT_SAMPLERS)


def _conditions(steps: tuple[int, ...], samplers: tuple[tuple[str, str], ...]) -> list[Condition]:
    chosen = itertools.product(steps, CFGS, samplers)
    return [Condition(sampler, scheduler, cfg, number) for number, cfg, (sampler, scheduler) in chosen]


def converged(condition: Condition) -> Condition | None:
    """Whose full run is the converged picture; None where there is none."""
    if condition.sampler in NO_CONVERGED:
        return None
    own = condition.sampler in OF_THEMSELVES
    sampler, scheduler = (condition.sampler, condition.scheduler) if own else CONVERGED_BY
    return Condition(sampler, scheduler, condition.cfg, CONVERGED_STEPS)


def share(conditions: Sequence[Condition], part: int, parts: int) -> list[Condition]:
    """A process's conditions: about as much work for each, and those together that share plain runs."""
    groups: dict[tuple[float, int], list[Condition]] = {}
    for condition in conditions:
        groups.setdefault((condition.cfg, condition.steps), []).append(condition)
    loads, chosen = [0.0] * parts, []
    for group in sorted(groups.values(), key=_work, reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += _work(group)
        chosen += group if lightest == part else []
    return [condition for condition in conditions if condition in chosen]


def _work(group: Sequence[Condition]) -> float:
    return sum(condition.steps * (1.0 if condition.cfg > 1 else 0.5) for condition in group)


def seeds(captions: int = CAPTIONS_SEED, noise: int = NOISE_SEED) -> dict[str, int]:
    """As rows tell them."""
    return {"captions": captions, "noise": noise}
