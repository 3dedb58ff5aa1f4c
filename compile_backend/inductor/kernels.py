"""Choices of kernels for the time of a compilation; entered again where compiled code is looked up in a cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.spec import EngineSpec
from .options import ROWS_AT_ONCE

_CUDNN_LEADS_FROM = (9, 0)
"""Compute capability from which cuDNN's kernels lead: 30 % less time than FlashAttention 2 on an H200."""


@contextmanager
def chosen_kernels(spec: EngineSpec, device: torch.device) -> Iterator[None]:
    """Compile with the fastest attention kernels of the chip, and with reductions that hold long rows whole."""
    with fastest_attention(device), whole_rows(spec):
        yield


@contextmanager
def fastest_attention(device: torch.device) -> Iterator[None]:
    """Prefer the GPU's fastest attention kernels; the others stay allowed, for inputs that those do not support."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _CUDNN_LEADS_FROM:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    preferred = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(preferred, set_priority=True):
        yield


@contextmanager
def whole_rows(spec: EngineSpec) -> Iterator[None]:
    """Let reductions over up to `ROWS_AT_ONCE` elements hold a row in one kernel, which reads it once instead of twice.

    torch itself does so up to 1024 elements; a layer norm may have 1280 channels. Older torch versions, which do not
    let the choice be replaced, are left as they are.
    """
    longest = spec.backend.options.get(ROWS_AT_ONCE)
    handler = _handler(int(longest)) if longest else None
    if handler is None:
        yield
        return
    from torch._inductor.virtualized import V

    with V.set_choices_handler(handler):
        yield


@functools.lru_cache(maxsize=4)
def _handler(longest: int) -> Any:
    try:
        from torch._inductor.choices import InductorChoices
    except ImportError:
        return None
    if not hasattr(InductorChoices, "should_use_persistent_reduction"):
        return None

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            usual = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
            return bool(usual) or _is_whole(features, longest)

    return Choices()


def _is_whole(features: Any, longest: int) -> bool:
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    if features.get_reduction_hint() != ReductionHint.INNER:
        return False
    return bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, longest))
