"""Does an engine compute what the model computes? Asked before it serves a picture."""

from __future__ import annotations

import math

import torch

from ..core.dtypes import input_dtypes
from ..core.errors import IncompatibleEngine
from ..core.protocols import Engine, ModelSource, Tensors
from ..core.spec import EngineSpec, Precision
from ..engine_cache import Verification

LIMITS = {Precision.FP32: 1e-4, Precision.FP16: 2e-2, Precision.BF16: 2e-2}
"""Largest relative error ‖engine − fp32‖ / ‖fp32‖ with which an engine may serve."""

_SEEDS = (20260, 20261)


def relative_error(result: Tensors, reference: Tensors) -> float:
    """‖result − reference‖ / ‖reference‖ over all outputs; infinite where a value is not finite or a shape differs."""
    difference = size = 0.0
    for name, wanted in reference.items():
        found = result.get(name)
        if found is None or found.shape != wanted.shape:
            return math.inf
        wanted = wanted.double()
        difference += (found.double() - wanted).square().sum().item()
        size += wanted.square().sum().item()
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return math.sqrt(difference / size) if size > 0 else math.sqrt(difference)


def verify(engine: Engine, source: ModelSource, spec: EngineSpec, driver: str | None = None) -> Verification:
    """Compare engine, host's module and fp32 on fresh random inputs, at every corner of the profile.

    Args:
        driver: the GPU's, for the record.

    Raises:
        IncompatibleEngine: the engine is wrong, or not finite.
    """
    worst = worst_eager = 0.0
    cases = 0
    for shapes in spec.profile.corners():
        for seed in _SEEDS:
            error, eager = _one_case(engine, source, spec, shapes, seed)
            worst, worst_eager, cases = max(worst, error), max(worst_eager, eager), cases + 1
    limit = LIMITS[spec.precision]
    if worst > limit:
        raise IncompatibleEngine(
            f"The engine for {spec.describe()} differs from the model by {worst:.1e} (allowed: {limit:.0e}) "
            "and is not used; delete it and build again. Where that does not help, an extension may change how the "
            "model computes; else report this with your torch version"
        )
    close = worst <= max(2 * worst_eager, 1e-5)
    note = "" if close else f"error {worst:.1e}, the plain model's is {worst_eager:.1e}"
    eager_error = worst_eager if math.isfinite(worst_eager) else None
    return Verification(worst, eager_error, cases, spec.precision.value, driver, note=note)


def check(engine: Engine, source: ModelSource, spec: EngineSpec) -> None:
    """Is a verified engine still what the host's module computes in this process? One call of each.

    Raises:
        IncompatibleEngine: it is not.
    """
    inputs = _inputs(source, spec, spec.profile.opt, _SEEDS[0])
    with torch.no_grad():
        wanted = source.eager(inputs)
        if not all(tensor.isfinite().all() for tensor in wanted.values()):
            return  # nothing to compare with
        error = relative_error(engine(**inputs), wanted)
    limit = max(LIMITS[spec.precision], LIMITS[source.precision])
    if error > limit:
        raise IncompatibleEngine(
            f"The engine for {spec.describe()} was right when it was built, but differs from the model by {error:.1e} "
            f"now (allowed: {limit:.0e}) and is not used: another extension changed how the model computes"
        )


def _one_case(
    engine: Engine, source: ModelSource, spec: EngineSpec, shapes: dict[str, tuple[int, ...]], seed: int
) -> tuple[float, float]:
    inputs = _inputs(source, spec, shapes, seed)
    with torch.no_grad():
        reference = source.reference(inputs)
        eager = relative_error(source.eager(inputs), reference)
        return relative_error(engine(**inputs), reference), eager


def _inputs(source: ModelSource, spec: EngineSpec, shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    return source.architecture.random_inputs(shapes, input_dtypes(spec), source.device, seed)
