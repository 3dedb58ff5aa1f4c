"""How much device memory a VAE needs on an engine, in bytes; replaces ComfyUI's estimate for the plain model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ....core.dtypes import dtype_of
from ....core.shapes import Shape
from ....runtime.module import AcceleratedModule
from ..models.autoencoders import DECODER, Half
from ..models.vae import ComfyVaeSource, source_of

log = logging.getLogger(__name__)

_COPIES = 4
"""Of what comes out: the engine's own, in the host's dtype, among those of the other pictures, and on its way."""


def memory_needed(
    vae: Any, module: AcceleratedModule, half: Half, estimate: Callable[..., float], shape: Any, dtype: Any
) -> float:
    """Bytes for each picture of a batch on its engine; ComfyUI's own estimate where there is none. Never 0.

    Args:
        estimate: ComfyUI's own, given shape and dtype.
    """
    usual = estimate(shape, dtype)
    try:
        found = _on_engine(vae, module, half, usual, tuple(shape))
    except Exception as error:  # whatever it is: the call itself will say so, and an estimate must not end it
        log.debug("Slipstream: memory for %s is not known: %s", half.method, error)
        found = None
    return usual if found is None else max(1.0, found)


def _on_engine(vae: Any, module: AcceleratedModule, half: Half, usual: float, shape: Shape) -> float | None:
    if len(shape) != 4:
        return None
    source = source_of(vae, half)
    forecast = module.provider.forecast(source, source.call((1, *shape[1:])), module.settings)
    if forecast is None:
        return None
    # The first time in a process the plain model computes too, to be compared with.
    return forecast.engine_bytes + (usual if forecast.compares else 0) + _picture_bytes(source, shape)


def _picture_bytes(source: ComfyVaeSource, shape: Shape) -> int:
    _, channels, height, width = shape
    architecture = source.architecture
    area, scale = height * width, architecture.pixels_per_latent
    if architecture.half is DECODER:
        out = 3 * area * scale**2
    else:
        out = architecture.kind.latent_channels(architecture.config) * area // scale**2
    return int((channels * area + _COPIES * out) * dtype_of(source.precision).itemsize)
