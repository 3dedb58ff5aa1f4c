"""2:4 sparsity: weights with two zeros in every four run on tensor cores that skip them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LAYER_SHARE = 0.5
"""Share of the weights from which on TensorRT is told to look for such layers: it costs build time."""


def is_2_4_sparse(weight: torch.Tensor) -> bool:
    """Whether a weight [out, in, …] has at most two nonzero elements in every four along its inputs."""
    if weight.ndim < 2 or weight.shape[1] % 4 or not weight.is_floating_point():
        return False
    groups = weight.movedim(1, -1).reshape(-1, 4)
    return bool(((groups != 0).sum(1) <= 2).all())


def sparse_share(weights: Iterable[torch.Tensor]) -> float:
    """The share of elements, 0 to 1, that lie in sparse weights; weights of one axis are left out."""
    sparse = total = 0
    for weight in weights:
        if weight.ndim >= 2:
            total += weight.numel()
            sparse += weight.numel() if is_2_4_sparse(weight) else 0
    return sparse / total if total else 0.0
