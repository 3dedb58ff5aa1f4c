"""Build engines for a model outside of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ....core.dtypes import dtype_of
from ....core.errors import UnsupportedModel
from ....engine_cache import WeightsMemo
from ....runtime.module import AcceleratedModule
from ....runtime.planning.plan import CallShape
from ....runtime.provider import Made
from ....runtime.requests.make_engines import make_engines
from ....runtime.settings.model_settings import PIXELS, Resolution
from ...live_model.account import why_changed
from ..models.fallback_reasons import why_not_this_run
from ..models.model_classes import CallSize
from ..models.unet_source import ComfyUNetSource
from ..process.build_waiting import waiting_hooks


def build_engines(module: AcceleratedModule, patcher: Any, batch: int, tokens: int) -> list[Made]:
    """Build (or find), load and verify an engine for each resolution of the settings; the node shows how it goes.

    Args:
        batch: samples in one call of the UNet.
        tokens: length of the text.

    Raises:
        SlipstreamError: an engine could not be had; those before it are kept.
    """
    provider, settings, status = module.provider, module.settings, module.status
    made = []
    with failing(module):
        if not settings.resolutions:
            raise UnsupportedModel("Name at least one resolution, such as 512x512")
        source = open_unet(patcher, provider.weights_memo)
        calls = [unet_call(source, resolution, batch, tokens) for resolution in settings.resolutions]
        hooks = replace(waiting_hooks(), wants=status.want, by_hand=module.by_hand)
        for engine in make_engines(provider, source, calls, settings, hooks):
            status.want(engine.plan.key.digest)
            made.append(engine)
    return made


@contextmanager
def failing(module: AcceleratedModule) -> Iterator[None]:
    """Show on the node why a requested engine could not be built; the error is raised on."""
    try:
        yield
    except waiting_hooks().interruptions:
        raise
    except Exception as error:  # whatever a backend raises
        module.status.fail(str(error) or type(error).__name__)
        raise


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
