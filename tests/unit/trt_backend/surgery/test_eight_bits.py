"""Feed-forward layers in eight bits: rounded as compiled engines round them, with whatever weights there are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx", reason="no onnx")
pytest.importorskip("onnxscript", reason="no onnxscript")
pytest.importorskip("onnx_graphsurgeon", reason="no onnx-graphsurgeon")
pytest.importorskip("onnxruntime", reason="no onnxruntime")

import onnx
import torch
from torch import nn

from slipstream.core.eight_bits import DTYPES, LARGEST, quantised, scale_of_rows
from slipstream.core.environment import Environment
from slipstream.core.errors import BuildFailed
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import BuildJob, Tensors
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import Precision, Quantised
from slipstream.tests.tensors import distance
from slipstream.tests.unit.compile_backend.support import SmallArchitecture
from slipstream.tests.unit.trt_backend.support import (
    CPU,
    DYNAMIC,
    STATIC,
    Bench,
    SmallNet,
    as_exported,
    error,
    library_of,
    make_inputs,
    make_spec,
    make_weights,
)
from slipstream.tests.unit.trt_backend.surgery.test_surgery import AREA, BATCH, RUNNABLE, Case, export, random
from slipstream.trt_backend import TensorRTBackend
from slipstream.trt_backend.backend import ALL, NEEDED, _operated
from slipstream.trt_backend.export import bytes_of_weights
from slipstream.trt_backend.signature import PlanSignature
from slipstream.trt_backend.surgery import operate
from slipstream.trt_backend.surgery.weight_map import UNIT, Part

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
        return distance(found["out"], torch.func.functional_call(net, wide, (), given)[0])


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
    """The rest of the model rounds as well, so that numbers come to lie on the other side of a half."""
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
    rounded = sorted(source.name for source in found.values() if source.eight_bits and source.part is Part.WEIGHT)
    assert rounded == list(ROUNDED)


@pytest.mark.parametrize("quantised_too", [False, True])
def test_weight_bytes_are_those_of_the_engine(quantised_too: bool, tmp_path: Path) -> None:
    wanted = Quantised.FP8 if quantised_too else None
    graph = Bench("11.4.0", tmp_path, make_spec(Precision.FP16, (STATIC,), wanted)).graph
    laid_out = (source.laid_out(make_weights(Precision.FP16)[source.name]) for source in graph.weights.values())
    assert bytes_of_weights(graph.model, graph.weights) == sum(tensor.nbytes for tensor in laid_out)


# ------------------------------------------------------------------------------------- which products, and how


@pytest.fixture
def everything_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 1)
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 1)


def in_eight_bits(case: Case, wanted: Quantised, **tuned: tuple[int, ...]) -> tuple[onnx.ModelProto, list[str]]:
    """The graph, and the weights of the layers that were taken."""
    weights = dict(case.weights)
    model, _ = operate(case.model, weights, opset=21, only=RUNNABLE, eight_bits=DTYPES[wanted], tuned=tuned)
    taken = [source.name for source in weights.values() if source.eight_bits and source.part is Part.WEIGHT]
    case.weights = weights
    return model, sorted(taken)


@pytest.mark.usefixtures("everything_gains")
@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_a_layer_reads_is_rounded_once(wanted: Quantised, dtype: torch.dtype) -> None:
    """From fp32, also where the model computes in half precision."""
    layer = nn.Linear(64, 16).to(dtype)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    case = export(layer, x, opset=21)
    model, taken = in_eight_bits(case, wanted)
    layer.__class__ = type("Here", (Rounded,), {"eight_bits": DTYPES[wanted]})
    found, exact = (
        case.run(model, case.weights, x),
        torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()),
    )
    layer.float()
    assert taken == ["weight"]
    assert distance(found.float(), layer(x.float())) < 5e-4 < distance(found.float(), exact)


@pytest.mark.usefixtures("everything_gains")
@BOTH
def test_no_product_exceeds_half_precision(wanted: Quantised) -> None:
    """Looked at inside of the graph: onnxruntime computes more precisely than it says."""
    longest = 15360  # Flux
    assert longest * (LARGEST[DTYPES[wanted]] * UNIT[DTYPES[wanted]]) ** 2 < 65504
    layer = nn.Linear(1024, 16).half()
    x = torch.full((1, 4, 1024), 6e4, dtype=torch.float16)
    case = export(layer, x, opset=21)
    with torch.no_grad():
        layer.weight.fill_(3.0)  # all of them the largest of their row
        case.state = layer.state_dict()
    model, _ = in_eight_bits(case, wanted)
    (product,) = [node.output[0] for node in model.graph.node if node.op_type == "MatMul"]
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info(product, onnx.TensorProto.FLOAT16, (1, 4, 16)))
    found = case.run(model, case.weights, x)
    assert found.isfinite().all() and found.abs().max() > 100


class Many(nn.Module):
    """A layer that gains, and what only looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.twice = nn.Linear(16, 64), nn.Linear(64, 256, bias=False)
        self.left = nn.Parameter(torch.randn(5, 5))
        self.batched = nn.Parameter(torch.randn(2, 16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.own(x) + x @ self.batched + (self.left @ x).repeat(1, 1, 4)
        return self.twice(read) * self.twice(read + 1)


@pytest.mark.usefixtures("everything_gains")
@BOTH
def test_only_features_by_a_weight_of_their_own_are_taken(wanted: Quantised) -> None:
    x = random(2, 5, 16)
    case = export(Many(), x, opset=21)
    model, taken = in_eight_bits(case, wanted)
    assert taken == ["own.weight"], "the others are read twice, have three axes, or stand on the left"
    assert distance(case.run(model, case.weights, x), case.expected) < 0.1


@pytest.mark.usefixtures("everything_gains")
@BOTH
def test_what_two_layers_read_is_rounded_once_for_both(wanted: Quantised) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(16, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.first(x), self.second(x)], -1)

    x = random(2, 5, 16)
    case = export(Two(), x, opset=21)
    model, taken = in_eight_bits(case, wanted)
    assert taken == ["first.weight", "second.weight"]
    assert [node.op_type for node in model.graph.node].count("QuantizeLinear") == 1
    assert distance(case.run(model, case.weights, x), case.expected) < 5e-2


class Modulated(nn.Module):
    """A block of a transformer: many tokens, and one row a sample that says how to change them."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.wide = nn.Linear(64, 256), nn.Linear(64, 256)

    def forward(self, x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return self.wide(x) * self.modulation(vector)[:, None]


@BOTH
@pytest.mark.parametrize("tokens", [4, 32])
def test_of_open_sizes_those_count_that_the_engine_is_tuned_for(
    wanted: Quantised, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 64)
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 2 * 16 * 64 * 256)
    x, vector = random(2, 8, 64), random(2, 64)
    case = export(Modulated(), x, vector, opset=21, dynamic=({0: BATCH, 1: AREA}, {0: BATCH}))
    _, taken = in_eight_bits(case, wanted, **dict(zip(names(case), [(2, tokens, 64), (2, 64)], strict=True)))
    assert taken == (["wide.weight"] if tokens == 32 else [])


def names(case: Case) -> list[str]:
    return [tensor.name for tensor in case.model.graph.input]


# ---------------------------------------------------------------------------------------------------- the backend


@BOTH
@pytest.mark.parametrize("passes", [ALL, NEEDED])
def test_surgery_may_be_left_out(wanted: Quantised, passes: str, everything_gains: None) -> None:
    spec = make_spec(Precision.FP32, (STATIC,), wanted, surgery=passes)
    library, _ = library_of("11.4.0")
    graph, _ = _operated(as_exported(library.opset, spec), library, spec)
    assert set(ROUNDED) <= {source.name for source in graph.weights.values() if source.eight_bits}


@pytest.mark.parametrize(
    ("release", "knows"), [("8.6.1", False), ("10.0.1", False), ("10.16.1", True), ("rtx-1.7.1", True)]
)
def test_older_tensorrts_do_not_compute_so_here(release: str, knows: bool) -> None:
    reason = library_of(release)[0].why_not_in_eight_bits
    assert (reason is None) == knows and (knows or "10.9 and newer do; choose backend compiled" in str(reason))


def test_a_chip_that_cannot_is_named_before_a_library_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend would not help."""
    monkeypatch.setattr("slipstream.trt_backend.backend.find_library", lambda device: library_of("8.6.1")[0])
    spec, backend = make_spec(Precision.FP16, (STATIC,), Quantised.FP8), TensorRTBackend()
    assert "choose backend compiled" in str(backend.why_unsupported(spec))
    monkeypatch.setattr("slipstream.trt_backend.backend.why_not_on", lambda device, wanted: f"{wanted.value} needs Ada")
    assert backend.why_unsupported(spec) == "fp8 needs Ada"


def test_the_card_that_an_engine_is_built_for_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have several."""
    monkeypatch.setattr("slipstream.trt_backend.backend.find_library", lambda device: library_of("11.4.0")[0])
    monkeypatch.setattr("slipstream.trt_backend.backend.why_not_on", lambda device, wanted: f"{device} has no {wanted}")
    spec = make_spec(Precision.FP16, (STATIC,), Quantised.FP8)
    job = BuildJob(tmp_path, spec, SmallArchitecture(SmallNet, outputs=("out",)), CPU, Environment.current(CPU))
    with pytest.raises(BuildFailed, match="cpu has no"):
        TensorRTBackend().build(job, ignore_progress)
    assert not list(tmp_path.iterdir())
