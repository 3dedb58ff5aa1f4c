"""TensorRT as far as it goes without a GPU: real graphs of ComfyUI's models, and plans built by TensorRT-RTX.

What runs on a GPU is in `test_gpu.py`.
"""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.dtypes import dtype_name, dtype_of, input_dtypes
from slipstream.core.environment import Environment
from slipstream.core.errors import BuildCancelled, CorruptEngine
from slipstream.core.progress import CancelToken, Progress, ignore_progress
from slipstream.core.protocols import Architecture, BuildJob
from slipstream.core.shapes import Shape, ShapeProfile, ShapeRange
from slipstream.core.spec import BackendConfig, EngineSpec, Optimize, Precision
from slipstream.engine_cache import EngineStore, Entry
from slipstream.hosts.comfy.models.autoencoders import HALVES, Half
from slipstream.hosts.comfy.models.demo_model import load_demo_model
from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.hosts.comfy.models.vae import open_vae, vae_call
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.planning.embedded_weights import baked
from slipstream.runtime.planning.plan import CallShape, Plan, plans
from slipstream.runtime.settings.model_settings import BackendChoice, Resolution, Settings, ShapeChoice
from slipstream.tests.comfyui.support.models import tiny
from slipstream.trt_backend import TensorRTBackend
from slipstream.trt_backend.build import PlanBuilder
from slipstream.trt_backend.export import export_graph, save_graph
from slipstream.trt_backend.library import find_library
from slipstream.trt_backend.surgery import PASSES, operate
from slipstream.trt_backend.surgery.weight_map import WeightMap
from slipstream.trt_backend.timing_cache import TimingCache

CPU = torch.device("cpu")
NEEDED = ("onnx", "onnxscript", "onnx_graphsurgeon", "onnxruntime", "tensorrt_rtx_bindings")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")

FOR_TENSORRT_ALONE = "mark_attention_decomposable"
"""An attribute that no other reader of ONNX knows."""
TOLERANCE = {Precision.FP32: 2e-6, Precision.FP16: 2e-3}


# ---------------------------------------------------------------------------------------------------- the graph


def shapes_of(source: ComfyUNetSource, batch: int, height: int, width: int, tokens: int) -> dict[str, Shape]:
    config = source.architecture.config
    pooled = {"y": (batch, config["adm_in_channels"])} if config.get("adm_in_channels") else {}
    text = (batch, tokens, config["context_dim"])
    return {"x": (batch, 4, height, width), "timesteps": (batch,), "context": text, **pooled}


def job_of(source: ComfyUNetSource, precision: Precision, directory: Path, dynamic: bool) -> BuildJob:
    tuned = shapes_of(source, 2, 16, 24, 77)
    profile = ShapeProfile.static(tuned)
    if dynamic:
        ends = shapes_of(source, 1, 8, 8, 77), tuned, shapes_of(source, 2, 32, 32, 154)
        profile = ShapeProfile(
            {
                name: tuple(ShapeRange(*sizes) for sizes in zip(*(end[name] for end in ends), strict=True))
                for name in tuned
            }
        )
    return job_for(source.architecture, profile, precision, directory)


def job_for(architecture: Architecture, profile: ShapeProfile, precision: Precision, directory: Path) -> BuildJob:
    dtype = dtype_name(dtype_of(precision))
    dtypes = {name: "float32" if name == "timesteps" else dtype for name in profile.inputs}
    config = BackendConfig("tensorrt", TensorRTBackend().options(CPU, precision, Optimize.BALANCED))
    fingerprint = architecture.fingerprint
    spec = EngineSpec(architecture.role, fingerprint, profile, dtypes, dtype, precision, Optimize.BALANCED, config)
    return BuildJob(directory, spec, architecture, CPU, Environment.current(CPU))


