"""Caching inside the network: what a user chooses, and when a computed step may reuse blocks of an earlier one.

Neighbouring steps give most blocks of a network nearly the same work. Both ways keep what the blocks of one call did
and let the next calls add it in their place. No preset uses either: they were not judged by the protocol of
`benchmarks/step_skipping.md`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch

FIRST_STEPS = 2
"""Of a run, that are computed whole, since the picture is decided there. So is its last one, which nothing mends."""

_MOST_INTERVAL = 10


@dataclass(frozen=True)
class FirstBlockCache:
    """For transformers: the first block is computed in each call, and tells whether the others may be reused.

    The method is that of ParaAttention ("First Block Cache", github.com/chengzeyi/ParaAttention), which simplifies
    TeaCache (arXiv 2411.19108). Here, too, no more than `most_reuses` calls in a row go without the other blocks.

    Attributes:
        threshold: the relative change of the first block's residual below which the others are reused; 0 reuses none.
    """

    threshold: float
    most_reuses: ClassVar[int] = 3

    def __str__(self) -> str:
        return f"block cache {self.threshold:g}"


@dataclass(frozen=True)
class DeepCache:
    """For UNets: one call in `interval` is computed whole, the others without the part below the top level.

    Ma, Fang, Wang: "DeepCache: Accelerating Diffusion Models for Free" (arXiv 2312.00858), with even intervals.
    """

    interval: int

    @property
    def most_reuses(self) -> int:
        """Calls in a row that go without the deep part."""
        return self.interval - 1

    def __str__(self) -> str:
        return f"deep cache {self.interval}"


BlockCaching = FirstBlockCache | DeepCache


def parse_caching(text: str) -> BlockCaching | None:
    """A choice as people write it: `block cache 0.08`, `deep cache 3`, or nothing.

    Raises:
        ValueError: none of these, or a number out of range.
    """
    if not (words := text.lower().split()):
        return None
    kind, number = tuple(words[:2]), math.nan
    if len(words) == 3:
        with suppress(ValueError):
            number = float(words[2])
    if kind == ("block", "cache") and 0 <= number <= 1:
        return FirstBlockCache(number)
    if kind == ("deep", "cache") and number in range(1, _MOST_INTERVAL + 1):
        return DeepCache(int(number))
    raise ValueError(
        f"{text!r} is no block cache. Write block cache and a threshold from 0 to 1 for a transformer (block cache "
        f"0.08), deep cache and a whole number from 1 to {_MOST_INTERVAL} for a UNet (deep cache 3), or leave it empty."
    )


def relative_change(residual: torch.Tensor, before: torch.Tensor) -> float:
    """How far the first block's residual is from that of the last whole call: the mean absolute difference by the mean
    absolute value, of the picture of the batch that changed most. The device is waited for.

    Args:
        residual, before: the block's output minus its input, [B, tokens, channels].
    """
    difference = (residual - before).abs().flatten(1).mean(1, dtype=torch.float32)
    size = before.abs().flatten(1).mean(1, dtype=torch.float32)
    return float((difference / size).nan_to_num(nan=torch.inf).max())
