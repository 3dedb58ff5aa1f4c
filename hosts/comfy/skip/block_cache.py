"""Block caches in a sampling run of ComfyUI: which calls of the model may reuse blocks, and of which earlier call."""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ....core.errors import UnsupportedModel
from ....sampling.block_caching import FIRST_STEPS, BlockCaching
from ....sampling.run import step_of
from ...model_patches import why_not_these_options
from ..blocks.block_classes import OVERRIDE
from ..blocks.block_patches import FACTS
from ..blocks.cached_blocks import MakeCall, cached_calls
from ..models.fallback_reasons import ON_ANOTHER_GPU, why_not_this_run
from ..run.call_wrappers import are_led, put_around_ours, wrappers_of
from ..run.wrapper_keys import BLOCK_CACHE

log = logging.getLogger(__name__)

_KNOWN_OPTIONS = FACTS | {
    OVERRIDE, "grid_sizes", "patches", "patches_replace", "prefetch_dynamic_vbars", "rope_options",
}  # fmt: skip
"""What a call may be told; anything else may change from call to call, and with it what blocks give."""


@dataclass
class _Kept:
    """What a whole call left, and how many calls reused it since."""

    what: Any
    reuses: int = 0


class CachedRun:
    """The calls of a model in one sampling run.

    What a call leaves is for the call with the same prompts, shapes and place among such calls in the next computed
    step: those of a positive and a negative prompt, of areas and of nodes that ask a second time have each their own.

    Args:
        sigmas: of the run, N + 1.
    """

    def __init__(self, guider: Any, caching: BlockCaching, sigmas: Sequence[float]) -> None:
        self._guider, self._caching = guider, caching
        self._network = guider.model_patcher.model.diffusion_model
        self._sigmas, self._sigma = list(sigmas[:-1]), math.inf
        self._conditions: Hashable = None
        self._step: int | None = None
        self._make: MakeCall | str | None = None
        self._kept: dict[Hashable, _Kept] = {}
        self._asked: Counter[Hashable] = Counter()
        self._reused, self._computed, self._reasons = 0, 0, Counter[str]()

    @contextmanager
    def step(self, sigma: float, conditions: Hashable, model_options: dict[str, Any]) -> Iterator[None]:
        """Meanwhile a step is computed.

        Args:
            conditions: see `StepConditions`; where they change, nothing before is reused.
            model_options: that its calls are given.
        """
        from comfy.patcher_extension import WrappersMP

        self._begin(sigma, conditions)
        wrappers = wrappers_of(model_options, WrappersMP.APPLY_MODEL)
        put_around_ours(wrappers, BLOCK_CACHE, self._call)
        try:
            yield
        finally:
            wrappers.pop(BLOCK_CACHE, None)

    def _begin(self, sigma: float, conditions: Hashable) -> None:
        if sigma >= self._sigma or conditions != self._conditions:
            self._kept.clear()
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._asked_keys}
        self._sigma, self._conditions, self._step = sigma, conditions, step_of(self._sigmas, sigma)
        self._asked.clear()

    @property
    def _asked_keys(self) -> set[Hashable]:
        """Of the calls in the step that was computed last."""
        return {(call, place) for call, count in self._asked.items() for place in range(count)}

    def forget(self) -> None:
        """Free all tensors."""
        self._kept.clear()
        self._make = None

    def __str__(self) -> str:
        calls = self._reused + self._computed + self._reasons.total()
        reasons = "".join(f"; computed whole: {why} ({count})" for why, count in self._reasons.items())
        return f"{self._caching}: {self._reused} of {calls} calls of the model reused blocks{reasons}"

    def _call(self, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        options = given.get("transformer_options") or {}
        make = self._make_for(executor.class_obj.diffusion_model, options, given.get("control"))
        if isinstance(make, str):
            return self._whole(make, executor, args, kwargs)
        x = next(iter(given.values()))
        call = (*options["uuids"], *options.get("cond_or_uncond", ())), tuple(x.shape), x.dtype, x.device
        key = call, self._asked[call]
        self._asked[call] += 1
        before = self._kept.pop(key, None)
        may_reuse = before is not None and before.reuses < self._caching.most_reuses and not self._is_at_an_end
        one = make(before.what if before is not None and may_reuse else None)
        options[BLOCK_CACHE] = one
        try:
            with nullcontext() if are_led(options) else one.leading():
                result: torch.Tensor = executor(*args, **kwargs)
        finally:
            options.pop(BLOCK_CACHE, None)
        if one.is_reused and before is not None:
            self._reused += 1
            before.reuses += 1
            self._kept[key] = before
        elif (kept := one.kept) is not None:
            self._computed += 1
            self._kept[key] = _Kept(kept)
        else:
            self._count(one.why_none)
        return result

    @property
    def _is_at_an_end(self) -> bool:
        return self._step is None or self._step < FIRST_STEPS or self._step == len(self._sigmas) - 1

    def _make_for(self, network: Any, options: Mapping[str, Any], control: Any) -> MakeCall | str:
        """What makes this call; or why it is computed as without a cache."""
        if self._make is None:
            self._make = self._find()
        if isinstance(self._make, str):
            return self._make
        if network is not self._network:
            return ON_ANOTHER_GPU
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return "gradients are asked for"
        if control is not None:
            return "a ControlNet takes part"
        if reason := why_not_these_options({name: each for name, each in options.items() if name != OVERRIDE}):
            return reason
        if unknown := sorted(options.keys() - _KNOWN_OPTIONS):
            return f"the model is told {unknown[0]!r}, which may change what its blocks give"
        return self._make if options.get("uuids") else "it is not told which prompts the call is for"

    def _find(self) -> MakeCall | str:
        """Not before the first call: only then is it known what changes the model."""
        if reason := why_not_this_run(self._guider.model_patcher, self._guider.model_options):
            return reason
        try:
            return cached_calls(self._network, self._caching)
        except UnsupportedModel as error:
            return str(error)

    def _whole(self, reason: str, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._count(reason)
        result: torch.Tensor = executor(*args, **kwargs)
        return result

    def _count(self, reason: str) -> None:
        if not self._reasons[reason]:
            log.info("Slipstream: no blocks are reused where %s", reason)
        self._reasons[reason] += 1
