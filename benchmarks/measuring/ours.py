"""Our engines as the name of a variant asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...compile_backend import AOTInductorBackend
from ...compile_backend.inductor.options import JOINED_PERCENT, OURS, REWRITES
from ...core.protocols import Backend
from ...core.spec import Optimize, Precision
from ...engine_cache import EngineStore
from ...runtime.provider import EngineProvider
from ...runtime.settings.model_settings import NUMBERS, BackendChoice, BuildPolicy, Levers, Parallel, Settings
from ...trt_backend import TensorRTBackend
from ...trt_backend.backend import NEEDED
from ..subjects.variants import (
    AS_EXPORTED,
    BAKE,
    ENGINES,
    FAST_BUILD,
    FIRST,
    GRAPH,
    HINT,
    JOINED,
    MAX,
    OF_GRAPHS,
    PARALLEL,
    Variant,
)

_NONE = Levers(hint_once=False, parallel=Parallel.OFF, one_graph=False, first_step=False)
_OPTIMIZE = {MAX: Optimize.MAX, FAST_BUILD: Optimize.FAST_BUILD}
_ON: Mapping[str, Mapping[str, Any]] = {
    HINT: {"hint_once": True},
    PARALLEL: {"parallel": Parallel.ON},
    GRAPH: {"one_graph": True},
    FIRST: {"first_step": True},
}


def provider_of(variant: Variant, store: EngineStore) -> EngineProvider:
    rewritten = next((lever for lever in variant.levers if lever in OF_GRAPHS), None)
    if rewritten is None:
        return EngineProvider(store)
    # What the build process does follows from the options that it is given.
    backend: Backend = _AsExported() if variant.mode == BackendChoice.TENSORRT.value else _Rewritten(rewritten)
    return EngineProvider(store, [backend])


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


class _Rewritten(AOTInductorBackend):
    def __init__(self, lever: str) -> None:
        self._lever = lever

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        usual = super().options(device, precision, optimize)
        if self._lever == AS_EXPORTED:
            return {name: value for name, value in usual.items() if not name.startswith(OURS)}
        return {**usual, JOINED_PERCENT: 100 if self._lever == JOINED else 0} if REWRITES in usual else usual


class _AsExported(TensorRTBackend):
    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return {**super().options(device, precision, optimize), "surgery": NEEDED}
