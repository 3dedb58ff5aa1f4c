"""A sampling run before it begins, as far as presets ask about it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .samplers import SamplerKind, kind_of

KARRAS = "karras"
_RHO = 7.0
_NEAR = 0.02
"""Of a noise level, by which it may differ from the formula's."""


@dataclass(frozen=True)
class Task:
    """The sampling run that a preset is asked about.

    Attributes:
        sampler: ComfyUI's name of its method.
        steps: N, its own: of denoise below 1 and of a part of a schedule, those that are left.
        guided: by a negative prompt, as with CFG above 1.
        has_mask: for inpainting.
        has_parts: its latent is several unlike ones in one tensor, such as video and sound.
        is_distilled: the model was trained to sample in few steps.
        distilled_by: what tells so, such as the name of its file; empty where that needs no saying.
        sigmas: its N + 1 noise levels, falling; empty where they are not known.
        named_schedule: ComfyUI's name of the scheduler that makes them, where they are not known yet.
        cfg: scale of guidance; None where it is not one number, or not known.
        model: the host's name for its architecture; empty where that is not known.
    """

    sampler: str
    steps: int
    guided: bool = True
    has_mask: bool = False
    has_parts: bool = False
    is_distilled: bool = False
    distilled_by: str = ""
    sigmas: tuple[float, ...] = ()
    named_schedule: str = ""
    cfg: float | None = None
    model: str = ""

    @property
    def kind(self) -> SamplerKind:
        return kind_of(self.sampler)

    @functools.cached_property
    def schedule(self) -> str:
        """ComfyUI's name of its scheduler, of those that the presets were measured apart with; else as it was named."""
        return KARRAS if is_karras(self.sigmas) else self.named_schedule

    @property
    def is_cfg_pp(self) -> bool:
        """Whether the sampler goes on from the unguided prediction as well (CFG++)."""
        return self.sampler.endswith("_cfg_pp")


def is_karras(sigmas: tuple[float, ...]) -> bool:
    """Whether noise levels fall as those of Karras et al., "Elucidating the Design Space of Diffusion-Based Generative
    Models" (arXiv 2206.00364), equation 5 with rho 7, between the first and the last above 0."""
    levels = [sigma for sigma in sigmas if sigma > 0]
    if len(levels) < 3:
        return False
    first, last, steps = levels[0] ** (1 / _RHO), levels[-1] ** (1 / _RHO), len(levels) - 1
    wanted = [(first + place / steps * (last - first)) ** _RHO for place in range(steps + 1)]
    return all(abs(level - each) <= _NEAR * each for level, each in zip(levels, wanted, strict=True))
