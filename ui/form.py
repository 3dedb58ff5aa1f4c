"""The build form: its answers as a build request, and its sliders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.spec import Role
from ..runtime.requests.build_requests import Wanted
from ..runtime.settings.model_settings import TOKENS, Settings
from .compat import gradio

PRESETS = {
    "SD 1.5": "512x512, 512x768, 768x512",
    "SD 2": "768x768",
    "SDXL, SD3, Flux": "1024x1024, 832x1216, 1216x832",
}
"""Sizes that people make pictures in, by kind of model."""


@dataclass(frozen=True)
class Answers:
    """What stands in the form, in its order."""

    model: str
    role: str
    resolutions: str
    batch: float
    precision: str
    backend: str
    optimize: str
    engines: str
    max_batch: float
    tokens: float
    max_tokens: float
    bake: bool

    def wanted(self) -> Wanted:
        """The build request of these answers.

        Raises:
            ValueError: an answer that does not do, with what to do.
        """
        if not self.model:
            raise ValueError("Choose a model first")
        settings = Settings.of_text(
            backend=self.backend,
            precision=self.precision,
            optimize=self.optimize,
            build="first use",
            resolutions=self.resolutions or "",
            engines=self.engines,
            max_batch=int(self.max_batch),
            max_tokens=int(self.max_tokens),
            bake=bool(self.bake),
        )
        if not settings.resolutions:
            raise ValueError("Name at least one resolution, such as 512x512")
        return Wanted(self.model, Role(self.role), settings, int(self.batch), int(self.tokens))


def batch_slider(value: int = 2, label: str = "Batch: 2 for one picture with CFG") -> Any:
    return gradio().Slider(1, 64, value=value, step=1, label=label)


def tokens_slider(value: int = TOKENS, label: str = "Length of the text, in tokens") -> Any:
    return gradio().Slider(TOKENS, 16 * TOKENS, value=value, step=TOKENS, label=label)
