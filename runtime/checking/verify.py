"""Does an engine compute what the model computes? Asked before it serves a picture."""

from __future__ import annotations

import math

import torch

from ...core.dtypes import input_dtypes
from ...core.errors import IncompatibleEngine, NotFinite
from ...core.formatting import say_share
from ...core.protocols import Engine, ModelSource, Tensors
from ...core.shapes import Shape
from ...core.spec import EngineSpec, Precision, Quantised
from ...engine_cache import Verification
from ..planning.fp16_overflow import ADVICE
from .rounding_switches import exact_fp32

LIMITS = {Precision.FP32: 1e-4, Precision.FP16: 2e-2, Precision.BF16: 2e-2}
"""Largest relative error ‖engine − fp32‖ / ‖fp32‖ with which an engine may serve."""

LIMIT_OF_QUANTISED = 5e-2
"""The same for an engine whose large linear layers multiply in 8 bits."""

ROUNDING = {Precision.FP32: 1e-4, Precision.FP16: 5e-3, Precision.BF16: 2e-2}
"""Relative error of the loaded model against the fp32 reference that rounding explains."""

_FINER = "set precision to auto"
_SEEDS = (20260, 20261)
_LEAST_OF_REFITTED = 1e-3


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
    """Compare engine, host's module and fp32 on fresh random inputs, at every corner of its profiles.

    The host's module is the loaded one, with all that other extensions did to it.

    Args:
        driver: the GPU's, for the record.

    Raises:
        IncompatibleEngine: the engine is wrong, or the loaded model is none that engines are made from, or computes
            NaN itself; NotFinite: the engine is not finite where fp32 is.
    """
    worst = worst_eager = worst_live = 0.0
    cases = 0
    for shapes in _corners(spec):
        for seed in _SEEDS:
            error, eager, live = _one_case(engine, source, spec, shapes, seed)
            worst, worst_eager, cases = max(worst, error), max(worst_eager, eager), cases + 1
            worst_live = max(worst_live, live)
    limit = _limit(spec, worst_eager)
    if worst > limit:
        raise IncompatibleEngine(
            f"The engine for {spec.describe()} differs from the model by {say_share(worst)} "
            f"(allowed: {say_share(limit)}) and is not used; {_what_to_do(spec)}"
        )
    if math.isfinite(worst_live) and worst_live > (allowed := max(ROUNDING[source.precision], 3 * worst)):
        raise IncompatibleEngine(
            f"The engine for {spec.describe()} is not used: the loaded model computes something else than the code "
            f"that the engine is made of ({say_share(worst_live)} apart, allowed: {say_share(allowed)}); another "
            "extension changed it"
        )
    close = worst <= max(2 * worst_eager, 1e-5)
    note = "" if close else f"{say_share(worst)} off fp32, your model itself {say_share(worst_eager)}"
    eager_error = worst_eager if math.isfinite(worst_eager) else None
    return Verification(worst, eager_error, cases, spec.precision.value, driver, note=note)


def limit_of(precision: Precision, quantised: Quantised | None) -> float:
    """The largest relative error with which an engine of this precision may serve."""
    return LIMITS[precision] if quantised is None else max(LIMITS[precision], LIMIT_OF_QUANTISED)


def limit_of_spec(spec: EngineSpec) -> float:
    """See `limit_of`."""
    return limit_of(spec.precision, spec.quantised)


def _what_to_do(spec: EngineSpec) -> str:
    """Advice about an engine whose error is above the limit."""
    if spec.quantised is not None:
        return f"{spec.precision_name} is too coarse for this model: {_FINER}"
    return (
        "delete it and build again. Where that does not help, an extension may change how the model computes; else "
        "report this with your torch version"
    )


def _corners(spec: EngineSpec) -> list[dict[str, Shape]]:
    """The smallest, tuned and largest shapes of every profile, each once."""
    found = [shapes for profile in spec.profiles for shapes in profile.corners()]
    return [shapes for index, shapes in enumerate(found) if shapes not in found[:index]]


