"""The ways in which a model is run: `name[+lever…]`, such as `torch.compile:max-autotune+channels_last`."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.progress import Progress
from ..core.protocols import Tensors
from ..core.spec import Optimize, Precision
from ..engine_cache import EngineStore
from ..runtime.measure import load_seconds, versions
from ..runtime.module import AcceleratedModule
from ..runtime.provider import EngineProvider, HostHooks
from ..runtime.settings import BackendChoice, BuildPolicy, Settings
from ..trt_backend import TensorRTBackend
from ..trt_backend.backend import NEEDED
from .cases import Case, Subject

EAGER, EAGER_GRAPH, NODE, COMPILE, OURS = "eager", "eager+graph", "TorchCompileModel", "torch.compile", "slipstream"
CHANNELS_LAST, MAX, BAKE, AS_EXPORTED = "channels_last", "max", "bake", "as-exported"
_MODES = {"": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
_ENGINES = {each.value for each in BackendChoice} - {BackendChoice.AUTO.value, BackendChoice.OFF.value}
_PRECISIONS = {each.value for each in Precision}

USUAL = (
    EAGER, EAGER_GRAPH, NODE, COMPILE, f"{COMPILE}:reduce-overhead", f"{COMPILE}:max-autotune",
    f"{COMPILE}:max-autotune+{CHANNELS_LAST}", f"{OURS}:compiled",
)  # fmt: skip

_WORDS = {
    EAGER: "the model as ComfyUI runs it",
    EAGER_GRAPH: "the same, recorded once as a CUDA graph and replayed, so that the CPU never holds the GPU up",
    NODE: "ComfyUI's own node of this name, which compiles with torch's defaults; timed as sampling calls it",
    COMPILE: "`torch.compile` around the model, in its default mode",
    f"{COMPILE}:reduce-overhead": "`torch.compile` with its own CUDA graphs",
    f"{COMPILE}:max-autotune": "`torch.compile` that tries out kernels for each operation, with its own CUDA graphs",
    f"{OURS}:compiled": "Slipstream's compiled engine, called the way that a picture's calls are",
    f"{OURS}:tensorrt": "Slipstream's TensorRT engine, called the way that a picture's calls are",
}
_LEVER_WORDS = {
    CHANNELS_LAST: "weights and pictures with their channels last in memory",
    MAX: "built with `optimize: max`",
    BAKE: "the weights inside the engine, which cannot take others then",
    AS_EXPORTED: "without the graph surgery that TensorRT can do without",
    **{each: f"computed in {each}" for each in _PRECISIONS},
}


@dataclass(frozen=True)
class Variant:
    """A variant's name, taken apart: kind, mode behind its colon, levers behind its plus signs."""

    name: str
    kind: str
    mode: str
    levers: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> Variant:
        """
        Raises:
            ValueError: there is no such variant.
        """
        if name == EAGER_GRAPH:
            return cls(name, name, "", ())
        base, *levers = name.split("+")
        kind, _, mode = base.partition(":")
        offered = _levers_of(kind, mode)
        if offered is None:
            raise ValueError(f"{name!r} is no variant; there are {', '.join(USUAL)}")
        if strange := [lever for lever in levers if lever not in offered]:
            known = ", ".join(sorted(offered)) or "nothing"
            raise ValueError(f"{name!r}: {strange[0]!r} is not offered behind {base}; there is {known}")
        return cls(name, kind, mode, tuple(levers))

    @property
    def needs_graphs(self) -> bool:
        return self.kind == EAGER_GRAPH or (self.kind == COMPILE and bool(self.mode))

    def with_lever(self, lever: str | None) -> Variant:
        """Of one of our engines; others stay as they are."""
        if lever is None or self.kind != OURS or lever in self.levers:
            return self
        return Variant.of(f"{self.name}+{lever}")

    def why_left_out(self, case: Case, subject: Subject) -> str | None:
        """Why this variant means nothing here; None when it does."""
        if self.needs_graphs and subject.source.device.type != "cuda":
            return "CUDA graphs need a CUDA GPU"
        if self.kind == NODE and subject.patcher is None:
            return "ComfyUI's node compiles diffusion models only"
        if CHANNELS_LAST in self.levers and not case.convolutional:
            return "the memory format of pictures means nothing to a transformer"
        return None


