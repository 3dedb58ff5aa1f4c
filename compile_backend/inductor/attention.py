"""Which of torch's attention kernels compiled code calls: the choice is made while it is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUDNN_LEADS_FROM = (9, 0)
"""Compute capability from which cuDNN's kernels lead: 30 % less time than FlashAttention 2 on an H200."""


@contextmanager
def fastest_attention(device: torch.device) -> Iterator[None]:
    """Prefer the fastest kernels of the chip; the others stay allowed, for what those cannot do."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CUDNN_LEADS_FROM:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(order, set_priority=True):
        yield
