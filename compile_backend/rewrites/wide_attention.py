"""Attention whose heads are wider than fused kernels can do, as of the middle of a VAE: attacks compute.

What torch has left for 512 channels a head reaches a sixth of the chip's speed. Two matrix products reach most of it,
and their scores, a block of queries at a time, take less memory than the VAE does later.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .graph import Graph, argument, aten, shape_of

_WIDEST_FUSED = 256
_SCORES_BYTES = 1 << 30
_MOST_HEADS = 8
"""Each is a product of its own: torch's packages know products of half precision with fp32 results one by one only."""


def by_products(graph: Graph) -> None:
    if not hasattr(aten.mm, "dtype"):
        return  # scores in half precision would cost accuracy
    for node in graph.calls(aten.scaled_dot_product_attention.default):
        query = node.args[0]
        assert isinstance(query, Node)
        is_plain = all(argument(node, place, name) in (None, False, 0.0) for place, name in _OPTIONS)
        if len(shape_of(query)) == 4 and is_plain and _is_wide(*shape_of(query)):
            graph.replace(node, attention, *node.args[:3], argument(node, 6, "scale"))


def _is_wide(samples: int, heads: int, tokens: int, channels: int) -> bool:
    return channels > _WIDEST_FUSED and samples * heads <= _MOST_HEADS


_OPTIONS = ((3, "attn_mask"), (4, "dropout_p"), (5, "is_causal"), (7, "enable_gqa"))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention of [N, heads, tokens, channels]; scores in fp32."""
    n, heads, tokens, channels = query.shape
    scale = channels**-0.5 if scale is None else scale
    rows = max(1, min(tokens, _SCORES_BYTES // (4 * key.shape[2])))
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
