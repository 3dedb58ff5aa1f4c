"""Layers between a UNet's blocks in channels last: reduces memory traffic.

ComfyUI's own turn features around four times in each transformer: for the norm, for tokens, back again, and for the
convolution that follows. Engines of residual blocks take and give them in channels last, where a pixel's channels are a
token as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import linear

from ....compile_backend.blocks.norms import statistics_by_rows

_TRANSFORMER = "comfy.ldm.modules.attention", "SpatialTransformer"
_OF_FEATURES = 4
_PARTS = {"norm", "proj_in", "transformer_blocks", "proj_out"}


def in_channels_last(layer: Any) -> Callable[..., torch.Tensor] | None:
    """What computes the calls of a layer whose weights lie where they are used; None where it does so itself."""
    kind = type(layer)
    if isinstance(layer, torch.nn.GroupNorm) and kind.__name__ == "GroupNorm" and layer.affine:
        return lambda x: normalised(layer, x) if x.ndim == _OF_FEATURES else kind.forward(layer, x)
    if (kind.__module__, kind.__qualname__) == _TRANSFORMER and layer._modules.keys() == _PARTS:
        return lambda *args, **kwargs: transformed(layer, *args, **kwargs)
    return None


def transformed(
    layer: Any,
    x: torch.Tensor,
    context: torch.Tensor | list[torch.Tensor | None] | None = None,
    transformer_options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """What a `SpatialTransformer` makes of features [N, C, H, W] and texts [N, tokens, width]; in channels last."""
    n, _, h, w = x.shape
    pixels = normalised(layer.norm, x).permute(0, 2, 3, 1)
    tokens = _projected(layer.proj_in, pixels.flatten(1, 2))
    blocks = layer.transformer_blocks
    texts = context if isinstance(context, list) else [context] * len(blocks)
    for block, text in zip(blocks, texts, strict=True):
        tokens = block(tokens, context=text, transformer_options=transformer_options)
    return _projected(layer.proj_out, tokens).view(n, h, w, -1).permute(0, 3, 1, 2) + x


def _projected(layer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """By a linear layer, or a convolution of one pixel."""
    return linear(tokens, layer.weight.flatten(1), layer.bias)


def normalised(norm: torch.nn.GroupNorm, features: torch.Tensor) -> torch.Tensor:
    """Group norm of features [N, C, H, W], in channels last; statistics in fp32."""
    features = features.contiguous(memory_format=torch.channels_last)
    mean, variance = statistics_by_rows(features, norm.num_groups)
    factors, offsets = (each.float().view(1, norm.num_groups, -1) for each in (norm.weight, norm.bias))
    scale = factors * (variance + norm.eps).rsqrt()
    scale, shift = (each.flatten(1)[:, :, None, None] for each in (scale, offsets - mean * scale))
    return torch.addcmul(shift, features, scale, out=torch.empty_like(features))
