"""TensorRT as one of several backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxscript", reason="no onnxscript")
pytest.importorskip("tensorrt_rtx_bindings", reason="no TensorRT-RTX")

from slipstream.core.environment import Environment
from slipstream.core.errors import BuildFailed
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import BuildJob
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import BackendConfig, EngineSpec, Optimize, Precision, Role
from slipstream.tests.fakes import CPU, FakeArchitecture, Untraceable
from slipstream.trt_backend import TensorRTBackend


def test_what_tensorrt_cannot_do_leaves_the_model_to_others(tmp_path: Path) -> None:
    """A model that is unsupported would end the chain; only this backend fails."""
    backend = TensorRTBackend()
    shapes = {"x": (2, 4, 8, 8), "timesteps": (2,), "context": (2, 3, 5)}
    config = BackendConfig(backend.name, backend.options(CPU, Precision.FP32, Optimize.BALANCED))
    spec = EngineSpec(
        Role.UNET,
        FakeArchitecture().fingerprint,
        ShapeProfile.static(shapes),
        dict.fromkeys(shapes, "float32"),
        "float32",
        Precision.FP32,
        Optimize.BALANCED,
        config,
    )
    job = BuildJob(tmp_path, spec, Untraceable(), CPU, Environment.current(CPU))
    with pytest.raises(BuildFailed, match="branches on its data"):
        backend.build(job, ignore_progress)


def test_what_shapes_a_plan_is_in_its_options_and_environment() -> None:
    backend = TensorRTBackend()
    levels = (Optimize.FAST_BUILD, Optimize.BALANCED, Optimize.MAX)
    options = [backend.options(CPU, Precision.FP16, level) for level in levels]
    assert len({option["level"] for option in options}) == 3
    assert {"opset", "stripped", "surgery", "recipe", "aux_streams"} <= set(options[0])
    (version,) = backend.environment(CPU).versions.values()
    assert version.startswith("1.")


def test_a_cpu_gets_no_engine_and_is_told_why() -> None:
    reason = TensorRTBackend().why_unavailable(torch.device("cpu"))
    assert reason is not None and "NVIDIA GPUs only" in reason