def check(
    engine: Engine, source: ModelSource, spec: EngineSpec, known: Verification, *, refitted: bool = False
) -> bool:
    """Is a verified engine still what the host's module computes in this process? One call of each.

    The host's module is the loaded one, with all that other extensions did to it.

    Args:
        known: what `verify` found.
        refitted: the engine has copied other weights since, which may be what went wrong.

    Returns:
        Whether it is as close as it was; where it is not, `verify` has to say why.

    Raises:
        IncompatibleEngine: it is not; NotFinite: it is not finite where the model is.
    """
    inputs = tuned_inputs(source, spec)
    with torch.no_grad():
        wanted = _finite_answer(source, inputs)
        if wanted is None:
            return True  # nothing to compare with
        found = engine(**inputs)
    if not is_finite(found):
        raise _not_finite(spec)
    error = relative_error(found, wanted)
    limit = _limit_of_refitted(known) if refitted else _limit_of_known(spec, source, known)
    if error > limit:
        causes = "another extension changed how the model computes"
        if refitted:
            causes += ", or the model's weights did not reach the engine. It is loaded anew once; where that does not "
            causes += "help, delete it and build again"
        raise IncompatibleEngine(
            f"The engine for {spec.describe()} was right when it was built, but differs from the model by "
            f"{say_share(error)} now (allowed: {say_share(limit)}) and is not used: {causes}"
        )
    return error <= max(ROUNDING[source.precision], 2 * _both_errors(known))


def _limit_of_known(spec: EngineSpec, source: ModelSource, known: Verification) -> float:
    """The limit allows for both errors: engine and model may deviate from the fp32 reference in opposite directions."""
    return max(limit_of_spec(spec), LIMITS[source.precision], 2 * _both_errors(known))


def _limit_of_refitted(known: Verification) -> float:
    """A tight limit: a LoRA of little effect that did not reach the engine must be noticed."""
    return max(_LEAST_OF_REFITTED, 4 * _both_errors(known))


def _both_errors(known: Verification) -> float:
    return known.relative_error + (known.eager_error or 0)


def _finite_answer(source: ModelSource, inputs: Tensors) -> Tensors | None:
    """The output of the host's model; the fp32 reference where that overflows; None where neither is finite."""
    if is_finite(answer := source.eager(inputs)):
        return answer
    with exact_fp32():
        answer = source.reference(inputs)
    return answer if is_finite(answer) else None


def is_finite(answer: Tensors) -> bool:
    """Whether no value in it is NaN or Inf."""
    return all(bool(tensor.isfinite().all()) for tensor in answer.values())


def _not_finite(spec: EngineSpec) -> NotFinite:
    advice = "Delete it and build again; where that does not help, choose another backend and report this"
    if spec.quantised is not None:
        advice = f"Where {spec.precision_name} does not do for this model, {_FINER}"
    elif spec.precision is Precision.FP16:
        advice = ADVICE
    return NotFinite(
        f"The engine for {spec.describe()} computes NaN or Inf where the model in fp32 does not, and is not used. "
        f"{advice}"
    )


def _one_case(
    engine: Engine, source: ModelSource, spec: EngineSpec, shapes: dict[str, tuple[int, ...]], seed: int
) -> tuple[float, float, float]:
    """Relative errors of the engine and of the host's module, and of the latter where nothing is rounded to TF32."""
    inputs = _inputs(source, spec, shapes, seed)
    with torch.no_grad():
        with exact_fp32() as is_otherwise:
            reference = source.reference(inputs)
            live = source.eager(inputs) if is_otherwise and source.precision is Precision.FP32 else None
        eager = relative_error(source.eager(inputs), reference)
        found = engine(**inputs)
    if not is_finite(reference):
        raise IncompatibleEngine(
            f"The model itself computes NaN or Inf, in fp32 too, so the engine for {spec.describe()} cannot be "
            "compared with it and is not used; its file may be damaged, or a LoRA's strength too high"
        )
    if not is_finite(found):
        raise _not_finite(spec)
    return relative_error(found, reference), eager, eager if live is None else relative_error(live, reference)


def _limit(spec: EngineSpec, eager_error: float) -> float:
    """In fp32, a model that computes in TF32 has a larger error itself: an engine may have twice that error."""
    allowed = limit_of_spec(spec)
    is_fp32 = spec.precision is Precision.FP32 and math.isfinite(eager_error)
    return max(allowed, 2 * eager_error) if is_fp32 else allowed


def tuned_inputs(source: ModelSource, spec: EngineSpec) -> Tensors:
    """One call at the shapes that the engine is tuned for."""
    return _inputs(source, spec, spec.profile.opt, _SEEDS[0])


def _inputs(source: ModelSource, spec: EngineSpec, shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    return source.architecture.random_inputs(shapes, input_dtypes(spec), source.device, seed)
