"""The hackathon's own case: canny ControlNet, 20 steps of DDIM, its list against 10 plain steps.

Schedules whose timesteps are spaced from the end (diffusers' `leading`, ComfyUI's `ddim_uniform`) begin 10 steps at a
lower noise level than 20: 10 plain steps differ from the 20 before anything is skipped. `same start` takes that
difference out: every other step of the 20.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...demo import scenes
from ...hosts.comfy.skip.step_skip import skip_steps
from ...sampling.metrics import capped, latent_psnr, psnr, ssim
from ...sampling.presets import PRESETS, Preset
from ...sampling.schedule import shortened
from .samples import protocol
from .samples.bootstrap import paired_bootstrap
from .samples.protocol import DECODED
from .samples.subject import Outcome, Patch, Subject
from .samples.ways import everywhere

SAMPLER, SCHEDULER, STEPS = "ddim", "ddim_uniform", 20
CFGS = (4.0, 7.5, 9.0)
LIST = "the hackathon's list"


def hints(captioned: scenes.Scenes) -> Tensor:
    """Canny edges of the drawn scenes as ComfyUI's IMAGE [B, 256, 256, 3]."""
    from ...demo.canny import canny

    edges = canny(scenes.draw(captioned, 256, 256)).float()
    return edges.expand(-1, 3, -1, -1).movedim(1, -1)


def rows(subject: Subject, commit: str | None) -> Iterator[dict[str, Any]]:
    """By CFG, how close each way of 10 computed steps comes to the 20."""
    for cfg in CFGS:
        whole = subject.sample(SAMPLER, subject.sigmas(SAMPLER, SCHEDULER, STEPS), cfg)
        made = {name: outcome for name, outcome in _ways(subject, cfg)}
        listed = _closeness(made[LIST], whole)
        pictures = subject.decode(whole.latents[:DECODED])
        for name, outcome in made.items():
            near, decoded = _closeness(outcome, whole), subject.decode(outcome.latents[:DECODED])
            difference = paired_bootstrap(listed - near) if name != LIST else None
            yield {
                "case": "hackathon",
                "way": name,
                "sampler": SAMPLER,
                "scheduler": SCHEDULER,
                "cfg": cfg,
                "steps": STEPS,
                "seeds": protocol.seeds(),
                "computed": outcome.calls,
                "samples": len(near),
                "psnr_db": round(float(near.mean()), 3),
                "decoded_psnr_db": round(float(capped(psnr(decoded, pictures)).mean()), 3),
                "ssim": round(float(ssim(decoded, pictures).mean()), 4),
                "list_ahead_db": None if difference is None else round(difference.mean, 3),
                "ci_low": None if difference is None else round(difference.low, 3),
                "ci_high": None if difference is None else round(difference.high, 3),
                "commit": commit,
            }


def _ways(subject: Subject, cfg: float) -> Iterator[tuple[str, Outcome]]:
    sigmas = subject.sigmas(SAMPLER, SCHEDULER, STEPS)
    half = STEPS // 2
    plain = subject.sigmas(SAMPLER, SCHEDULER, half)
    yield f"{half} plain steps", subject.sample(SAMPLER, plain, cfg)
    yield "every other of the 20, same start", subject.sample(SAMPLER, shortened(sigmas, range(0, STEPS, 2)), cfg)
    for name, preset in ((LIST, "hackathon"), ("preset fast", "fast")):
        yield name, subject.sample(SAMPLER, sigmas, cfg, _skipping(PRESETS[preset]))


def _skipping(preset: Preset) -> Patch:
    return lambda model: skip_steps(model, everywhere(preset))


def _closeness(outcome: Outcome, whole: Outcome) -> Tensor:
    return capped(latent_psnr(outcome.latents, whole.latents))
