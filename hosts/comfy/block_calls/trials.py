"""Results beside those that they are to equal, compared without a wait for the device: which engines may serve."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ....core.formatting import say_share
from ....core.spec import Precision
from ....runtime.blocks.block_engines import BlockEngines, BlockOffer
from ....runtime.checking.rounding_switches import rounds_to_tf32
from ....runtime.checking.verify import ROUNDING

log = logging.getLogger(__name__)

_COARSER = 5e-3
"""Relative error that the block's own rounding explains in fp32: where that is multiplied in TF32, or where its layers
multiply the scales of weights in fp16, as those of GGUF do."""

_TRIALS = 8
"""Calls after which an engine that could not be compared, as the block gave no finite values, is left alone."""


@dataclass(frozen=True)
class Trial:
    """One result beside the one that it is to equal.

    Attributes:
        error: the relative error, not read yet: NaN where any value is not finite.
        is_finite: whether the values that it is to equal are, not read yet.
    """

    error: torch.Tensor
    is_finite: torch.Tensor


def compared(found: Any, wanted: Any) -> Trial:
    """Hold what is found against what is wanted: tensors, or tuples and lists of tensors and None."""
    pairs = [(found, wanted)] if isinstance(wanted, torch.Tensor) else [*zip(found, wanted, strict=True)]
    results = [(one, other) for one, other in pairs if other is not None and one is not other]
    difference = size = torch.zeros((), dtype=torch.float32, device=results[0][1].device)
    for one, other in results:
        if one.shape != other.shape or one.dtype != other.dtype:
            difference = difference + torch.inf
        else:
            difference = difference + _square(one - other)
        size = size + _square(other)
    return Trial((difference / size.clamp_min(1e-30)).sqrt(), size.isfinite().float())


def read(trials: Sequence[Trial]) -> list[tuple[float, bool]]:
    """Error and whether what was wanted is finite, of each: one wait for all of them."""
    if not trials:
        return []
    found = torch.stack([torch.stack([trial.error, trial.is_finite]) for trial in trials]).tolist()
    return [(error, bool(is_finite)) for error, is_finite in found]


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all squares in fp32, without a copy: a VAE's features may fill a large part of the memory."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).square()


class EngineTrials:
    """The first calls of blocks' engines in one sampling run, held against what the blocks themselves give."""

    def __init__(self, engines: BlockEngines, device: torch.device) -> None:
        self._engines, self._device = engines, device
        self._open: dict[int, tuple[BlockOffer, Trial]] = {}
        """By the offers' ids: their engines' results in this call of the network beside those of the blocks."""
        self._settled: Counter[int] = Counter()
        """How often offers were compared, by id."""

    def has_one(self, offer: BlockOffer) -> bool:
        """Whether its engine is being compared in this call of the network."""
        return id(offer) in self._open

    def had_one(self, offer: BlockOffer) -> bool:
        """Whether its engine was compared in an earlier call."""
        return bool(self._settled[id(offer)])

    def forget(self, offer: BlockOffer) -> None:
        """It is a new one, whatever had its id before."""
        self._settled.pop(id(offer), None)

    def compare(self, offer: BlockOffer, found: Any, wanted: Any) -> None:
        """Hold an engine's result against the block's; where memory does not suffice for that, a later one."""
        with suppress(torch.OutOfMemoryError):
            self._open[id(offer)] = offer, compared(found, wanted)

    def settle(self) -> None:
        """Read what this call's trials gave: one wait for all of them."""
        trials, self._open = [*self._open.values()], {}
        for (offer, _), (error, is_finite) in zip(trials, read([trial for _, trial in trials]), strict=True):
            limit = self._limit(offer)
            self._settled[id(offer)] += 1
            if error <= limit:
                offer.is_trusted = True
                log.debug("Slipstream: checked an engine of blocks, relative error %.1e: %s", error, offer.digest[:12])
            elif is_finite:
                name = offer.architecture.fingerprint.architecture_name
                apart, allowed = say_share(error), say_share(limit)
                reason = f"the engine for {name} differs from the block by {apart} (allowed: {allowed})"
                self._engines.refuse(offer, reason)
            elif self._settled[id(offer)] >= _TRIALS:
                offer.refuse("the block computes NaN or Inf, so that its engine cannot be compared with it")

    def _limit(self, offer: BlockOffer) -> float:
        """The relative error with which an engine may serve."""
        is_in_tf32 = self._device.type == "cuda" and rounds_to_tf32()
        is_coarser = is_in_tf32 or any(each.ggml for each in offer.architecture.stored.values())
        return _COARSER if is_coarser and offer.precision is Precision.FP32 else ROUNDING[offer.precision]
