"""A model, its host and a backend for tests of the runtime: nothing is compiled, everything is counted."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from slipstream.core.dtypes import dtype_of, input_dtypes
from slipstream.core.environment import Environment
from slipstream.core.errors import IncompatibleEngine, ShapeOutsideProfile, UnsupportedModel
from slipstream.core.placeholder import placeholder_of
from slipstream.core.progress import CancelToken, Progress, ProgressCallback
from slipstream.core.protocols import Artifact, BoundWeights, BuildJob, ModelSource, Tensors
from slipstream.core.shapes import ShapeProfile, profile_for
from slipstream.core.spec import EngineSpec, ModelFingerprint, Optimize, Precision, Role
from slipstream.engine_cache import Entry, digest_tensors
from slipstream.runtime.building.worker_process import Built
from slipstream.runtime.planning.plan import CallShape, Plan, plans
from slipstream.runtime.provider import EngineProvider, HostHooks, Offer
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings

CPU = torch.device("cpu")
FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)
BACKGROUND = Settings(policy=BuildPolicy.BACKGROUND)
MANUAL = Settings(policy=BuildPolicy.MANUAL)


class TinyModel(torch.nn.Module):
    """Every input and every weight shows in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4, 1, 1))
        self.shift = torch.nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor]:
        moved = (timesteps / 1000).to(x.dtype) + context.mean((1, 2))
        return (x * self.scale + self.shift + moved[:, None, None, None],)


def make_model(seed: int = 0) -> TinyModel:
    """A model with random weights."""
    generator = torch.Generator().manual_seed(seed)
    model = TinyModel().requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


def make_inputs(
    size: int = 8, batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, tokens: int = 3
) -> Tensors:
    """A call as a sampler makes it."""
    shapes = {"x": (batch, 4, size, size), "timesteps": (batch,), "context": (batch, tokens, 5)}
    dtypes = {"x": dtype, "timesteps": torch.float32, "context": dtype}
    return FakeArchitecture().random_inputs(shapes, dtypes, CPU, seed)


