"""Our engines as the name of a variant asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..core.spec import Optimize, Precision
from ..engine_cache import EngineStore
from ..runtime.provider import EngineProvider
from ..runtime.settings import NUMBERS, BackendChoice, BuildPolicy, Levers, Parallel, Settings
from ..trt_backend import TensorRTBackend
from ..trt_backend.backend import NEEDED
from .variants import AS_EXPORTED, BAKE, ENGINES, FAST_BUILD, FIRST, GRAPH, HINT, MAX, PARALLEL, TEXT, Variant

_NONE = Levers(hint_once=False, text_once=False, parallel=Parallel.OFF, one_graph=False, first_step=False)
_OPTIMIZE = {MAX: Optimize.MAX, FAST_BUILD: Optimize.FAST_BUILD}
_ON: Mapping[str, Mapping[str, Any]] = {
    HINT: {"hint_once": True},
    TEXT: {"text_once": True},
    PARALLEL: {"parallel": Parallel.ON},
    GRAPH: {"one_graph": True},
    FIRST: {"first_step": True},
}


def provider_of(variant: Variant, store: EngineStore) -> EngineProvider:
    return EngineProvider(store, [_AsExported()]) if AS_EXPORTED in variant.levers else EngineProvider(store)


def settings_of(variant: Variant, policy: BuildPolicy) -> Settings:
    return Settings(
        backend=BackendChoice(variant.mode),
        precision=next((NUMBERS[lever] for lever in variant.levers if lever in NUMBERS), None),
        optimize=next((_OPTIMIZE[lever] for lever in variant.levers if lever in _OPTIMIZE), Optimize.BALANCED),
        policy=policy,
        bake=BAKE in variant.levers,
        levers=levers_of(variant),
    )


def levers_of(variant: Variant) -> Levers:
    """The product's own and those that are named; behind `engines` only those that are named."""
    levers = _NONE if ENGINES in variant.levers else Levers()
    for name, change in _ON.items():
        if name in variant.levers:
            levers = replace(levers, **change)
    return levers


class _AsExported(TensorRTBackend):
    """What the build process does follows from the options that it is given."""

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return {**super().options(device, precision, optimize), "surgery": NEEDED}
