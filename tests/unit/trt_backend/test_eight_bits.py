"""Feed-forward layers in eight bits: rounded as compiled engines round them, with whatever weights there are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("onnxscript", reason="no onnxscript")

from slipstream.core.eight_bits import DTYPES, quantised, scale_of_rows
from slipstream.core.protocols import Tensors
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import Precision, Quantised
from slipstream.tests.unit.compile_backend.support import relative
from slipstream.tests.unit.trt_backend.support import (
    DYNAMIC,
    STATIC,
    Bench,
    SmallNet,
    error,
    make_inputs,
    make_spec,
    make_weights,
)
from slipstream.trt_backend.export import bytes_of_weights
from slipstream.trt_backend.signature import PlanSignature
from slipstream.trt_backend.weight_map import Part

NEW = ("10.16.1", "11.4.0", "rtx-1.7.1")
BOTH = pytest.mark.parametrize("wanted", list(Quantised))
ROUNDED = ("narrow.weight", "wide.weight")


class Rounded(nn.Linear):
    """What a layer in eight bits computes, in torch."""

    eight_bits: torch.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._rounded(x) @ self._rounded(self.weight).t()
        return y + self.bias

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        scale = scale_of_rows(rows, self.eight_bits)
        return quantised(rows, scale, self.eight_bits).float() * scale


def off(found: Tensors, weights: Tensors, inputs: Tensors, wanted: Quantised) -> float:
    """How far an engine's answer is from one that is rounded in torch."""
    net: Any = SmallNet()
    for layer in (net.wide, net.narrow):
        layer.__class__ = type("Here", (Rounded,), {"eight_bits": DTYPES[wanted]})
    wide = {name: tensor.float() for name, tensor in weights.items()}
    given = {name: tensor.float() for name, tensor in inputs.items()}
    with torch.no_grad():
        return relative(found["out"], torch.func.functional_call(net, wide, (), given)[0])


@BOTH
@pytest.mark.parametrize("release", NEW)
@pytest.mark.parametrize("profile", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_numbers_are_rounded_as_in_compiled_engines(
    release: str, wanted: Quantised, profile: ShapeProfile, tmp_path: Path
) -> None:
    """One engine, whatever the checkpoint's numbers are: nothing was calibrated."""
    bench = Bench(release, tmp_path, make_spec(Precision.FP32, (profile,), wanted))
    engine, inputs = bench.load(), make_inputs(bench.spec)
    for seed, size in enumerate((1.0, 1e-3, 30.0)):
        weights = make_weights(Precision.FP32, seed)
        weights["wide.weight"] = weights["wide.weight"] * size
        weights["narrow.weight"] = weights["narrow.weight"] / size
        engine.update_weights(weights)
        found = engine(**inputs)
        assert off(found, weights, inputs, wanted) < 1e-3 < 2e-3 < error(found, weights, inputs) < 6e-2
    assert bench.script.refits == 3


@BOTH
def test_half_precision(wanted: Quantised, tmp_path: Path) -> None:
    """Numbers that lie between two others go the one way or the other there."""
    bench = Bench("11.4.0", tmp_path, make_spec(Precision.FP16, (STATIC,), wanted))
    engine, inputs, weights = bench.load(), make_inputs(bench.spec), make_weights(Precision.FP16)
    engine.update_weights(weights)
    found = engine(**inputs)
    assert found["out"].dtype == torch.float16
    assert off(found, weights, inputs, wanted) < 0.5 * error(found, weights, inputs) < 3e-2


@BOTH
@pytest.mark.parametrize("size", [0.0, 6e4])
def test_no_row_is_too_small_or_too_large(wanted: Quantised, size: float, tmp_path: Path) -> None:
    """Half precision ends at 65504; a row of zeros has no largest number to be divided by."""
    bench = Bench("11.4.0", tmp_path, make_spec(Precision.FP16, (STATIC,), wanted))
    engine, inputs, weights = bench.load(), make_inputs(bench.spec), make_weights(Precision.FP16)
    weights["narrow.weight"] = weights["narrow.weight"] * 0
    weights["narrow.weight"][:, 0] = 1e-3
    weights["wide.weight"] = weights["wide.weight"] * 0
    weights["wide.bias"] = torch.full_like(weights["wide.bias"], size)
    engine.update_weights(weights)
    found = engine(**inputs)
    assert found["out"].isfinite().all() and error(found, weights, inputs) < 1e-2


@BOTH
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(wanted: Quantised, wrong: float, tmp_path: Path) -> None:
    """Rounded to a number, it would look like an answer."""
    bench = Bench("11.4.0", tmp_path, make_spec(Precision.FP32, (STATIC,), wanted))
    engine, weights = bench.load(), make_weights()
    weights["wide.bias"][3] = wrong
    engine.update_weights(weights)
    assert not engine(**make_inputs(bench.spec))["out"].isfinite().any()


@BOTH
def test_a_lora_changes_numbers_and_scales_together_and_is_taken_back(wanted: Quantised, tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path, make_spec(Precision.FP32, (STATIC,), wanted))
    engine, weights, inputs = bench.load(), make_weights(), make_inputs(bench.spec)
    engine.update_weights(weights)
    plain, saved = engine(**inputs)["out"], weights["wide.weight"].clone()
    entries = {name: source for name, source in bench.graph.weights.items() if source.name == "wide.weight"}
    assert {source.part for source in entries.values()} == set(Part) and len(entries) == 2
    for change in (lambda now: now.add_(0.3 * now.flip(0)), lambda now: now.copy_(saved)):
        bench.script.set_weights.clear()
        change(weights["wide.weight"].data)
        engine.update_weights(weights)
        assert sorted(bench.script.set_weights) == sorted(entries)
        found = engine(**inputs)
        assert off(found, weights, inputs, wanted) < 1e-3
    assert torch.equal(found["out"], plain)


@BOTH
def test_weights_that_are_baked_in(wanted: Quantised, tmp_path: Path) -> None:
    weights = make_weights(seed=3)
    bench = Bench("11.4.0", tmp_path, make_spec(Precision.FP32, (STATIC,), wanted), numbers=weights)
    engine, inputs = bench.load(), make_inputs(bench.spec)
    engine.update_weights(weights)
    assert off(engine(**inputs), weights, inputs, wanted) < 1e-3
    assert not bench.script.set_weights


@BOTH
def test_a_signature_tells_what_a_weight_is(wanted: Quantised, tmp_path: Path) -> None:
    bench = Bench("11.4.0", tmp_path, make_spec(Precision.FP16, (STATIC,), wanted))
    bench.signature.save(tmp_path)
    found = PlanSignature.read(tmp_path).weights
    assert found == bench.graph.weights
    rounded = sorted(source.name for source in found.values() if source.eight_bits and source.part is Part.NUMBERS)
    assert rounded == list(ROUNDED)


@pytest.mark.parametrize("quantised_too", [False, True])
def test_weight_bytes_are_those_of_the_engine(quantised_too: bool, tmp_path: Path) -> None:
    wanted = Quantised.FP8 if quantised_too else None
    graph = Bench("11.4.0", tmp_path, make_spec(Precision.FP16, (STATIC,), wanted)).graph
    laid_out = (source.laid_out(make_weights(Precision.FP16)[source.name]) for source in graph.weights.values())
    assert bytes_of_weights(graph.model, graph.weights) == sum(tensor.nbytes for tensor in laid_out)
