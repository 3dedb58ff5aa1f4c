"""Build engines for a model outside of sampling."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ....core.dtypes import dtype_of
from ....core.errors import BuildFailed, UnsupportedModel
from ....engine_cache import Entry, WeightsMemo
from ....runtime.module import AcceleratedModule
from ....runtime.planning.plan import CallShape
from ....runtime.provider import Made
from ....runtime.requests.make_engines import make_engines
from ....runtime.settings.model_settings import PIXELS, Resolution
from ...live_model.account import why_changed
from ..block_calls.block_calls import block_calls_of
from ..models.fallback_reasons import why_not_this_run, why_nothing_of_it
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
        source, calls = _opened(module, patcher, batch, tokens)
        hooks = replace(waiting_hooks(), wants=status.want, by_hand=module.by_hand)
        for engine in make_engines(provider, source, calls, settings, hooks):
            status.want(engine.plan.key.digest)
            made.append(engine)
    return made


def build_blocks(module: AcceleratedModule, patcher: Any, batch: int, tokens: int) -> list[Entry]:
    """Build (or find), load and compare the engines of a model's blocks in calls of the settings' resolutions.

    Args:
        batch, tokens: see `build_engines`.

    Raises:
        SlipstreamError: no engine could be had.
    """
    settings, store = module.settings, module.provider.store
    with failing(module), ExitStack() as ending:
        source, calls = _opened(module, patcher, batch, tokens, for_blocks=True)
        blocks = block_calls_of(source.unet, source, module, settings, patcher, ending)
        if blocks is None:
            raise UnsupportedModel(
                "Engines of blocks are compiled ones in the model's own precision: set backend and precision to auto"
            )
        for call in calls:
            shapes, dtypes = call.shapes, {name: dtype for name, _, dtype in call.inputs}
            inputs = source.architecture.random_inputs(shapes, dtypes, source.device, seed=0)
            with torch.no_grad():
                blocks(functools.partial(source.eager, inputs))
            if not blocks.share.engine:
                raise BuildFailed(f"No block of the model runs on an engine: {blocks.share.why_none}")
        return [entry for digest in blocks.digests if (entry := store.lookup(digest)) is not None]


def _opened(
    module: AcceleratedModule, patcher: Any, batch: int, tokens: int, for_blocks: bool = False
) -> tuple[ComfyUNetSource, list[CallShape]]:
    """The model on its device, and its call at each of the settings' resolutions."""
    resolutions = module.settings.resolutions
    if not resolutions:
        raise UnsupportedModel("Name at least one resolution, such as 512x512")
    source = open_unet(patcher, module.provider.weights_memo, for_blocks)
    return source, [unet_call(source, resolution, batch, tokens) for resolution in resolutions]


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


def open_unet(patcher: Any, memo: WeightsMemo, for_blocks: bool = False) -> ComfyUNetSource:
    """Load a model onto its device, where it stays, ready to be measured and checked.

    Args:
        memo: remembers the digests of checkpoint files.
        for_blocks: engines of its blocks are wanted, of which changed ones do without.

    Raises:
        UnsupportedModel: no engine would be used for it.
    """
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    source = ComfyUNetSource(patcher, memo)
    reason = why_nothing_of_it(patcher.model_options)
    if not for_blocks:
        reason = why_not_this_run(patcher, patcher.model_options) or why_changed(source.unet, source.architecture)
    if reason:
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
