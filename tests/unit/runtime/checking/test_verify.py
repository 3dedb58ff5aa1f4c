"""Engines are compared with the model before they serve."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.errors import IncompatibleEngine, NotFinite
from slipstream.core.protocols import Artifact
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.spec import EngineSpec, Precision, Quantised
from slipstream.runtime.checking.verify import LIMIT_OF_QUANTISED, LIMITS, check, relative_error, verify
from slipstream.runtime.planning.plan import CallShape, plans
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.fakes import CPU, FakeSource, NullBackend, NullEngine, make_inputs, make_model

NAN, INF = float("nan"), float("inf")


def out(*values: float) -> dict[str, torch.Tensor]:
    return {"out": torch.tensor(values)}


def test_the_error_is_relative_to_the_reference() -> None:
    assert relative_error(out(3.0, 4.0), out(3.0, 4.0)) == 0
    assert relative_error(out(3.3, 4.4), out(3.0, 4.0)) == pytest.approx(0.1)
    assert relative_error(out(0.0, 0.0), out(3.0, 4.0)) == 1


def test_the_error_is_over_all_outputs() -> None:
    wanted = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert relative_error({"a": torch.tensor([3.0]), "b": torch.tensor([9.0])}, wanted) == pytest.approx(1.0)


def test_nothing_but_zeros_is_right_only_as_zeros() -> None:
    assert relative_error(out(0.0), out(0.0)) == 0
    assert relative_error(out(0.5), out(0.0)) == 0.5


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    assert relative_error(out(1.0, bad), out(1.0, 2.0)) == math.inf
    assert relative_error(out(1.0, 2.0), out(1.0, bad)) == math.inf
    assert relative_error(out(1.0, bad), out(1.0, bad)) == math.inf


def test_large_fp16_numbers_do_not_overflow() -> None:
    large = {"out": torch.full((1000,), 6e4, dtype=torch.float16)}
    assert relative_error(large, large) == 0
    assert relative_error({"out": large["out"] / 2}, large) == 0.5


def test_another_shape_is_infinitely_wrong() -> None:
    wanted = {"out": torch.ones(2, 4)}
    assert relative_error({"out": torch.ones(1, 4)}, wanted) == math.inf
    assert relative_error({"out": torch.ones(3, 4)}, wanted) == math.inf


def test_a_missing_output_is_infinitely_wrong() -> None:
    assert relative_error({}, out(1.0)) == math.inf


class Case:
    """An engine, the model it stands for, and what it was built as."""

    def __init__(self, folder: Path, precision: Precision = Precision.FP32, quantised: Quantised | None = None) -> None:
        self.backend = NullBackend()
        self.source = FakeSource(make_model(), precision)
        dtype = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
        call = CallShape.of(make_inputs(dtype=dtype[precision]))
        (plan,) = plans(self.source.architecture, call, precision, CPU, Settings(precision=quantised), [self.backend])
        self.spec: EngineSpec = plan.spec
        (folder / "engine.txt").write_text("null")
        self.engine: NullEngine = self.backend.load(plan.spec, ("out",), Artifact(folder, ("engine.txt",)), CPU)
        self.engine.update_weights(self.source.bind(precision).tensors)

    def verify(self, **changes: Any) -> Any:
        return verify(self.engine, self.source, self.spec, **changes)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_a_right_engine(case: Case) -> None:
    result = case.verify(driver="570.1")
    assert (result.relative_error, result.eager_error, result.note) == (0, 0, "")
    assert (result.cases, result.driver, result.precision) == (2, "570.1", "fp32")


def test_several_inputs_are_tried(case: Case) -> None:
    seen: list[torch.Tensor] = []
    eager = case.source.eager
    case.source.eager = lambda inputs: seen.append(inputs["timesteps"]) or eager(inputs)  # type: ignore[method-assign]
    case.verify()
    assert len(seen) == 2 and not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("precision", list(Precision))
def test_just_within_and_just_beyond_the_limit(tmp_path: Path, precision: Precision) -> None:
    case = Case(tmp_path, precision)
    case.backend.error = 0.5 * LIMITS[precision]
    assert case.verify().relative_error < LIMITS[precision]
    case.backend.error = 2 * LIMITS[precision]
    with pytest.raises(IncompatibleEngine, match=r"differs from the model by .* delete it and build again"):
        case.verify()


@pytest.mark.parametrize("quantised", list(Quantised))
@pytest.mark.parametrize("precision", list(Precision))
def test_a_quantised_engine_may_be_further_off(tmp_path: Path, precision: Precision, quantised: Quantised) -> None:
    case = Case(tmp_path, precision, quantised)
    case.backend.error = 0.9 * LIMIT_OF_QUANTISED
    known = case.verify()
    assert known.relative_error > LIMITS[precision]
    check(case.engine, case.source, case.spec, known)
    case.backend.error = 1.1 * LIMIT_OF_QUANTISED
    told = rf"\(allowed: 5 %\) and is not used; {quantised.value} is too coarse .*: set precision to auto"
    with pytest.raises(IncompatibleEngine, match=told):
        case.verify()


def test_a_quantised_engine_that_was_right_may_be_as_far_off_from_the_plain_model(tmp_path: Path) -> None:
    """Also where it was closer when it was built: the limit is that of its numbers."""
    case = Case(tmp_path, Precision.FP16, Quantised.FP8)
    known = replace(case.verify(), relative_error=0.0, eager_error=0.0)
    case.backend.error = 0.9 * LIMIT_OF_QUANTISED
    check(case.engine, case.source, case.spec, known)
    with pytest.raises(IncompatibleEngine, match="allowed: 2 %"):
        check(case.engine, case.source, replace(case.spec, quantised=None), known)
    case.backend.error = 1.1 * LIMIT_OF_QUANTISED
    with pytest.raises(IncompatibleEngine, match="allowed: 5 %"):
        check(case.engine, case.source, case.spec, known)


def test_a_quantised_engine_that_is_not_finite_says_what_to_choose(tmp_path: Path) -> None:
    case = Case(tmp_path, Precision.FP16, Quantised.INT8)
    case.backend.error = NAN
    with pytest.raises(NotFinite, match="Where int8 does not do for this model, set precision to auto"):
        case.verify()


def test_an_error_far_above_eagers_is_noted(case: Case) -> None:
    case.backend.error = 5e-5
    assert case.verify().note.startswith("0.005 % off fp32")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_an_engine_that_is_not_finite_is_refused(case: Case, bad: float) -> None:
    case.backend.error = bad
    with pytest.raises(NotFinite, match="computes NaN or Inf where the model in fp32 does not"):
        case.verify()


def test_a_model_that_is_not_finite_verifies_nothing(case: Case) -> None:
    case.source.model.scale.fill_(NAN)
    case.engine.update_weights(case.source.bind(Precision.FP32).tensors)
    with pytest.raises(IncompatibleEngine, match="The model itself computes NaN or Inf, in fp32 too"):
        case.verify()


@pytest.mark.parametrize(("precision", "change"), [(Precision.FP32, 1e-3), (Precision.FP16, 1.2e-2)])
def test_a_loaded_model_that_others_changed_verifies_nothing(
    tmp_path: Path, precision: Precision, change: float
) -> None:
    """By less than an engine may be off."""
    case = Case(tmp_path, precision)
    eager = case.source.eager
    case.source.eager = lambda inputs: {"out": (1 + change) * eager(inputs)["out"]}  # type: ignore[method-assign]
    with pytest.raises(IncompatibleEngine, match="the loaded model computes something else than the code"):
        case.verify()


def test_a_known_engine_that_is_further_off_than_it_was_is_verified_again(tmp_path: Path) -> None:
    case = Case(tmp_path, Precision.FP16)
    known = case.verify()
    assert check(case.engine, case.source, case.spec, known)
    eager = case.source.eager
    case.source.eager = lambda inputs: {"out": 1.012 * eager(inputs)["out"]}  # type: ignore[method-assign]
    assert not check(case.engine, case.source, case.spec, known)


def test_eager_that_overflows_is_no_fault_of_the_engine(case: Case) -> None:
    case.source.eager = lambda inputs: {"out": inputs["x"] * INF}  # type: ignore[method-assign]
    result = case.verify()
    assert (result.relative_error, result.eager_error) == (0, None)


def test_every_corner_of_a_profile_is_tried(case: Case) -> None:
    wide = {name: tuple(map(ShapeRange.exactly, shape)) for name, shape in case.spec.profile.opt.items()}
    for name in wide:
        wide[name] = (ShapeRange(1, 2, 3), *wide[name][1:])
    profile = ShapeProfile(wide)
    spec = EngineSpec(**{**vars(case.spec), "profile": profile})
    case.engine.profile = profile
    assert verify(case.engine, case.source, spec).cases == 6


def test_every_profile_is_tried_and_no_shape_twice(case: Case) -> None:
    wide = {name: (ShapeRange(1, 2, 3), *axes[1:]) for name, axes in case.spec.profile.inputs.items()}
    spec = replace(case.spec, more_profiles=(ShapeProfile(wide),))
    case.engine.more_profiles = spec.more_profiles
    case.engine.batches.clear()
    assert verify(case.engine, case.source, spec).cases == 6
    assert case.engine.batches == [2, 2, 1, 1, 3, 3]
