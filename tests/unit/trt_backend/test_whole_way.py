"""From a module to an engine that gives torch's numbers, on every TensorRT."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import IncompatibleEngine
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import Precision
from slipstream.tests.unit.trt_backend.support import (
    DYNAMIC,
    STATIC,
    THREE,
    TOLERANCE,
    Bench,
    error,
    make_inputs,
    make_spec,
    make_weights,
)


@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_static_shapes(release: str, tmp_path: Path, precision: Precision) -> None:
    bench = Bench(release, tmp_path, make_spec(precision))
    engine, weights, inputs = bench.load(), make_weights(precision), make_inputs(bench.spec)
    engine.update_weights(weights)
    found = engine(**inputs)
    assert error(found, weights, inputs) < TOLERANCE[precision]
    assert found["out"].dtype == inputs["x"].dtype


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("size", [(8, 8), (12, 12), (24, 24), (16, 20)])
def test_open_shapes(release: str, tmp_path: Path, batch: int, size: tuple[int, int]) -> None:
    bench = Bench(release, tmp_path, make_spec(profiles=(DYNAMIC,)))
    engine, weights = bench.load(), make_weights()
    engine.update_weights(weights)
    for rows in (batch, 2):  # of one engine, one after the other
        inputs = make_inputs(bench.spec, {"x": (rows, 4, *size), "timesteps": (rows,), "context": (rows, 5, 8)})
        assert error(engine(**inputs), weights, inputs) < 1e-5


def test_several_profiles(release: str, tmp_path: Path) -> None:
    """The largest is used first, and each again after the others."""
    bench = Bench(release, tmp_path, make_spec(profiles=THREE))
    engine, weights = bench.load(), make_weights()
    engine.update_weights(weights)
    for number in (2, 0, 1, 2, 1, 0):
        inputs = make_inputs(bench.spec, THREE[number].opt, seed=number)
        assert error(engine(**inputs), weights, inputs) < 1e-5
    assert [len(build.profiles) for build in bench.script.builds] == [3]
    lent = bench.script.lent
    assert len(lent) == 3 and len({address for address, _ in lent}) == 1, "one context for each shape, in one memory"


def test_a_context_is_kept_for_each_set_of_shapes(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path, make_spec(profiles=THREE))
    engine = bench.load()
    engine.update_weights(make_weights())
    for shapes in (THREE[1].opt, THREE[1].opt, THREE[2].opt, THREE[1].opt):
        engine(**make_inputs(bench.spec, shapes))
    assert len(bench.script.lent) == 2, "no context takes other shapes than its first"


def test_contexts_do_not_pile_up(tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path, make_spec(profiles=(DYNAMIC,)))
    engine = bench.load()
    engine.update_weights(weights := make_weights())
    before = engine.generation
    sizes = [(batch, height) for batch in (1, 2) for height in range(8, 24)]
    for batch, height in sizes:
        shapes = {"x": (batch, 4, height, 12), "timesteps": (batch,), "context": (batch, 5, 8)}
        inputs = make_inputs(bench.spec, shapes)
        assert error(engine(**inputs), weights, inputs) < 1e-5
    assert engine.generation > before, "what was captured of contexts that are gone is void"
    assert len(engine._contexts) < len(sizes)


def test_baked_weights(release: str, tmp_path: Path) -> None:
    weights = make_weights(seed=3)
    bench = Bench(release, tmp_path, numbers=weights)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    engine.update_weights(weights)
    assert error(engine(**inputs), weights, inputs) < 1e-5
    weights["conv.weight"].data[0, 0, 0, 0] += 1  # as hosts do it, unseen by torch
    with pytest.raises(IncompatibleEngine, match="differ from those that are baked .*'conv.weight' and 0 more"):
        engine.update_weights(weights)
    with pytest.raises(IncompatibleEngine, match="no weights"):
        engine(**inputs)
    assert not engine.copies_weights and not bench.script.set_weights
    assert not {"REFIT", "REFIT_INDIVIDUAL", "STRIP_PLAN"} & bench.script.builds[0].flags


def test_inputs_that_are_views(tmp_path: Path) -> None:
    bench = Bench("10.16.1", tmp_path)
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    engine.update_weights(weights)
    inputs["x"] = inputs["x"].contiguous(memory_format=torch.channels_last)
    inputs["context"] = torch.cat([inputs["context"]] * 2, 2)[:, :, 3:11]
    assert not inputs["x"].is_contiguous() and not inputs["context"].is_contiguous()
    assert error(engine(**inputs), weights, inputs) < 1e-5


def test_answers_are_fresh(tmp_path: Path) -> None:
    """Samplers keep what they were given."""
    bench = Bench("10.16.1", tmp_path)
    engine = bench.load()
    engine.update_weights(make_weights())
    first = engine(**make_inputs(bench.spec, seed=1))["out"]
    kept = first.clone()
    second = engine(**make_inputs(bench.spec, seed=2))["out"]
    assert torch.equal(first, kept) and not torch.equal(first, second)


@pytest.mark.parametrize("profiles", [(STATIC,), (DYNAMIC,), THREE], ids=["static", "dynamic", "three"])
def test_a_context_gets_the_memory_that_it_asks_for(
    release: str, tmp_path: Path, profiles: tuple[ShapeProfile, ...]
) -> None:
    bench = Bench(release, tmp_path, make_spec(profiles=profiles))
    engine = bench.load()
    engine.update_weights(make_weights())
    assert engine.device_bytes == bench.graph.weight_bytes, "no context before the first call"
    engine(**make_inputs(bench.spec))
    ((address, size),) = bench.script.lent
    held = engine.device_bytes - bench.graph.weight_bytes
    assert held == max(needed_bytes(each) for each in profiles), "enough for the largest, so that it never moves"
    assert address and size in (None, held)


def needed_bytes(profile: ShapeProfile) -> int:
    """By the fake's formula."""
    return 1001 + 4 * sum(math.prod(axis.max for axis in axes) for axes in profile.inputs.values())
