"""A model and a backend that compile nothing, behind the real command line, runtime and store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slipstream.compile_backend import AOTInductorBackend
from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.core.progress import Progress
from slipstream.core.protocols import Artifact, BoundWeights, BuildJob, Tensors
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.spec import BackendConfig, EngineSpec, ModelFingerprint, Optimize, Precision, Role
from slipstream.engine_cache import EngineKey, Verification
from slipstream.runtime.building.worker_process import Built
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.requests.make_engines import LoadedModel
from slipstream.runtime.settings.model_settings import Resolution

CPU = torch.device("cpu")
WEIGHTS = "b" * 64


def current_key(height: int = 64, **environment: Any) -> EngineKey:
    """The key of an engine for this very machine; `environment` replaces fields of it."""
    backend = AOTInductorBackend()
    profile = ShapeProfile.static({"x": (2, 4, height, 64), "timesteps": (2,)})
    spec = EngineSpec(
        role=Role.UNET,
        fingerprint=ModelFingerprint("a" * 64, "SD15"),
        profile=profile,
        dtypes={"x": "float32", "timesteps": "float32"},
        output_dtype="float32",
        precision=Precision.FP32,
        optimize=Optimize.BALANCED,
        backend=BackendConfig(backend.name, backend.options(CPU, Precision.FP32, Optimize.BALANCED)),
    )
    here = backend.environment(CPU)
    fields = {name: getattr(here, name) for name in here.__dataclass_fields__}
    return EngineKey(spec, type(here)(**{**fields, **environment}))


def current_block_key() -> EngineKey:
    """The key of an engine of blocks for this very machine, for all sizes."""
    backend, size = BlockBackend(), ShapeRange(2, 2, 1 << 17)
    spec = EngineSpec(
        role=Role.BLOCK,
        fingerprint=ModelFingerprint("d" * 64, "SD15 ResBlock 64"),
        profile=ShapeProfile({"x": (size, ShapeRange.exactly(64), size, size)}),
        dtypes={"x": "float32"},
        output_dtype="float32",
        precision=Precision.FP32,
        optimize=Optimize.BALANCED,
        backend=BackendConfig(backend.name, backend.options(CPU, Precision.FP32, Optimize.BALANCED)),
    )
    return EngineKey(spec, backend.environment(CPU))


def verification(error: float) -> Verification:
    return Verification(error, error / 2, 2, "fp32")


class FakeArchitecture:
    role = Role.UNET
    outputs = ("out",)
    fingerprint = ModelFingerprint("c" * 64, "Fake")

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return torch.nn.Identity()

    def random_inputs(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        seed: int,
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in shapes.items()}


class FakeSource:
    """Computes x times its weight."""

    architecture = FakeArchitecture()
    device = CPU
    precision = Precision.FP32
    is_patched = False

    def weights_digest(self) -> str:
        print("a library says hello")  # noqa: T201  as many do; it must not end up among the results
        return WEIGHTS

    def bind(self, precision: Precision) -> BoundWeights:
        return BoundWeights({"scale": torch.tensor(3.0)})

    def eager(self, inputs: Tensors) -> Tensors:
        return {"out": inputs["x"] * 3.0}

    reference = eager


class FakeEngine:
    device_bytes = 0
    generation = 0
    copies_weights = False

    def __init__(self, profile: ShapeProfile, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.profile = profile
        self._alter = alter
        self._weights: Mapping[str, torch.Tensor] = {}

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        return {"out": self._alter(tensors["x"] * self._weights["scale"])}

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: object = None) -> None:
        self._weights = weights

    def release_weights(self) -> None:
        self._weights = {}

    def close(self) -> None: ...


class FakeBackend(AOTInductorBackend):
    """Builds a file of a few bytes.

    Args:
        alter: what its engines do to their results.
    """

    def __init__(self, alter: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> None:
        self.builds = 0
        self._alter = alter

    def why_unavailable(self, device: torch.device) -> str | None:
        return None

    why_cannot_build = why_unavailable

    def run_build(self, job: BuildJob, progress: Callable[[Progress], None], *_: Any, **__: Any) -> Built:
        """In place of a worker process."""
        self.builds += 1
        progress(Progress("compile", 0.5, "compiling 3 operations"))
        time.sleep(0.3)  # long enough to be seen
        (job.directory / "engine.bin").write_text(f"engine {self.builds}")
        return Built(Artifact(job.directory, ("engine.bin",)), {"export": 0.1, "compile": 0.2})

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: Any) -> FakeEngine:
        return FakeEngine(spec.profile, self._alter)


def fake_model() -> LoadedModel:
    def call(resolution: Resolution, batch: int, tokens: int) -> CallShape:
        x = (batch, 4, resolution.height // 8, resolution.width // 8)
        return CallShape((("x", x, torch.float32), ("timesteps", (batch,), torch.float32)))

    return LoadedModel("a host 1.0", FakeSource(), call)
