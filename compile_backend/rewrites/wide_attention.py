"""Attention with heads too wide for fused kernels, as in the middle of a VAE: reduces compute time.

torch's fallback for 512 channels a head reaches a sixth of the GPU's peak. Two matrix products reach most of it, and
their scores, for a block of queries at a time, take less memory than later layers of the VAE.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...core.shapes import Shape
from .graph import Graph, argument, aten, shape_of

_WIDEST_FUSED = 256
_SCORES_BYTES = 1 << 30
_MOST_PRODUCTS = 64
"""Of a head and a block of queries. Each is compiled by itself: torch's packages know products of half precision with
fp32 results one by one only."""

_OPTIONS = ((3, "attn_mask"), (4, "dropout_p"), (5, "is_causal"), (7, "enable_gqa"))


def by_products(graph: Graph) -> None:
    if not hasattr(aten.mm, "dtype"):
        return  # scores in half precision would cost accuracy
    for node in graph.calls(aten.scaled_dot_product_attention.default):
        inputs = [each for each in node.args[:3] if isinstance(each, Node)]
        is_plain = all(argument(node, place, name) in (None, False, 0.0) for place, name in _OPTIONS)
        if is_plain and len(inputs) == 3 and _is_wide(*map(shape_of, inputs)):
            graph.replace(node, attention, *node.args[:3], argument(node, 6, "scale"))


def _is_wide(query: Shape, key: Shape, value: Shape) -> bool:
    if len(query) != 4 or not query[:2] == key[:2] == value[:2]:
        return False
    products = query[0] * query[1] * -(-query[2] // _rows(query[2], key[2]))
    return query[3] > _WIDEST_FUSED and products <= _MOST_PRODUCTS


def _rows(tokens: int, keys: int) -> int:
    """Queries whose scores are computed at once."""
    return max(1, min(tokens, _SCORES_BYTES // (4 * keys)))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention of [N, heads, tokens, channels]; scores in fp32."""
    n, heads, tokens, channels = query.shape
    scale = channels**-0.5 if scale is None else scale
    rows = _rows(tokens, key.shape[2])
    found = [
        torch.cat([_block(block, k, v, scale) for block in q.split(rows)])
        for q, k, v in zip(*(each.flatten(0, 1).unbind() for each in (query, key, value)), strict=True)
    ]
    return torch.stack(found).reshape(n, heads, tokens, value.shape[3])


def _block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[rows, channels] of one head."""
    scores = _product(query, key.t())
    return torch.softmax(scores * scale, -1).to(value.dtype) @ value


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp32; only GPUs have products that widen."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else a.float() @ b.float()
