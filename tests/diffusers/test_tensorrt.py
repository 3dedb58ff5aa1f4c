"""The graph that TensorRT gets of a diffusers UNet computes what the UNet computes, in another program."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="no diffusers")

import torch

from slipstream.core.dtypes import input_dtypes
from slipstream.core.environment import Environment
from slipstream.core.protocols import BuildJob, Tensors
from slipstream.core.shapes import Shape, ShapeProfile, ShapeRange
from slipstream.core.spec import BackendConfig, EngineSpec, Optimize, Precision, Role
from slipstream.demo.model import Sizes, unet
from slipstream.hosts.diffusers.source import DiffusersUNetSource
from slipstream.runtime.checking.verify import relative_error
from slipstream.trt_backend.export import export_graph, save_graph
from slipstream.trt_backend.surgery import PASSES, operate

CPU = torch.device("cpu")
NEEDED = ("onnx", "onnxscript", "onnx_graphsurgeon", "onnxruntime")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.diffusers,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"),
]

SIZES = Sizes(channels=32, down_depth=(1, 0), up_depth=(0, 0))
"""The demo model's network, without attention on the way up: tracing is what takes time here."""

FOR_TENSORRT_ALONE = "mark_attention_decomposable"
"""An attribute that no other reader of ONNX knows."""


def shapes_of(batch: int, height: int, width: int, tokens: int) -> dict[str, Shape]:
    latent, text = (batch, SIZES.latent, height, width), (batch, tokens, SIZES.context)
    return {"x": latent, "timesteps": (batch,), "context": text}


STATIC = ShapeProfile.static(shapes_of(2, 8, 12, 77))
_ENDS = (shapes_of(1, 8, 8, 77), shapes_of(2, 8, 12, 77), shapes_of(3, 16, 16, 154))
DYNAMIC = ShapeProfile(
    {
        name: tuple(ShapeRange(*sizes) for sizes in zip(*(end[name] for end in _ENDS), strict=True))
        for name in STATIC.inputs
    }
)


@pytest.fixture(scope="module")
def source() -> DiffusersUNetSource:
    """Every tensor matters: nothing is left at zero or one."""
    torch.manual_seed(1)
    model = unet(SIZES).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return DiffusersUNetSource(model)


def job_of(source: DiffusersUNetSource, profile: ShapeProfile, directory: Path) -> BuildJob:
    dtypes = dict.fromkeys(profile.inputs, "float32")
    fingerprint, config = source.architecture.fingerprint, BackendConfig("tensorrt", {})
    spec = EngineSpec(Role.UNET, fingerprint, profile, dtypes, "float32", Precision.FP32, Optimize.BALANCED, config)
    return BuildJob(directory, spec, source.architecture, CPU, Environment.current(CPU))


@pytest.mark.parametrize(
    "profile", [pytest.param(STATIC, id="static", marks=pytest.mark.slow), pytest.param(DYNAMIC, id="dynamic")]
)
def test_the_graph_computes_what_the_model_computes(
    source: DiffusersUNetSource, profile: ShapeProfile, tmp_path: Path
) -> None:
    import onnxruntime

    job = job_of(source, profile, tmp_path)
    exported = export_graph(job, 23)
    weights = dict(exported.weights)
    model, _ = operate(exported.model, weights, opset=23, only=set(PASSES) - {FOR_TENSORRT_ALONE})
    numbers = source.bind(Precision.FP32).tensors
    assert {weight.name for weight in weights.values()} == set(numbers), "each can be replaced"
    path = save_graph(model, weights, tmp_path, numbers)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(inputs: Tensors) -> Tensors:
        (out,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {"out": torch.from_numpy(out)}

    for shapes in profile.corners():
        inputs = source.architecture.random_inputs(shapes, input_dtypes(job.spec), CPU, seed=3)
        with torch.no_grad():
            wanted = source.eager(inputs)
        assert relative_error(run(inputs), wanted) < 1e-5
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["Attention"] > 0 and kinds["GroupNormalization"] > 0
    names = {dim.dim_param for tensor in model.graph.input for dim in tensor.type.tensor_type.shape.dim} - {""}
    assert names == ({"batch", "height", "width", "tokens"} if profile is DYNAMIC else set())
