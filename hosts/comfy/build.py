"""Build engines for a model outside of sampling."""

from __future__ import annotations

from typing import Any

import torch

from ...core.dtypes import dtype_of
from ...core.errors import UnsupportedModel
from ...core.shapes import Shape
from ...engine_cache import WeightsMemo
from ...runtime.plan import CallShape
from ...runtime.provider import EngineProvider
from ...runtime.settings import Resolution, Settings
from .source import ComfyUNetSource
from .vetoes import why_not_this_run
from .waiting import waiting_hooks


def build_engines(provider: EngineProvider, patcher: Any, settings: Settings, batch: int, tokens: int) -> list[str]:
    """Build (or find), load and verify one engine a resolution; a line of report each.

    Args:
        batch: samples in one call of the UNet.
        tokens: length of the text.

    Raises:
        SlipstreamError: an engine could not be had; those before it are kept.
    """
    if not settings.resolutions:
        raise UnsupportedModel("Name at least one resolution, such as 512x512")
    source = open_unet(patcher, provider.weights_memo)
    return [
        _build_one(provider, source, settings, unet_call(source, resolution, batch, tokens))
        for resolution in settings.resolutions
    ]


def open_unet(patcher: Any, memo: WeightsMemo) -> ComfyUNetSource:
    """Load a model onto its device, where it stays, ready to be measured and checked.

    Args:
        memo: remembers the digests of checkpoint files.

    Raises:
        UnsupportedModel: no engine would be used for it.
    """
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    source = ComfyUNetSource(patcher, memo)
    if reason := why_not_this_run(patcher, patcher.model_options):
        raise UnsupportedModel(f"An engine would not be used: {reason}")
    return source


def unet_call(source: ComfyUNetSource, resolution: Resolution, batch: int, tokens: int) -> CallShape:
    """The call that sampling at this resolution will make."""
    config = source.architecture.config
    shapes: dict[str, Shape] = {
        "x": (batch, config["in_channels"], resolution.height // 8, resolution.width // 8),
        "timesteps": (batch,),
    }
    if config.get("context_dim") is not None:
        shapes["context"] = (batch, tokens, config["context_dim"])
    if config.get("adm_in_channels"):
        shapes["y"] = (batch, config["adm_in_channels"])
    dtype = dtype_of(source.precision)
    return CallShape(
        tuple((name, shape, torch.float32 if name == "timesteps" else dtype) for name, shape in shapes.items())
    )


def _build_one(provider: EngineProvider, source: ComfyUNetSource, settings: Settings, call: CallShape) -> str:
    plan, entry = provider.prepare(source, call, settings, waiting_hooks())
    seconds = entry.manifest.build.seconds
    checked = entry.manifest.verifications.get(source.weights_digest())
    error = f", error {checked.relative_error:.1e}" if checked else ""
    return f"{plan}: {plan.spec.backend.name} {plan.spec.precision.value}, built in {seconds:.0f} s{error}, ready"
