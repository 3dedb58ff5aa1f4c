"""Group norm for channels-last tensors: reduces memory traffic.

The compiler's own reads a group, some ten channels of each pixel, at a quarter of what memory gives. Here statistics
are taken by channel over chunks of pixels, where neighbours in memory are neighbours in the kernel, and brought
together by group: mean and variance of parts by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances" (1979), which loses no digits as a difference of squares would.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .graph import Graph, argument, aten, shape_of

_SMALL = 256
"""Pixels of a picture of which each group is read by a single kernel: there overhead is what counts."""
_LEAST_ROWS = 64
_MOST_CHUNKS = 256
_MANY = 1 << 22
"""Elements from which on a kernel of its own for scale and shift of each channel pays."""


def by_channel(graph: Graph) -> None:
    for node in graph.calls(aten.group_norm.default):
        assert isinstance(node.args[0], Node)
        if len(shape_of(node)) == 4:
            weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
            graph.replace(node, group_norm, *node.args[:2], weight, bias, argument(node, 4, "eps", 1e-5))


def group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`torch.nn.functional.group_norm` of x [N, C, H, W]; statistics in fp32."""
    mean, variance = _statistics(x.float().permute(0, 2, 3, 1), groups)
    return normalised(x, mean, variance, weight, bias, eps, is_large=x.numel() >= _MANY)


def normalised(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_large: bool,
) -> torch.Tensor:
    """Features [N, C, H, W] by their groups' statistics.

    Args:
        mean, variance: fp32 [N, groups, 1].
        weight, bias: of each channel [C].
        is_large: scale and shift of each channel are computed once, and not anew for each pixel.
    """
    (n, c), groups = x.shape[:2], mean.shape[1]
    scale = torch.rsqrt(variance + eps).expand(n, groups, c // groups).reshape(n, c)
    shift = -mean.expand(n, groups, c // groups).reshape(n, c) * scale
    if weight is not None:
        scale, shift = scale * weight.float(), shift * weight.float()
    if bias is not None:
        shift = shift + bias.float()
    if is_large:
        scale, shift = _computed_once(scale), _computed_once(shift)
    return (x.float() * scale[:, :, None, None] + shift[:, :, None, None]).to(x.dtype)


def _statistics(pixels: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance, both [N, groups, 1], of pixels [N, H, W, C]."""
    n, h, w, c = pixels.shape
    if h * w <= _SMALL:
        grouped = pixels.reshape(n, h * w, groups, c // groups)
        variance, mean = torch.var_mean(grouped, dim=(1, 3), correction=0)
        return mean[..., None], variance[..., None]
    chunks = _chunks(h * w)
    variances, means = torch.var_mean(pixels.reshape(n, chunks, h * w // chunks, c), dim=2, correction=0)
    variances, means = (
        part.reshape(n, chunks, groups, c // groups).transpose(1, 2).reshape(n, groups, -1)
        for part in (variances, means)
    )
    share = 1 / means.shape[-1]
    mean = means.sum(-1, keepdim=True) * share
    return mean, (variances + (means - mean).square()).sum(-1, keepdim=True) * share


def _chunks(area: int) -> int:
    chunks = 1
    while chunks < _MOST_CHUNKS and area % (2 * chunks) == 0 and area // (2 * chunks) >= _LEAST_ROWS:
        chunks *= 2
    return chunks


def _computed_once(channels: torch.Tensor) -> torch.Tensor:
    """The same [N, C]; the compiler writes what is given other strides to memory, instead of computing it anew for each
    pixel."""
    n, c = channels.shape
    return channels.as_strided((n, c), (c, 1))
