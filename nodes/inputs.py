"""Inputs that several nodes share."""

from __future__ import annotations

from comfy_api.latest import io

from ..core.spec import Optimize, Precision
from ..runtime.settings import AUTO, BackendChoice, BuildPolicy


def backend_input(with_off: bool = True) -> io.Combo.Input:
    choices = [choice.value for choice in BackendChoice if with_off or choice is not BackendChoice.OFF]
    return io.Combo.Input(
        "backend",
        options=choices,
        default=BackendChoice.AUTO.value,
        tooltip="auto: the fastest that works here. compiled: torch modules compiled ahead of time. "
        "tensorrt: not part of this version yet. off: the plain model.",
    )


def precision_input() -> io.Combo.Input:
    return io.Combo.Input(
        "precision",
        options=[AUTO, *(precision.value for precision in Precision)],
        default=AUTO,
        tooltip="What the engine computes in. auto: what ComfyUI chose for this model.",
    )


def optimize_input() -> io.Combo.Input:
    return io.Combo.Input(
        "optimize",
        options=[level.value for level in Optimize],
        default=Optimize.BALANCED.value,
        tooltip="How much build time to spend. fast build: soonest ready. max: on a GPU, tunes each fused kernel.",
    )


def build_input() -> io.Combo.Input:
    return io.Combo.Input(
        "build",
        options=[policy.value for policy in BuildPolicy],
        default=BuildPolicy.BACKGROUND.value,
        tooltip="background: pictures keep coming from the plain model while the engine is built whenever ComfyUI is "
        "idle. first use: the first picture waits for its engine. manual: only the Build Engine node builds.",
    )


def resolutions_input() -> io.String.Input:
    return io.String.Input(
        "resolutions",
        default=AUTO,
        tooltip="auto: every size that comes up gets an engine. Or a list such as 512x512, 768x512: only these do.",
    )
