"""A sampling run before it begins, as far as presets ask about it."""

from __future__ import annotations

from dataclasses import dataclass

from .samplers import SamplerKind, kind_of


@dataclass(frozen=True)
class Task:
    """The sampling run that a preset is asked about.

    Attributes:
        sampler: ComfyUI's name of its method.
        steps: N.
        guided: by a negative prompt, as with CFG above 1.
        has_mask: for inpainting.
        has_parts: its latent is several unlike ones in one tensor, such as video and sound.
        is_distilled: the model was trained to sample in few steps.
        sigmas: its N + 1 noise levels, falling; empty where they are not known.
        cfg: scale of guidance; None where it is not one number, or not known.
        model: the host's name for its architecture; empty where that is not known.
    """

    sampler: str
    steps: int
    guided: bool = True
    has_mask: bool = False
    has_parts: bool = False
    is_distilled: bool = False
    sigmas: tuple[float, ...] = ()
    cfg: float | None = None
    model: str = ""

    @property
    def kind(self) -> SamplerKind:
        return kind_of(self.sampler)
