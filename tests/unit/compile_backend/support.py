"""A small model with everything that has ever gone wrong in a compiled one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.core.dtypes import dtype_name, dtype_of
from slipstream.core.placeholder import placeholder_of
from slipstream.core.progress import ignore_progress
from slipstream.core.protocols import Artifact, Backend, BuildJob, Engine, Tensors
from slipstream.core.shapes import ShapeProfile
from slipstream.core.spec import BackendConfig, EngineSpec, ModelFingerprint, Optimize, Precision, Role
from slipstream.tests.tensors import distance

CPU = torch.device("cpu")
SHAPES = {"context": (2, 5, 8), "hint": (1, 4), "timesteps": (2,), "x": (2, 4, 16, 16)}
OUTPUTS = ("out", "aux")
UNUSED = "unused"
TOLERANCE = {Precision.FP32: 1e-5, Precision.FP16: 5e-3, Precision.BF16: 4e-2}


class SmallModel(nn.Module):
    """Convolution, group norm, linear; a parameter of 4 elements, buffers saved and not, and a constant in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.linear = nn.Linear(8, 16)
        self.pointwise = nn.Conv2d(16, 16, 1)
        self.out = nn.Conv2d(16, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(16))
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(
        self, context: torch.Tensor, hint: torch.Tensor, timesteps: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = (timesteps / 1000).to(x.dtype)[:, None] * self.table + self.linear(context).mean(1)
        h = nn.functional.silu(self.norm(self.conv(x))) + embedded[:, :, None, None]
        h = h + nn.functional.silu(self.pointwise(h))
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype, device=x.device)
        out = self.out(h) * (self.gain * scale)[:, None, None] + (hint * self.hidden)[:, :, None, None]
        return out, h.mean((2, 3))


def make_weights(seed: int = 0, precision: Precision = Precision.FP32) -> dict[str, torch.Tensor]:
    """Random ones for every tensor, under the names that a host uses."""
    generator = torch.Generator().manual_seed(seed)
    model = SmallModel()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.5).to(dtype_of(precision)) for name, tensor in named
    }


def used_names() -> list[str]:
    return [name for name in make_weights() if name != UNUSED]


def make_inputs(seed: int = 0, precision: Precision = Precision.FP32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    drawn["timesteps"] = 1000 * drawn["timesteps"].sigmoid()
    return {name: tensor if name == "timesteps" else tensor.to(dtype_of(precision)) for name, tensor in drawn.items()}


def eager(weights: Mapping[str, torch.Tensor], inputs: Tensors) -> Tensors:
    """What the model computes in fp32."""
    wide = {name: tensor.float() for name, tensor in weights.items()}
    with torch.no_grad():
        found = torch.func.functional_call(
            SmallModel(), wide, (), {name: tensor.float() for name, tensor in inputs.items()}
        )
    return dict(zip(OUTPUTS, found, strict=True))


def assert_right(found: Tensors, weights: Mapping[str, torch.Tensor], inputs: Tensors, tolerance: float = 1e-5) -> None:
    wanted = eager(weights, inputs)
    assert list(found) == list(OUTPUTS)
    for name in OUTPUTS:
        assert found[name].shape == wanted[name].shape
        assert distance(found[name], wanted[name]) < tolerance, name


def make_spec(backend: Backend, precision: Precision = Precision.FP32, **changes: Any) -> EngineSpec:
    optimize = Optimize.FAST_BUILD
    dtype = dtype_name(dtype_of(precision))
    fields: dict[str, Any] = {
        "role": Role.UNET,
        "fingerprint": ModelFingerprint("a" * 64, "Small"),
        "profile": ShapeProfile.static(SHAPES),
        "dtypes": {name: "float32" if name == "timesteps" else dtype for name in SHAPES},
        "output_dtype": dtype,
        "precision": precision,
        "optimize": optimize,
        "backend": BackendConfig(backend.name, backend.options(CPU, precision, optimize)),
    }
    return EngineSpec(**{**fields, **changes})


@dataclass(frozen=True)
class SmallArchitecture:
    """What one of the models here computes; `build` makes it."""

    build: Callable[[], nn.Module] = SmallModel
    role: Role = Role.UNET
    outputs: tuple[str, ...] = OUTPUTS
    fingerprint: ModelFingerprint = ModelFingerprint("a" * 64, "Small")

    def placeholder(self, precision: Precision, device: torch.device) -> nn.Module:
        return placeholder_of(self.build, dtype_of(precision), device)

    def random_inputs(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        seed: int,
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.rand(shape, generator=generator).to(dtypes[name]) for name, shape in shapes.items()}


def make_job(
    backend: Backend,
    folder: Path,
    precision: Precision = Precision.FP32,
    build: Callable[[], nn.Module] = SmallModel,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> BuildJob:
    """As a host makes it."""
    dtype = dtype_name(dtype_of(precision))
    dtypes = {name: "float32" if name == "timesteps" else dtype for name in shapes}
    spec = make_spec(backend, precision, profile=ShapeProfile.static(shapes), dtypes=dtypes)
    return BuildJob(folder, spec, SmallArchitecture(build), CPU, backend.environment(CPU))


def with_options(job: BuildJob, **options: Any) -> BuildJob:
    """The same job with other options of the compiler."""
    config = replace(job.spec.backend, options={**job.spec.backend.options, **options})
    return replace(job, spec=replace(job.spec, backend=config))


class Built:
    """An artifact, and engines loaded from it."""

    def __init__(self, backend: Backend, artifact: Artifact, precision: Precision = Precision.FP32) -> None:
        self.backend = backend
        self.artifact = artifact
        self.precision = precision
        self.spec = make_spec(backend, precision)

    def load(self) -> Engine:
        return self.backend.load(self.spec, OUTPUTS, self.artifact, CPU)


def build_here(backend: Backend, folder: Path, precision: Precision = Precision.FP32) -> Built:
    """Without the seconds that a new process takes to import torch."""
    return Built(backend, backend.build(make_job(backend, folder, precision), ignore_progress), precision)