def describe(name: str) -> str:
    """What a variant is, in plain words."""
    variant = Variant.of(name)
    base = name if variant.kind == EAGER_GRAPH else name.partition("+")[0]
    return "; ".join([_WORDS[base], *(_LEVER_WORDS[lever] for lever in variant.levers)])


def _levers_of(kind: str, mode: str) -> set[str] | None:
    if kind in (EAGER, NODE) and not mode:
        return set()
    if kind == COMPILE and mode in _MODES:
        return {CHANNELS_LAST}
    if kind == OURS and mode == BackendChoice.TENSORRT.value:
        return {MAX, BAKE, AS_EXPORTED, *_PRECISIONS}
    if kind == OURS and mode in _ENGINES:
        return {MAX, *_PRECISIONS}
    return None


# Running


@dataclass
class Ready:
    """A variant that computes.

    Attributes:
        compute: one call, which is what is timed.
        prepare: from a model's inputs to what `compute` takes.
        result: from what `compute` took and gave to a model's outputs.
        facts: further fields of its row.
        copied_bytes: of weights that it holds beside the host's, only because the host's serve the other variants.
        engine_calls: made so far; None where there is no engine.
        reasons: why calls went to the plain model.
    """

    compute: Callable[[Any], Any]
    precision: Precision
    prepare: Callable[[Tensors], Any] = lambda inputs: inputs
    result: Callable[[Any, Any], Tensors] = lambda taken, given: given
    facts: dict[str, Any] = field(default_factory=dict)
    copied_bytes: int = 0
    engine_calls: Callable[[], int | None] = lambda: None
    reasons: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Workshop:
    """Where variants are set up: the engines' store, a folder of ours for scratch, and who hears of progress."""

    store: EngineStore
    scratch: Path
    tell: Callable[[str], None]


def set_up(variant: Variant, subject: Subject, workshop: Workshop, ending: ExitStack) -> Ready:
    """Make a variant ready; what it holds is let go with `ending`.

    Raises:
        Exception: whatever stops it; no variant's failure concerns another.
    """
    makers = {EAGER: _eager, EAGER_GRAPH: _eager_graph, NODE: _node, COMPILE: _compiled, OURS: _ours}
    return makers[variant.kind](variant, subject, workshop, ending)


def _eager(variant: Variant, subject: Subject, workshop: Workshop, ending: ExitStack) -> Ready:
    return Ready(subject.source.eager, subject.source.precision)


