"""TensorRT's graphs in eight bits, without a GPU: computed by onnxruntime, read and built by TensorRT-RTX."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.eight_bits import DTYPES
from slipstream.core.errors import BuildFailed
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import BuildJob, ModelSource
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.spec import Precision, Quantised
from slipstream.hosts.comfy.models.demo_model import load_demo_model
from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.runtime.checking.verify import LIMIT_OF_QUANTISED, relative_error
from slipstream.runtime.planning.embedded_weights import baked
from slipstream.runtime.planning.plan import CallShape, plans
from slipstream.runtime.settings.model_settings import BackendChoice, Settings
from slipstream.tests.comfyui.models.test_rewrites import MODELS, Shapes
from slipstream.tests.comfyui.models.test_tensorrt import (
    FOR_TENSORRT_ALONE,
    NEEDED,
    BuildsHere,
    fixed_weights,
    job_for,
    plan_bytes,
    run_graph,
)
from slipstream.trt_backend import TensorRTBackend
from slipstream.trt_backend.export import export_graph, save_graph
from slipstream.trt_backend.library import Library
from slipstream.trt_backend.signature import PlanSignature
from slipstream.trt_backend.surgery import PASSES, operate

CPU = torch.device("cpu")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")

CHIPS = {Quantised.FP8: ("SM89", "SM120"), Quantised.INT8: ("SM80", "SM120")}
"""The oldest and the newest that compute so."""


@pytest.fixture(autouse=True)
def _small_layers_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 32)
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 1)


def job_of(source: ModelSource, shapes: Shapes, precision: Precision, quantised: Quantised, folder: Path) -> BuildJob:
    job = job_for(source.architecture, ShapeProfile.static(shapes), precision, folder)
    return replace(job, spec=replace(job.spec, quantised=quantised))


def graph_of(job: BuildJob) -> tuple[Any, Any, Counter[str]]:
    exported = export_graph(job, 23)
    weights = dict(exported.weights)
    passes, eight_bits = set(PASSES) - {FOR_TENSORRT_ALONE}, DTYPES[job.spec.quantised]
    tuned = job.spec.profile.opt
    model, _ = operate(exported.model, weights, opset=23, only=passes, eight_bits=eight_bits, tuned=tuned)
    return model, weights, Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    ("name", "precision", "quantised"),
    [
        ("sdxl", Precision.FP16, Quantised.FP8),
        ("sdxl", Precision.FP32, Quantised.INT8),
        pytest.param("sd3", Precision.FP32, Quantised.FP8, marks=pytest.mark.slow),
        ("flux", Precision.FP32, Quantised.INT8),
        pytest.param("pixart", Precision.FP32, Quantised.FP8, marks=pytest.mark.slow),
    ],
)
def test_a_graph_is_near_the_model(
    name: str, precision: Precision, quantised: Quantised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without calibration. Real TensorRT builds a plan of it."""
    source, shapes = MODELS[name]()
    job = job_of(source, shapes, precision, quantised, tmp_path)
    model, weights, kinds = graph_of(job)
    changed = {each.name for each in weights.values() if each.eight_bits}
    read = kinds["QuantizeLinear"]  # once for all layers that read the same
    assert 1 < read <= len(changed) and kinds["DequantizeLinear"] == read + len(changed), kinds
    assert read < len(changed) or name != "sdxl", "its keys and values"
    numbers = {key: tensor.detach() for key, tensor in source.bind(precision).tensors.items()}
    dtypes = {key: getattr(torch, dtype) for key, dtype in job.spec.dtypes.items()}
    inputs = source.architecture.random_inputs(shapes, dtypes, CPU, seed=3)
    with torch.no_grad():
        wanted = source.reference(inputs)
    path = save_graph(model, weights, tmp_path, numbers)
    found = relative_error(run_graph(path, inputs), wanted)
    assert 1e-4 < found < LIMIT_OF_QUANTISED
    marked, _ = operate(model, weights, opset=23, only={FOR_TENSORRT_ALONE})
    path = save_graph(marked, weights, tmp_path, numbers)
    for chip in CHIPS[quantised]:
        monkeypatch.setattr(Library, "target_this_gpu", _for(chip))
        assert plan_bytes(job.spec, path, len(marked.graph.node)) > 0


@pytest.mark.parametrize("quantised", list(Quantised))
def test_tensorrt_lets_every_number_and_scale_be_replaced(quantised: Quantised, tmp_path: Path) -> None:
    """Of a graph without numbers, as it is built for all checkpoints; the build itself needs a GPU."""
    source, shapes = MODELS["sdxl"]()
    model, weights, _ = graph_of(job_of(source, shapes, Precision.FP16, quantised, tmp_path))
    marked, _ = operate(model, weights, opset=23, only={FOR_TENSORRT_ALONE})
    path = save_graph(marked, weights, tmp_path)
    assert fixed_weights(path, weights) == []
    assert len(weights) > len(source.architecture.weight_names), "a layer in eight bits has two"


