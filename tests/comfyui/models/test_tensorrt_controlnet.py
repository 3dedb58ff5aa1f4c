"""ControlNets and models with control as TensorRT graphs and plans, as far as that goes without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.dtypes import input_dtypes
from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import Precision
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.models.controlnet import ComfyControlNetSource
from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.planning.embedded_weights import baked
from slipstream.runtime.planning.plan import CallShape, plans
from slipstream.runtime.settings.model_settings import BackendChoice, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.trt_backend.export import export_graph, save_graph
from slipstream.trt_backend.surgery import PASSES, operate

from .test_tensorrt import (
    CPU,
    FOR_TENSORRT_ALONE,
    MISSING,
    TOLERANCE,
    BuildsHere,
    job_for,
    run_graph,
    store,  # noqa: F401
)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")

Shapes = dict[str, tuple[int, ...]]

COMMON: Shapes = {"x": (2, 4, 16, 24), "timesteps": (2,), "context": (2, 77, 64)}
CONTROLNET: Shapes = {**COMMON, "guided_hint": (1, 32, 16, 24)}
WITH_CONTROL: Shapes = {
    **COMMON,
    "control_output_0_of_4": (2, 32, 16, 24),
    "control_output_1_of_4": (2, 32, 16, 24),
    "control_output_2_of_4": (2, 32, 8, 12),
    "control_output_3_of_4": (2, 64, 8, 12),
    "control_middle_0_of_1": (2, 64, 8, 12),
}
SUBJECTS: dict[str, tuple[Any, Shapes]] = {
    "controlnet": (lambda: ComfyControlNetSource(tiny.controlnet()), CONTROLNET),
    "model with control": (lambda: ComfyUNetSource(tiny.model()), WITH_CONTROL),
}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_graph_computes_what_the_network_computes(name: str, precision: Precision, tmp_path: Path) -> None:
    make, shapes = SUBJECTS[name]
    source = make()
    job = job_for(source.architecture, ShapeProfile.static(shapes), precision, tmp_path)
    exported = export_graph(job, 23)
    weights = dict(exported.weights)
    model, _ = operate(exported.model, weights, opset=23, only=set(PASSES) - {FOR_TENSORRT_ALONE})
    numbers = {name: tensor.detach() for name, tensor in source.bind(precision).tensors.items()}
    path = save_graph(model, weights, tmp_path, numbers)
    inputs = source.architecture.random_inputs(job.spec.profile.opt, input_dtypes(job.spec), CPU, seed=3)
    with torch.no_grad():
        wanted = source.reference(inputs)
    found = run_graph(path, inputs, source.architecture.outputs)
    assert len(wanted) == len(source.architecture.outputs)
    assert relative_error(found, wanted) < TOLERANCE[precision]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_plan_is_built(name: str, store: EngineStore) -> None:  # noqa: F811
    make, shapes = SUBJECTS[name]
    source = make()
    settings = Settings(backend=BackendChoice.TENSORRT, bake=True)
    call = CallShape(tuple((each, shape, torch.float32) for each, shape in shapes.items()))
    (plan,) = plans(source.architecture, call, source.precision, CPU, settings, [BuildsHere()])
    entry = build_engine(baked(plan, source), store, ignore_progress, CancelToken())
    assert entry.manifest.details["nodes"] > 20
    assert entry.bytes > 3 * source.architecture.fingerprint.parameters, "its weights are inside"