def run_graph(
    path: Path, inputs: dict[str, torch.Tensor], outputs: tuple[str, ...] = ("out",)
) -> dict[str, torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Its fused products of 8-bit integers saturate on CPUs without VNNI.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = session.run(list(outputs), {name: tensor.numpy() for name, tensor in inputs.items()})
    return {name: torch.from_numpy(tensor) for name, tensor in zip(outputs, found, strict=True)}


def plan_bytes(spec: EngineSpec, graph: Path, nodes: int) -> int:
    """Of the plan that TensorRT-RTX builds of a graph with its numbers."""
    builder = PlanBuilder(find_library(CPU), spec, (), TimingCache(None, "none", None), ignore_progress)
    return int(builder.build(graph, nodes).nbytes)


def fixed_weights(graph: Path, weights: WeightMap) -> list[str]:
    """Those of a graph without numbers that TensorRT-RTX, which has to read it, does not let be replaced."""
    library = find_library(CPU)
    builder = library.new_builder()
    network = library.new_network(builder)
    parser = library.trt.OnnxParser(network, library.log.listener)
    assert parser.parse_from_file(str(graph)), library.log.said()
    return library.make_refittable(builder.create_builder_config(), network, weights)


@pytest.mark.parametrize(
    ("family", "precision", "dynamic"),
    [
        pytest.param("sd15", Precision.FP32, True, id="sd15-fp32-dynamic"),
        pytest.param("sd15", Precision.FP16, False, id="sd15-fp16-static"),
        pytest.param("sdxl", Precision.FP32, False, id="sdxl-fp32-static"),
        pytest.param("sdxl", Precision.FP16, True, id="sdxl-fp16-dynamic"),
    ],
)
def test_the_graph_computes_what_the_model_computes(
    family: str, precision: Precision, dynamic: bool, tmp_path: Path
) -> None:
    source = ComfyUNetSource(tiny.model(family))
    job = job_of(source, precision, tmp_path, dynamic)
    exported = export_graph(job, 23)
    weights = dict(exported.weights)
    model, reports = operate(exported.model, weights, opset=23, only=set(PASSES) - {FOR_TENSORRT_ALONE})
    assert {source.name for source in weights.values()} == {
        f"model.{name}" for name in source.architecture.weight_names
    }
    numbers = {name: tensor.detach() for name, tensor in source.bind(precision).tensors.items()}
    path = save_graph(model, weights, tmp_path, numbers)
    for shapes in job.spec.profile.corners():
        inputs = source.architecture.random_inputs(shapes, input_dtypes(job.spec), CPU, seed=3)
        with torch.no_grad():
            wanted = source.reference(inputs)
        assert relative_error(run_graph(path, inputs), wanted) < TOLERANCE[precision]
    kinds = Counter(node.op_type for node in model.graph.node)
    before = Counter(node.op_type for node in exported.model.graph.node)
    assert kinds["Attention"] == before["Attention"] > 0 and kinds["GroupNormalization"] > 0
    assert not kinds["SplitToSequence"] and not kinds["SequenceAt"] and not kinds["Constant"]
    assert kinds.total() < 0.6 * before.total(), reports
    marked, _ = operate(model, weights, opset=23, only={FOR_TENSORRT_ALONE})
    path = save_graph(marked, weights, tmp_path, numbers)
    assert plan_bytes(job.spec, path, len(marked.graph.node)) > exported.weight_bytes
    if dynamic:
        names = {dim.dim_param for tensor in model.graph.input for dim in tensor.type.tensor_type.shape.dim}
        assert names - {""} == {"batch", "height", "width", "tokens"}


def test_a_graph_without_numbers_is_small_and_lets_tensorrt_replace_every_weight(tmp_path: Path) -> None:
    """TensorRT tells weights apart by where they lie. What follows, the build itself, needs a GPU."""
    source = ComfyUNetSource(tiny.model("sd15"))
    exported = export_graph(job_of(source, Precision.FP16, tmp_path, dynamic=False), 23)
    weights = dict(exported.weights)
    model, _ = operate(exported.model, weights, opset=23)
    path = save_graph(model, weights, tmp_path)
    largest = max(tensor.numel() for tensor in source.unet.parameters()) * 2
    written = (tmp_path / "weights.bin").stat().st_size
    assert largest <= written <= largest + 64 * len(weights) < exported.weight_bytes
    assert fixed_weights(path, weights) == []
    assert len(weights) == len(source.architecture.weight_names)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
@pytest.mark.parametrize("half", HALVES.values(), ids=lambda half: half.part)
@pytest.mark.parametrize("make", [tiny.vae, tiny.taesd])
def test_the_graph_of_a_vae_computes_what_the_vae_computes(
    make: Any, half: Half, precision: Precision, tmp_path: Path
) -> None:
    source = open_vae(make(), half)
    profile = ShapeProfile.static(vae_call(source, Resolution(96, 64), batch=1).shapes)
    job = job_for(source.architecture, profile, precision, tmp_path)
    exported = export_graph(job, 23)
    weights = dict(exported.weights)
    model, _ = operate(exported.model, weights, opset=23, only=set(PASSES) - {FOR_TENSORRT_ALONE})
    assert {each.name for each in weights.values()} == {f"model.{name}" for name in source.architecture.weight_names}
    numbers = {name: tensor.detach() for name, tensor in source.bind(precision).tensors.items()}
    path = save_graph(model, weights, tmp_path, numbers)
    inputs = source.architecture.random_inputs(job.spec.profile.opt, input_dtypes(job.spec), CPU, seed=3)
    with torch.no_grad():
        wanted = source.reference(inputs)
    assert relative_error(run_graph(path, inputs), wanted) < TOLERANCE[precision]
    marked, _ = operate(model, weights, opset=23, only={FOR_TENSORRT_ALONE})
    path = save_graph(marked, weights, tmp_path, numbers)
    assert plan_bytes(job.spec, path, len(marked.graph.node)) > exported.weight_bytes


# ---------------------------------------------------------------------------------------------------- the plan


class BuildsHere(TensorRTBackend):
    """Where no GPU is, an engine cannot run, but TensorRT-RTX builds it."""

    def why_unavailable(self, device: torch.device) -> str | None:
        return None


@pytest.fixture(scope="module")
def source() -> ComfyUNetSource:
    return ComfyUNetSource(load_demo_model())


def plan_of(source: ComfyUNetSource, **choices: Any) -> Plan:
    """Of the demo model, its weights inside: without a GPU TensorRT-RTX makes no other plans."""
    settings = Settings(backend=BackendChoice.TENSORRT, precision=Precision.FP16, bake=True, **choices)
    dtype = dtype_of(source.precision)
    inputs = shapes_of(source, 2, 32, 32, 77)
    call = CallShape(
        tuple((name, shape, torch.float32 if name == "timesteps" else dtype) for name, shape in inputs.items())
    )
    (plan,) = plans(source.architecture, call, source.precision, CPU, settings, [BuildsHere()])
    return baked(plan, source)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EngineStore:
    return EngineStore(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def entry(source: ComfyUNetSource, store: EngineStore) -> Entry:
    return build_engine(plan_of(source), store, ignore_progress, CancelToken())


def inside(store: EngineStore) -> list[str]:
    """What lies in the store beside engines and locks."""
    return sorted(path.name for folder in ("tmp", "quarantine") for path in (store.root / folder).glob("*"))


def test_a_plan_is_built_and_found_again(source: ComfyUNetSource, store: EngineStore, entry: Entry) -> None:
    details = entry.manifest.details
    assert details["surgery"]["fold_transposes"] > 0 and details["nodes"] > 100
    assert entry.bytes > sum(tensor.numel() for tensor in source.unet.parameters()), "its weights are inside"
    assert plan_of(source).key.environment.versions["tensorrt-rtx"].startswith("1.")
    said: list[Progress] = []
    again = build_engine(plan_of(source), store, said.append, CancelToken())
    assert again.digest == entry.digest and not said, "nothing was built"
    assert not inside(store)


@pytest.mark.parametrize("half", HALVES.values(), ids=lambda half: half.part)
def test_a_plan_of_a_vae_is_built(half: Half, store: EngineStore) -> None:
    source = open_vae(tiny.vae(), half)
    settings = Settings(backend=BackendChoice.TENSORRT, bake=True)
    call = vae_call(source, Resolution(96, 64), batch=1)
    (plan,) = plans(source.architecture, call, source.precision, CPU, settings, [BuildsHere()])
    entry = build_engine(baked(plan, source), store, ignore_progress, CancelToken())
    assert entry.manifest.details["nodes"] > 20
    assert entry.bytes > 4 * source.architecture.fingerprint.parameters, "its weights are inside"


@pytest.mark.slow
def test_one_of_three_profiles_tells_its_parts_while_it_is_built(source: ComfyUNetSource, store: EngineStore) -> None:
    sizes = (Resolution(128, 128), Resolution(256, 192), Resolution(256, 256))
    said: list[str] = []

    def hear(progress: Progress) -> None:
        said.append(f"{progress.phase}: {progress.message}")

    made = build_engine(plan_of(source, shapes=ShapeChoice.PROFILES, resolutions=sizes), store, hear, CancelToken())
    assert len(made.manifest.factors["spec"]["more_profiles"]) == 2
    assert any(line.startswith("export: ") for line in said) and any(line.startswith("compile: ") for line in said)


def test_one_flipped_byte_is_refused(source: ComfyUNetSource, entry: Entry, tmp_path: Path) -> None:
    import shutil

    copy = EngineStore(tmp_path / "store")
    shutil.copytree(entry.directory, copy.root / "engines" / entry.digest)
    plan = plan_of(source)
    found = copy.lookup(plan.key.digest)
    assert found is not None
    found.verify_files()
    path = found.directory / "engine.plan"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptEngine, match=r"engine\.plan"):
        copy.lookup(plan.key.digest).verify_files()  # type: ignore[union-attr]


def test_a_cancelled_build_leaves_nothing(source: ComfyUNetSource, tmp_path: Path) -> None:
    store, cancel, pressed = EngineStore(tmp_path / "store"), CancelToken(), [0.0]

    def stop(progress: Progress) -> None:
        if progress.phase == "compile" and not cancel.cancelled:  # TensorRT is at work
            pressed[0] = time.monotonic()
            cancel.cancel()

    with pytest.raises(BuildCancelled):
        build_engine(plan_of(source), store, stop, cancel)
    assert time.monotonic() - pressed[0] < 2.0
    assert not store.list() and not inside(store)
