"""What an engine refuses, and that every refusal of TensorRT's becomes an error."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import IncompatibleEngine, ShapeOutsideProfile
from slipstream.core.protocols import Engine
from slipstream.tests.unit.trt_backend.support import (
    DYNAMIC,
    STATIC,
    THREE,
    Bench,
    error,
    make_inputs,
    make_spec,
    make_weights,
)


def test_it_is_an_engine(release: str, tmp_path: Path) -> None:
    engine = Bench(release, tmp_path).load()
    assert isinstance(engine, Engine)
    assert engine.profile == STATIC and engine.copies_weights


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.zeros(1, 4, 8, 12)}, r"X is 1×4×8×12, the engine takes"),
        ({"x": torch.zeros(2, 4, 8)}, "X has 3 axes, the engine takes 4"),
        ({"context": torch.zeros(2, 6, 8)}, "Context is 2×6×8, the engine takes 2×5×8"),
        ({"hint": torch.zeros(1)}, "Inputs are"),
        (
            {"x": torch.zeros(2, 4, 8, 12, dtype=torch.float16)},
            "x is torch.float16 on cpu, the engine takes torch.float32",
        ),
        ({"x": torch.zeros(2, 4, 8, 12, device="meta")}, "x is torch.float32 on meta, the engine takes .* on cpu"),
        ({"timesteps": torch.zeros(2, dtype=torch.int64)}, "timesteps is torch.int64"),
    ],
)
def test_inputs_that_do_not_fit(tmp_path: Path, change: dict[str, torch.Tensor], why: str) -> None:
    bench = Bench("11.4.0", tmp_path)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    engine.update_weights(make_weights())
    with pytest.raises(ShapeOutsideProfile, match=why):
        engine(**{**inputs, **change})
    engine(**inputs)


def test_a_missing_input(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    engine.update_weights(make_weights())
    del inputs["context"]
    with pytest.raises(ShapeOutsideProfile, match="Inputs are"):
        engine(**inputs)


@pytest.mark.parametrize("profiles", [(DYNAMIC,), THREE], ids=["dynamic", "three"])
def test_sizes_outside_of_every_profile(release: str, tmp_path: Path, profiles: tuple[type[DYNAMIC], ...]) -> None:
    bench = Bench(release, tmp_path, make_spec(profiles=profiles))
    engine = bench.load()
    engine.update_weights(make_weights())
    for batch, side in ((5, 16), (2, 32), (2, 4)):
        inputs = make_inputs(bench.spec, {"x": (batch, 4, side, side), "timesteps": (batch,), "context": (batch, 5, 8)})
        with pytest.raises(ShapeOutsideProfile, match="your model runs this call without Slipstream"):
            engine(**inputs)


def test_a_call_before_the_weights(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, inputs, weights = bench.load(), make_inputs(bench.spec), make_weights()
    with pytest.raises(IncompatibleEngine, match=r"no weights; call update_weights\(\) first"):
        engine(**inputs)
    engine.update_weights(weights)
    engine.release_weights()
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**inputs)
    engine.update_weights(weights)
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_a_closed_engine(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    engine.update_weights(make_weights())
    engine(**inputs)
    engine.close()
    for use in (lambda: engine(**inputs), lambda: engine.update_weights(make_weights())):
        with pytest.raises(IncompatibleEngine, match="was closed; run the workflow again"):
            use()
    engine.close()


def test_the_runtime_lives_as_long_as_its_engine(release: str, tmp_path: Path) -> None:
    """The fake raises where the real one would crash."""
    bench = Bench(release, tmp_path)
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    gc.collect()
    engine.update_weights(weights)
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_a_stripped_plan_does_not_run_by_itself(tmp_path: Path) -> None:
    """As if its weights had been baked in."""
    bench = Bench("11.4.0", tmp_path)
    engine = bench.load(signature=replace(bench.signature, weights={}))
    engine.update_weights({})
    with pytest.raises(RuntimeError, match="could not run its engine: Weights were stripped and never given"):
        engine(**make_inputs(bench.spec))


def test_a_plan_with_other_inputs_than_its_signature(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path)
    signature = replace(bench.signature, inputs={**bench.signature.inputs, "hint": torch.float32})
    with pytest.raises(
        IncompatibleEngine, match="The plan takes .* its signature says .*'hint'.*build the engine again"
    ):
        bench.load(signature=signature)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("set_input_shape", r"take x of \[1, 4, 24, 24\]|take timesteps of \[1\]|take context of \[1, 5, 8\]"),
        ("set_tensor_address", r"take the address of \w+"),
        ("execute_async_v3", "run its engine"),
        ("set_optimization_profile_async", "choose the profile"),
    ],
)
def test_each_refusal_is_an_error_with_tensorrts_words(release: str, tmp_path: Path, method: str, what: str) -> None:
    bench = Bench(release, tmp_path, make_spec(profiles=THREE))
    engine, weights = bench.load(), make_weights()
    engine.update_weights(weights)
    inputs = make_inputs(bench.spec, {"x": (1, 4, 24, 24), "timesteps": (1,), "context": (1, 5, 8)})
    bench.script.refusals[method] = "the card is on fire"
    with pytest.raises(RuntimeError, match=f"TensorRT could not ({what}): the card is on fire"):
        engine(**inputs)
    bench.script.refusals.clear()
    assert error(engine(**inputs), weights, inputs) < 1e-5, "nothing of the failed call is left"


def test_an_error_of_an_earlier_call_is_not_told_again(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    engine.update_weights(make_weights())
    for refused in ("the first reason", "the second reason"):
        bench.script.refusals["execute_async_v3"] = refused
        with pytest.raises(RuntimeError, match=f"could not run its engine: {refused}$"):
            engine(**inputs)


def test_no_memory_for_a_context(release: str, tmp_path: Path) -> None:
    bench = Bench(release, tmp_path)
    engine = bench.load()
    engine.update_weights(make_weights())
    bench.script.refusals["create_execution_context"] = "out of memory"
    with pytest.raises(IncompatibleEngine, match="could not start its engine: out of memory"):
        engine(**make_inputs(bench.spec))


def test_a_refused_shape_is_set_again(tmp_path: Path) -> None:
    """Shapes of which only some were taken are not the ones of the next call."""
    bench = Bench("11.4.0", tmp_path, make_spec(profiles=(DYNAMIC,)))
    engine, weights = bench.load(), make_weights()
    engine.update_weights(weights)
    first, other = make_inputs(bench.spec), make_inputs(bench.spec, DYNAMIC.corners()[2])
    engine(**first)
    bench.script.refusals[f"set_input_shape {list(bench.signature.inputs)[-1]}"] = "no"
    with pytest.raises(RuntimeError, match="no"):
        engine(**other)
    bench.script.refusals.clear()
    for inputs in (first, other):
        assert error(engine(**inputs), weights, inputs) < 1e-5