def _eager_graph(variant: Variant, subject: Subject, workshop: Workshop, ending: ExitStack) -> Ready:
    """The inputs are copied to where the graph reads them in every call, as a user of it must."""
    fixed = {name: tensor.clone() for name, tensor in subject.inputs(seed=0).items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries choose their kernels and workspaces before the recording
        for _ in range(3):
            subject.source.eager(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = subject.source.eager(fixed)
    ending.callback(graph.reset)

    def compute(inputs: Tensors) -> Tensors:
        for name, tensor in inputs.items():
            fixed[name].copy_(tensor)
        graph.replay()
        return outputs

    return Ready(compute, subject.source.precision)


def _node(variant: Variant, subject: Subject, workshop: Workshop, ending: ExitStack) -> Ready:
    """`apply_model` takes the noisy picture and sigma and gives the clean picture; both ways are undone apart."""
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    ending.enter_context(_compiler_cache(workshop))
    patcher = TorchCompileModel.execute(subject.patcher, "inductor").result[0]
    model, sampling = patcher.model, patcher.model.model_sampling

    def prepare(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        sigma = _sigma(sampling, inputs["timesteps"])
        noisy = _uncalculate_input(sampling, sigma, inputs["x"].float())
        rest = {name: tensor for name, tensor in inputs.items() if name not in ("x", "timesteps", "context")}
        return noisy, sigma, {"c_crossattn": inputs["context"], **rest}

    def compute(taken: tuple[torch.Tensor, torch.Tensor, dict[str, Any]]) -> torch.Tensor:
        noisy, sigma, conditions = taken
        options = {"wrappers": patcher.wrappers, "cond_or_uncond": [1, 0], "sigmas": sigma}
        clean: torch.Tensor = model.apply_model(noisy, sigma, transformer_options=options, **conditions)
        return clean

    def result(taken: tuple[torch.Tensor, torch.Tensor, dict[str, Any]], clean: torch.Tensor) -> Tensors:
        noisy, sigma, _ = taken
        return {"out": (noisy - clean) / _as_factor(sigma, clean)}

    return Ready(compute, subject.source.precision, prepare, result)


def _sigma(sampling: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The inverse of the model's own `timestep`; of flow models `sigma` is not, as it also shifts."""
    multiplier = getattr(sampling, "multiplier", None)
    sigma: torch.Tensor = sampling.sigma(timesteps) if multiplier is None else timesteps / multiplier
    return sigma.to(timesteps.device, torch.float32)


def _uncalculate_input(sampling: Any, sigma: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The noisy picture that the model's own `calculate_input`, which only scales, turns into `x`."""
    scale: torch.Tensor = sampling.calculate_input(sigma, torch.ones_like(x))
    return x / scale


def _as_factor(sigma: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    return sigma.view(-1, *[1] * (picture.ndim - 1))


def _compiled(variant: Variant, subject: Subject, workshop: Workshop, ending: ExitStack) -> Ready:
    ending.enter_context(_compiler_cache(workshop))
    module, copied = subject.module, 0
    if CHANNELS_LAST in variant.levers:
        module = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        copied = sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())
    compiled = torch.compile(_apart(module), mode=_MODES[variant.mode])

    def prepare(inputs: Tensors) -> Tensors:
        if CHANNELS_LAST not in variant.levers:
            return inputs
        return {
            name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
            for name, tensor in inputs.items()
        }

    def compute(inputs: Tensors) -> Tensors:
        if variant.mode:
            torch.compiler.cudagraph_mark_step_begin()
        return subject.call(compiled, inputs)

    return Ready(compute, subject.source.precision, prepare, copied_bytes=copied)


def _apart(module: torch.nn.Module) -> Callable[..., Any]:
    """The module as a function whose code nobody else has: torch keeps what it compiled with the code object, where
    another variant's would be found and its guards be asked."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    forward.__code__ = forward.__code__.replace()
    return forward


@contextmanager
def _compiler_cache(workshop: Workshop) -> Iterator[None]:
    """An empty one, so that no variant gains from what was compiled for another: `build_s` is of a first time."""
    # Only the environment: these folders are asked for at each compilation, and read again later in the process.
    folder = tempfile.mkdtemp(dir=workshop.scratch)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    yield


def _ours(variant: Variant, subject: Subject, workshop: Workshop, ending: ExitStack) -> Ready:
    source = subject.source
    store = workshop.store
    provider = EngineProvider(store, [_AsExported()]) if AS_EXPORTED in variant.levers else EngineProvider(store)
    settings = Settings(
        backend=BackendChoice(variant.mode),
        precision=next((Precision(lever) for lever in variant.levers if lever in _PRECISIONS), None),
        optimize=Optimize.MAX if MAX in variant.levers else Optimize.BALANCED,
        policy=BuildPolicy.MANUAL,
        bake=BAKE in variant.levers,
    )
    plan, entry = provider.prepare(source, subject.call_shape, settings, HostHooks(_teller(workshop, variant)))
    loading = load_seconds(provider, source, plan, entry)
    module = AcceleratedModule(provider, settings)
    ending.callback(provider.pool.clear)
    run = ending.enter_context(module.run(source))  # the very way that a picture's calls take

    def compute(inputs: Tensors) -> Tensors:
        return run(inputs, lambda: source.eager(inputs))

    facts = {
        "build_s": entry.manifest.build.seconds,
        "load_s": loading,
        "size_mb": round(entry.bytes / 2**20, 2),
        "versions": versions(plan.key.environment),
    }
    return Ready(
        compute,
        plan.spec.precision,
        facts=facts,
        engine_calls=lambda: module.status.engine_calls,
        reasons=lambda: "; ".join(module.status.to_json()["reasons"]),
    )


class _AsExported(TensorRTBackend):
    """What the build process does follows from the options that it is given."""

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return {**super().options(device, precision, optimize), "surgery": NEEDED}


def _teller(workshop: Workshop, variant: Variant) -> Callable[[Progress], None]:
    told: list[str] = []

    def tell(progress: Progress) -> None:
        if told[-1:] != [progress.phase]:
            told.append(progress.phase)
            workshop.tell(f"{variant.name}: {progress.phase}: {progress.message}")

    return tell