@pytest.mark.parametrize("quantised", list(Quantised))
def test_tensorrt_builds_what_computes_in_bf16(
    quantised: Quantised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which onnxruntime cannot compute on a CPU."""
    source, shapes = MODELS["flux"]()
    job = job_of(source, shapes, Precision.BF16, quantised, tmp_path)
    model, weights, _ = graph_of(job)
    marked, _ = operate(model, weights, opset=23, only={FOR_TENSORRT_ALONE})
    numbers = {key: tensor.detach() for key, tensor in source.bind(Precision.BF16).tensors.items()}
    path = save_graph(marked, weights, tmp_path, numbers)
    monkeypatch.setattr(Library, "target_this_gpu", _for(CHIPS[quantised][0]))
    assert plan_bytes(job.spec, path, len(marked.graph.node)) > 0


def test_a_range_of_sizes_quantises_the_layers_that_its_first_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SD3's: with all that could be large at some size, layers of a row a sample among them, fp8 was too coarse."""
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 1_000_000)
    source, shapes = MODELS["sd3"]()
    job = job_of(source, shapes, Precision.FP32, Quantised.FP8, tmp_path)
    _, static, _ = graph_of(job)
    ends = [{name: (batch, *shape[1:]) for name, shape in shapes.items()} for batch in (1, shapes["x"][0], 4)]
    ends[2]["x"] = (4, shapes["x"][1], 64, 64)
    ranges = {
        name: tuple(ShapeRange(*sizes) for sizes in zip(*(end[name] for end in ends), strict=True)) for name in shapes
    }
    dynamic_job = replace(job, spec=replace(job.spec, profile=ShapeProfile(ranges)))
    _, dynamic, _ = graph_of(dynamic_job)
    names = [{each.name for each in found.values() if each.eight_bits} for found in (static, dynamic)]
    every = {each.name for each in static.values() if each.name.endswith("weight")}
    assert names[0] == names[1] and 1 < len(names[0]) < len(every) / 2


def _for(chip: str) -> Any:
    def target(library: Library, config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(library.trt.ComputeCapability, chip), 0)

    return target


def built(source: ComfyUNetSource, precision: Precision | Quantised, folder: Path) -> PlanSignature:
    """What TensorRT's backend makes of the demo model in fp16, its weights inside: others need a GPU to be built."""
    settings = Settings(backend=BackendChoice.TENSORRT, precision=precision, bake=True, compute=Precision.FP16)
    shapes = {"x": (2, 4, 32, 32), "timesteps": (2,), "context": (2, 77, source.architecture.config["context_dim"])}
    call = CallShape(tuple((name, shape, torch.float32) for name, shape in shapes.items()))
    (plan,) = plans(source.architecture, call, source.precision, CPU, settings, [BuildsHere()])
    plan = baked(plan, source)
    folder.mkdir()
    assert plan.save_weights is not None
    plan.save_weights(folder / "numbers.safetensors")
    job = BuildJob(folder, plan.spec, source.architecture, CPU, plan.key.environment, folder / "numbers.safetensors")
    artifact = TensorRTBackend().build(job, ignore_progress)
    assert all((folder / name).stat().st_size for name in artifact.files)
    return PlanSignature.read(folder)


def test_a_plan_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are told of as what they take: half as much where they are in eight bits, and their scales."""
    monkeypatch.setattr(Library, "target_this_gpu", _for("SM89"))
    source = ComfyUNetSource(load_demo_model())
    half, eight = (
        built(source, precision, tmp_path / precision.value) for precision in (Precision.FP16, Quantised.FP8)
    )
    weights = source.bind(Precision.FP16).tensors
    feed_forward = [weights[name] for name in weights if ".ff.net." in name and weights[name].ndim == 2]
    saved, scales = sum(map(torch.numel, feed_forward)), 4 * sum(map(len, feed_forward))
    assert feed_forward and half.weight_bytes - eight.weight_bytes == saved - scales
    assert set(half.baked) == set(eight.baked) == set(weights)


def test_a_model_without_such_layers_is_told_what_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 1 << 20)
    source = ComfyUNetSource(load_demo_model())
    with pytest.raises(BuildFailed, match="no linear layer that is faster in fp8 at this size; choose precision auto"):
        built(source, Quantised.FP8, tmp_path / "fp8")


def test_a_chip_without_such_arithmetic_is_told_what_to_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, shapes = MODELS["sdxl"]()
    spec = job_of(source, shapes, Precision.FP16, Quantised.FP8, tmp_path).spec
    assert TensorRTBackend().why_unsupported(spec) is None
    monkeypatch.setattr("slipstream.trt_backend.backend.why_not_on", lambda device, wanted: f"{wanted.value} needs Ada")
    assert TensorRTBackend().why_unsupported(spec) == "fp8 needs Ada"
