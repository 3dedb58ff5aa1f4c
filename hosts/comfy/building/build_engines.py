"""Build engines for a model outside of sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ....core.dtypes import dtype_of
from ....core.errors import UnsupportedModel
from ....engine_cache import WeightsMemo
from ....runtime.planning.plan import CallShape
from ....runtime.provider import EngineProvider
from ....runtime.requests.make_engines import make_engines
from ....runtime.settings.model_settings import PIXELS, Resolution, Settings
from ...live_model.account import why_changed
from ..models.fallback_reasons import why_not_this_run
from ..models.model_classes import CallSize
from ..models.unet_source import ComfyUNetSource
from ..process.build_waiting import waiting_hooks


def build_engines(
    provider: EngineProvider,
    patcher: Any,
    settings: Settings,
    batch: int,
    tokens: int,
    want: Callable[[str], None] = lambda digest: None,
) -> list[str]:
    """Build (or find), load and verify an engine for each resolution; a line of report for each engine.

    Args:
        batch: samples in one call of the UNet.
        tokens: length of the text.
        want: told the digest of each engine.

    Raises:
        SlipstreamError: an engine could not be had; those before it are kept.
    """
    if not settings.resolutions:
        raise UnsupportedModel("Name at least one resolution, such as 512x512")
    settings = provider.with_preferences(settings)
    source = open_unet(patcher, provider.weights_memo)
    calls = (unet_call(source, resolution, batch, tokens) for resolution in settings.resolutions)
    hooks = replace(waiting_hooks(), wants=want, by_hand=True)
    reports = []
    for made in make_engines(provider, source, calls, settings, hooks):
        want(made.plan.key.digest)
        reports.append(str(made))
    return reports


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
    if reason := why_not_this_run(patcher, patcher.model_options) or why_changed(source.unet, source.architecture):
        raise UnsupportedModel(f"An engine would not be used: {reason}")
    return source


def unet_call(source: ComfyUNetSource, resolution: Resolution, batch: int, tokens: int) -> CallShape:
    """The call that sampling at this resolution will make.

    Raises:
        UnsupportedModel: the model's config does not tell.
    """
    kind, config = source.architecture.kind, source.architecture.config
    if kind.shapes is None or source.pixels_per_latent != PIXELS:
        raise UnsupportedModel(
            f"The inputs of {source.architecture.fingerprint.architecture_name} models are only known when they run: "
            'set build to "first use" in the Accelerate Model node, and run the workflow once'
        )
    size = CallSize(batch, tokens, resolution.height // PIXELS, resolution.width // PIXELS)
    dtype = dtype_of(source.precision)
    inputs = [(name, shape, dtype) for name, shape in kind.shapes(config, size).items()]
    return CallShape((*inputs, ("timesteps", (batch,), torch.float32)))
