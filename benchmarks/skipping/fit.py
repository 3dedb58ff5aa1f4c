"""How the presets were chosen: powers and rules on captions that none of them is judged on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...hosts.comfy.step_skip import skip_steps
from ...sampling.metrics import capped, latent_psnr
from ...sampling.presets import PRESETS, Selection, custom
from ...sampling.reuse import Reuse
from .protocol import LATENT, Condition
from .subject import Outcome, Subject

CAPTIONS_SEED, NOISE_SEED, SAMPLES = 12_345, 7, 64
POWERS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
RULES = (Reuse.HOLD, Reuse.MEASURED, Reuse.BENT)


def noise() -> torch.Tensor:
    return torch.randn(SAMPLES, *LATENT, generator=torch.Generator().manual_seed(NOISE_SEED))


def rows(subject: Subject, conditions: Iterable[Condition]) -> Iterator[dict[str, Any]]:
    """By condition and preset: dB to the full run, for each power by each rule, and of as many plain steps."""
    for condition in conditions:
        sigmas = subject.sigmas(condition.sampler, condition.scheduler, condition.steps)
        whole = subject.sample(condition.sampler, sigmas, condition.cfg)
        for preset in PRESETS.values():
            if preset.selection.counts_down:
                continue
            count = len(preset.selection.computed(len(sigmas) - 1))
            found = {}
            for rule, power in itertools.product(RULES, POWERS):
                tried = custom(Selection(count=count, power=power), rule)
                made = subject.sample(condition.sampler, sigmas, condition.cfg, lambda model: skip_steps(model, tried))  # noqa: B023
                found[f"{rule.value} {power:g}"] = _closeness(made, whole)
            for schedule in dict.fromkeys((condition.scheduler, "normal", "karras", "beta")):
                plain = subject.sigmas(condition.sampler, schedule, count)
                made = subject.sample(condition.sampler, plain, condition.cfg)
                found[f"plain {schedule}"] = _closeness(made, whole)
            yield {
                "case": "fit",
                "sampler": condition.sampler,
                "scheduler": condition.scheduler,
                "cfg": condition.cfg,
                "steps": len(sigmas) - 1,
                "preset": preset.name,
                "computed": count,
                "samples": len(whole.latents),
                "psnr_db": found,
            }


def _closeness(made: Outcome, whole: Outcome) -> float:
    return round(float(capped(latent_psnr(made.latents, whole.latents)).mean()), 2)
