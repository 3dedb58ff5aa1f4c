"""The ways in which a model is run: `name[+lever…]`, such as `torch.compile:max-autotune+channels_last`."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.spec import Precision
from ..runtime.settings import BackendChoice
from .cases import Case
from .jobs import Job
from .models import Model
from .subject import Subject

EAGER, EAGER_GRAPH, NODE, COMPILE, OURS = "eager", "eager+graph", "TorchCompileModel", "torch.compile", "slipstream"
CHANNELS_LAST, MAX, BAKE, AS_EXPORTED = "channels_last", "max", "bake", "as-exported"
ENGINES, HINT, TEXT, PARALLEL, GRAPH = OF_JOBS = "engines", "hint", "text", "parallel", "graph"
MODES = {"": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
_ENGINES = {each.value for each in BackendChoice} - {BackendChoice.AUTO.value, BackendChoice.OFF.value}
PRECISIONS = {each.value for each in Precision}

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
    ENGINES: "of the levers below only those that are named",
    HINT: "the ControlNet's hint embedded once a picture",
    TEXT: "keys and values of the attention over the text computed once a prompt",
    PARALLEL: "the ControlNet beside the half of the model that does not need it",
    GRAPH: "a whole step replayed as one CUDA graph",
    **{each: f"computed in {each}" for each in PRECISIONS},
}


_NOT_OF_JOBS = {
    EAGER_GRAPH: "ComfyUI's samplers compute on the CPU between the steps, which no recording of a picture holds",
    NODE: "ComfyUI's node compiles the UNet alone; torch.compile stands for ControlNet and VAE as well",
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
        if self.needs_graphs and subject.device.type != "cuda":
            return "CUDA graphs need a CUDA GPU"
        if CHANNELS_LAST in self.levers and not case.convolutional:
            return "the memory format of pictures means nothing to a transformer"
        if isinstance(subject, Job):
            return _NOT_OF_JOBS.get(self.kind)
        if self.kind == NODE and isinstance(subject, Model) and subject.patcher is None:
            return "ComfyUI's node compiles diffusion models only"
        if found := [lever for lever in self.levers if lever in OF_JOBS]:
            return f"{found[0]!r} is about whole pictures"
        return None


def describe(name: str) -> str:
    """What a variant is, in plain words."""
    variant = Variant.of(name)
    base = name if variant.kind == EAGER_GRAPH else name.partition("+")[0]
    return "; ".join([_WORDS[base], *(_LEVER_WORDS[lever] for lever in variant.levers)])


def _levers_of(kind: str, mode: str) -> set[str] | None:
    if kind in (EAGER, NODE) and not mode:
        return set()
    if kind == COMPILE and mode in MODES:
        return {CHANNELS_LAST}
    if kind == OURS and mode == BackendChoice.TENSORRT.value:
        return {MAX, BAKE, AS_EXPORTED, *OF_JOBS, *PRECISIONS}
    if kind == OURS and mode in _ENGINES:
        return {MAX, *OF_JOBS, *PRECISIONS}
    return None