@dataclass(frozen=True)
class FakeArchitecture:
    """`TinyModel`, under any digest."""

    digest: str = "a" * 64
    role: Role = Role.UNET
    outputs: tuple[str, ...] = ("out",)

    @property
    def fingerprint(self) -> ModelFingerprint:
        return ModelFingerprint(self.digest, "Tiny")

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        return placeholder_of(TinyModel, dtype_of(precision), device)

    def random_inputs(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        seed: int,
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        drawn["timesteps"] = 1000 * drawn["timesteps"].sigmoid()
        return {name: tensor.to(device=device, dtype=dtypes[name]) for name, tensor in drawn.items()}


class Broken(FakeArchitecture):
    """A model whose code raises an error of its own, in two lines."""

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        raise RuntimeError("no such layer\nhere are those that there are")


class Untraceable(FakeArchitecture):
    """A model that the build process gives up."""

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        raise UnsupportedModel("it branches on its data")


class FakeSource:
    """A live `TinyModel` of a host that computes in `precision`.

    Attributes:
        lora: added to every weight.
    """

    def __init__(self, model: torch.nn.Module | None = None, precision: Precision = Precision.FP32) -> None:
        self.model = model or make_model()
        self.architecture = FakeArchitecture()
        self.device = CPU
        self.precision = precision
        self.reference_calls = 0
        self.unavailable: Exception | None = None
        self.lora = 0.0

    @property
    def is_patched(self) -> bool:
        return self.lora != 0

    def weights_digest(self) -> str:
        return digest_tensors(dict(self.model.named_parameters()))

    def bind(self, precision: Precision) -> BoundWeights:
        if self.unavailable is not None:
            raise self.unavailable
        live = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        patched = {name: tensor + self.lora for name, tensor in live.items()} if self.lora else live
        return BoundWeights({name: tensor.to(dtype_of(precision)) for name, tensor in patched.items()})

    def eager(self, inputs: Tensors) -> Tensors:
        return _compute(self.bind(self.precision).tensors, inputs, dtype_of(self.precision))

    def reference(self, inputs: Tensors) -> Tensors:
        self.reference_calls += 1
        return _compute(self.bind(Precision.FP32).tensors, inputs, torch.float32)


def _compute(weights: Mapping[str, torch.Tensor], inputs: Tensors, dtype: torch.dtype) -> Tensors:
    cast = {name: tensor if name == "timesteps" else tensor.to(dtype) for name, tensor in inputs.items()}
    (out,) = torch.func.functional_call(TinyModel(), dict(weights), (), cast)
    return {"out": out}


class NullBackend:
    """Engines that run the module; what goes wrong is set from outside.

    Attributes:
        error: engines are off by this factor; may be NaN.
        content: what is written into the artifact's file.
        load_error: raised by every `load`.
        call_error: raised by every call of an engine.
        device_bytes: that engines seem to hold.
        overflows: precisions in which engines compute infinities.
        overflows_above: the size of inputs x up to which they do not.
        copies_weights: engines keep copies of the weights, and count how often they changed.
        refits: whether weights reach engines that had others before.
        can_bake: engines that contain weights are built, and read them from their own file.
        building: device bytes that a build takes.
        engines: every engine that was loaded.
    """

    def __init__(self, name: str = "null") -> None:
        self.name = name
        self.overflows: set[Precision] = set()
        self.overflows_above = 0.0
        self.copies_weights = False
        self.refits = True
        self.can_bake = False
        self.building = 0
        self.content = name
        self.unavailable: str | None = None
        self.cannot_build: str | None = None
        self.unsupported: str | None = None
        self.driver: str | None = "1.0"
        self.error = 0.0
        self.load_error: BaseException | None = None
        self.call_error: BaseException | None = None
        self.device_bytes = 0
        self.engines: list[NullEngine] = []

    def environment(self, device: torch.device) -> Environment:
        return dataclasses.replace(Environment.current(device), driver=self.driver)

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return {"null": True}

    def why_unavailable(self, device: torch.device) -> str | None:
        return self.unavailable

    def why_cannot_build(self, device: torch.device) -> str | None:
        return self.unavailable or self.cannot_build

    def why_unsupported(self, spec: EngineSpec) -> str | None:
        return self.unsupported

    def build_bytes(self, spec: EngineSpec) -> int:
        return self.building

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        example = job.architecture.random_inputs(job.spec.profile.opt, input_dtypes(job.spec), job.device, seed=0)
        job.architecture.placeholder(job.spec.precision, job.device)(**example)  # as a trace would
        progress(Progress("compile", None, "pretending", 3))
        (job.directory / "engine.txt").write_text(self.content)
        if not job.spec.backend.contains_weights:
            return Artifact(job.directory, ("engine.txt",), {"nodes": 3})
        assert job.weights is not None
        (job.directory / "baked.bin").write_bytes(job.weights.read_bytes())
        return Artifact(job.directory, ("engine.txt", "baked.bin"), {"nodes": 3})

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> NullEngine:
        if self.load_error is not None:
            raise self.load_error
        assert (artifact.directory / "engine.txt").read_text()
        engine = NullEngine(self, spec)
        if spec.backend.contains_weights:
            engine.weights = load_file(artifact.directory / "baked.bin")
        self.engines.append(engine)
        return engine


class NullEngine:
    """Runs the module with the weights it was given, for one caller at a time."""

    def __init__(self, backend: NullBackend, spec: EngineSpec) -> None:
        self.profile: ShapeProfile = spec.profile
        self.more_profiles = spec.more_profiles
        self.batches: list[int] = []
        self.device_bytes = backend.device_bytes
        self.generation = 0
        self.calls = 0
        self.updates = 0
        self.closed = False
        self.weights: dict[str, torch.Tensor] = {}
        self.copies_weights = backend.copies_weights
        self._contains_weights = spec.backend.contains_weights
        self._precision = spec.precision
        self._backend = backend
        self._dtypes = dict(spec.dtypes)
        self._dtype = dtype_of(spec.precision)
        self._busy = threading.Lock()

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        assert not self.closed, "a closed engine was called"
        assert self._busy.acquire(blocking=False), "two callers share an engine"
        try:
            return self._run(tensors)
        finally:
            self._busy.release()

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: object = None) -> None:
        self.updates += 1
        if self._contains_weights:
            if any(not torch.equal(self.weights[name], tensor) for name, tensor in weights.items()):
                raise IncompatibleEngine("the model's weights are others than those that are baked in")
        elif self.copies_weights:
            self._refit(weights)
        else:
            self.generation += 1
            self.weights = dict(weights)

    def _refit(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.weights and all(torch.equal(self.weights[name], tensor) for name, tensor in weights.items()):
            return
        self.generation += 1
        if self._backend.refits or not self.weights:
            self.weights = {name: tensor.clone() for name, tensor in weights.items()}

    def release_weights(self) -> None:
        if not (self.copies_weights or self._contains_weights):
            self.weights = {}

    def close(self) -> None:
        self.closed = True
        self.device_bytes = 0

    def _run(self, tensors: Tensors) -> Tensors:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if profile_for([self.profile, *self.more_profiles], shapes) is None:
            raise ShapeOutsideProfile(str(self.profile.why_not(shapes)))
        self.batches.append(len(tensors["x"]))
        found = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        assert found == self._dtypes
        if not self.weights:
            raise IncompatibleEngine("no weights")
        if self._backend.call_error is not None:
            raise self._backend.call_error
        self.calls += 1
        out = _compute(self.weights, tensors, self._dtype)["out"]
        is_large = bool(tensors["x"].abs().max() > self._backend.overflows_above)
        if self._precision in self._backend.overflows and is_large:
            return {"out": out * float("inf")}
        return {"out": out * (1 + self._backend.error)}


class FakeWorker:
    """Stands in for `worker_process.run_build`: builds in this process, when told to.

    Attributes:
        gate: builds wait until it is set; it is, unless cleared.
        error: raised instead of an artifact.
        builds: how many were begun.
        seconds: that each seems to take.
        expected: what the last build was told of its length.
        jobs: all that were begun.
    """

    def __init__(self, backends: Iterable[NullBackend]) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.error: BaseException | None = None
        self.builds = 0
        self.jobs: list[BuildJob] = []
        self.seconds = 6.0
        self.expected: Callable[[int], float | None] = lambda operations: None

    def __call__(
        self,
        job: BuildJob,
        progress: ProgressCallback,
        cancel: CancelToken,
        *,
        expected: Callable[[int], float | None] = lambda operations: None,
        may_run: Callable[[], bool] = lambda: True,
    ) -> Built:
        self.builds += 1
        self.jobs.append(job)
        self.expected = expected
        progress(Progress("start", 0.0, "starting"))
        self.started.set()
        while not (self.gate.wait(0.01) and may_run()):
            cancel.raise_if_cancelled("The build")
        if self.error is not None:
            raise self.error
        artifact = self._backends[job.spec.backend.name].build(job, progress)
        return Built(artifact, {"export": self.seconds / 3, "compile": 2 * self.seconds / 3})


class Host:
    """A host that has something else to do, or not."""

    idle = True


def make_plan(size: int = 8, backend: NullBackend | None = None, batch: int = 1) -> Plan:
    """A plan of its own for each size."""
    call = CallShape.of(make_inputs(size, batch))
    (plan,) = plans(FakeArchitecture(), call, Precision.FP32, CPU, Settings(), [backend or NullBackend()])
    return plan


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Fails where `condition` does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def ask(
    provider: EngineProvider, source: FakeSource, settings: Settings = FIRST_USE, call: CallShape | None = None
) -> Offer:
    """What a run is offered for a call; by default one of the usual shapes, in the precision of the host."""
    usual = CallShape.of(make_inputs(dtype=dtype_of(source.precision)))
    return provider.offer(source, call or usual, settings, HostHooks())


def build_only(
    provider: EngineProvider, source: ModelSource, settings: Settings = FIRST_USE, call: CallShape | None = None
) -> tuple[Plan, Entry]:
    """An engine on disk, which nobody has loaded or compared with its model yet."""
    plan = provider.plans(source, call or CallShape.of(make_inputs(dtype=dtype_of(source.precision))), settings)[0]
    return plan, provider.wait_for(provider.queue.submit(plan, urgent=True), HostHooks())


def run_once(provider: EngineProvider, source: FakeSource, settings: Settings = FIRST_USE) -> Offer:
    """A run, whose engine goes back afterwards."""
    offer = ask(provider, source, settings)
    if offer.engine is not None:
        provider.pool.give_back(offer.engine)
    return offer


class FakeClock:
    """A device's clock that tests turn; see `runtime.clock`.

    Attributes:
        now: in ms.
        reached: how far the device has got.
        is_capturing: no mark can be had.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = float("inf")
        self.is_capturing = False

    def mark(self) -> float | None:
        return None if self.is_capturing else self.now

    def milliseconds(self, begin: float, end: float) -> float | None:
        return end - begin if end <= self.reached else None
