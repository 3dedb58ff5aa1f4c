"""torch's switches for how it rounds products on a GPU: since torch 2.9 each has an older name and a newer one.

Where somebody set a switch by its newer name, torch raises when it is read by the older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TF32, _PRECISION = "allow_tf32", "fp32_precision"
_OTHERS = (
    "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
    "benchmark", "deterministic",
)  # fmt: skip


def rounding_switches() -> tuple[Any, ...]:
    """All of them; equal where nothing was switched meanwhile."""
    return tuple([_read(owner, name) for owner in _owners() for name in (_TF32, _PRECISION, *_OTHERS)])


def rounds_to_tf32() -> bool:
    """Whether fp32 is rounded to TF32 on its way through matrix units."""
    return any(map(_rounds, _owners()))


@contextmanager
def exact_fp32() -> Iterator[bool]:
    """fp32 that is not rounded to TF32 on its way through a GPU's matrix units; gives whether it would be."""
    owners = _owners()
    before = [*map(_rounds, owners)]
    for owner in owners:
        _round(owner, False)
    try:
        yield any(before) and torch.cuda.is_available()
    finally:
        for owner, rounded in zip(owners, before, strict=True):
            _round(owner, rounded)


def _owners() -> tuple[Any, Any]:
    return torch.backends.cudnn, torch.backends.cuda.matmul


def _rounds(owner: Any) -> bool:
    known = _read(owner, _TF32)
    return bool(known) if known is not None else _read(_newer(owner), _PRECISION) == "tf32"


def _round(owner: Any, is_wanted: bool) -> None:
    try:
        getattr(owner, _TF32)
        setattr(owner, _TF32, is_wanted)
    except RuntimeError:
        _newer(owner).fp32_precision = "tf32" if is_wanted else "ieee"


def _newer(owner: Any) -> Any:
    """Where the newer name is: convolutions have one of their own."""
    return getattr(owner, "conv", owner)


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None
