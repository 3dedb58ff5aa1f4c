"""The ways in which a model is run: `name[+lever…]`, such as `torch.compile:max-autotune+channels_last`."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.spec import Precision, Quantised
from ...runtime.settings.model_settings import NUMBERS, BackendChoice
from ...sampling.presets import why_too_short
from . import fast_options, rivals, sage
from .cases import Case
from .jobs import Job
from .models import Model
from .plain_source import PlainSource
from .subject import Subject

EAGER, EAGER_GRAPH, NODE, COMPILE, OURS = "eager", "eager+graph", "TorchCompileModel", "torch.compile", "slipstream"
FAST = "fast"
EAGER_FAST = f"{EAGER}:{FAST}"
RIVAL, RECIPE = "diffusers", "compile"
RIVAL_COMPILED = f"{RIVAL}:{RECIPE}"
CHANNELS_LAST, MAX, FAST_BUILD, BAKE = "channels_last", "max", "fast-build", "bake"
AS_EXPORTED, UNJOINED, JOINED = OF_GRAPHS = "as-exported", "unjoined", "joined"
FP32, BF16_MATH = OTHER_NUMBERS = Precision.FP32.value, "bf16-math"
SAGE = "sage"
SWITCH_SIZE, SWITCH_BATCH = SWITCHES = "switch-size", "switch-batch"
COLD = "cold"
_OF_CALLS = (*OTHER_NUMBERS, SAGE, *SWITCHES)
STEPS = ("quality", "balanced", "fast")
_LEVERS_OF_JOBS = "engines", "hint", "parallel", "graph", "first"
ENGINES, HINT, PARALLEL, GRAPH, FIRST = _LEVERS_OF_JOBS
OF_JOBS = (*_LEVERS_OF_JOBS, *STEPS)
MODES = {"": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
_ENGINES = {each.value for each in BackendChoice} - {BackendChoice.AUTO.value, BackendChoice.OFF.value}
_PRECISIONS = {each.value for each in Precision}
_INSTEAD = (
    set(NUMBERS), {MAX, FAST_BUILD, *OF_GRAPHS}, set(STEPS), {*OTHER_NUMBERS, SAGE},
    {*SWITCHES, COLD},
)  # fmt: skip
"""Levers of which a name has one at most."""

USUAL = (
    EAGER, EAGER_GRAPH, NODE, COMPILE, f"{COMPILE}:reduce-overhead", f"{COMPILE}:max-autotune",
    f"{COMPILE}:max-autotune+{CHANNELS_LAST}", f"{OURS}:compiled",
)  # fmt: skip

_COMPILED = f"{OURS}:compiled"
_MAX, _FP8, _INT8 = (f"{_COMPILED}+{lever}" for lever in (MAX, Quantised.FP8.value, Quantised.INT8.value))
_REWRITTEN = f"{_COMPILED}+{AS_EXPORTED}", f"{_COMPILED}+{UNJOINED}", _COMPILED, f"{_COMPILED}+{JOINED}"

LADDER_CASE = "sdxl-1024-b2"
LADDER = (
    f"{EAGER}+{FP32}", f"{EAGER}+{BF16_MATH}", EAGER, f"{COMPILE}:reduce-overhead+{CHANNELS_LAST}", *_REWRITTEN, _INT8,
    _FP8,
)  # fmt: skip
"""From the eager model in full precision to our fastest engine: what each means makes faster, rung by rung."""

_TABLE_OF_CALLS = EAGER, EAGER_FAST, EAGER_GRAPH, _COMPILED, _FP8
_MORE_OF_USUAL = _MAX, _INT8
_TABLE_OF_JOBS = (
    EAGER, EAGER_FAST, *(f"{EAGER}+{steps}" for steps in STEPS), _COMPILED,
    *(f"{_COMPILED}+{steps}" for steps in STEPS), f"{COMPILE}:reduce-overhead",
    f"{COMPILE}:reduce-overhead+{CHANNELS_LAST}",
)  # fmt: skip


SWITCHED = tuple(f"{name}+{change}" for change in SWITCHES for name in (EAGER, _COMPILED))
"""What is measured of changes between two pictures."""

COLD_STARTED = tuple(f"{name}+{COLD}" for name in (EAGER, _COMPILED, f"{COMPILE}:reduce-overhead"))
"""What is measured of cold starts."""


def of_tables(case: Case) -> tuple[str, ...]:
    """The variants in a case's table. What torch compiles comes last: a time limit loses nothing else.

    Usual cases are looked at more closely than those that differ from one of them in size alone.
    """
    if case.is_job:
        return _TABLE_OF_JOBS
    more = _MORE_OF_USUAL if case.usual else ()
    layout = f"+{CHANNELS_LAST}" if case.convolutional else ""
    return *_TABLE_OF_CALLS, *more, f"{COMPILE}:reduce-overhead{layout}"


def ladder_to_measure() -> tuple[str, ...]:
    """The rungs, those that torch compiles last: a time limit loses nothing else."""
    return tuple(sorted(LADDER, key=lambda name: name.startswith(COMPILE)))


_WORDS = {
    EAGER: "the model as ComfyUI runs it",
    EAGER_FAST: "the model as ComfyUI runs it with `--fast fp16_accumulation autotune`",
    EAGER_GRAPH: "the model recorded once as a CUDA graph and replayed, so that the CPU never holds the GPU up",
    NODE: "ComfyUI's own node of this name, which compiles with torch's defaults; timed as sampling calls it",
    COMPILE: "`torch.compile` around the model, in its default mode",
    f"{COMPILE}:reduce-overhead": "`torch.compile` with its own CUDA graphs",
    f"{COMPILE}:max-autotune": "`torch.compile` that tries out kernels for each operation, with its own CUDA graphs",
    RIVAL: "diffusers' model with the same weights, as it comes; no ComfyUI in it",
    RIVAL_COMPILED: (
        'the same by the public recipe "Diffusion, Fast": query, key and value as one product, channels last, and '
        "`torch.compile` that tries out kernels, with its own CUDA graphs"
    ),
    f"{OURS}:compiled": "Slipstream's compiled engine, called the way that a picture's calls are",
    f"{OURS}:tensorrt": "Slipstream's TensorRT engine, called the way that a picture's calls are",
}
_LEVER_WORDS = {
    CHANNELS_LAST: "weights and pictures with their channels last in memory",
    MAX: "built with `optimize: max`",
    FAST_BUILD: "built with `optimize: fast build`",
    BAKE: "the weights inside the engine, which cannot take others then",
    AS_EXPORTED: "its graph as it was exported, changed by no more than the backend needs",
    UNJOINED: "no layers joined, the other rewrites of its graph done",
    JOINED: "all layers joined that share an input (query, key and value), also large ones, where that takes copies",
    ENGINES: "of the levers below only those that are named",
    HINT: "the ControlNet's hint embedded once a picture",
    PARALLEL: "the ControlNet beside the half of the model that does not need it",
    GRAPH: "a whole step replayed as one CUDA graph",
    FIRST: "also the first one, where an earlier picture was the same work",
    **{each: f"computed in {each}" for each in _PRECISIONS},
    **{each.value: f"large linear layers multiplied in {each.value}" for each in Quantised},
    BF16_MATH: "computed in bf16, attention by two plain products of matrices and a softmax between them",
    SAGE: "attention by the package `sageattention`, as ComfyUI's `--use-sage-attention` has it",
    SWITCH_SIZE: "two pictures, then two half as wide again, and so on",
    SWITCH_BATCH: "two pictures, then two at twice the batch, and so on",
    COLD: "in a process that is started for it, with engines and compiled code of an earlier one on the disk",
    **{each: f"steps skipped as the preset `{each}` of Step Skip has it" for each in STEPS},
}


_NOT_OF_JOBS = {
    EAGER_GRAPH: "ComfyUI's samplers compute on the CPU between the steps, which no recording of a picture holds",
    NODE: "ComfyUI's node compiles the UNet alone; torch.compile stands for ControlNet and VAE as well",
    RIVAL: "diffusers' models are timed by single calls",
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
        if rivals := next((found for each in _INSTEAD if len(found := sorted(each & set(levers))) > 1), None):
            raise ValueError(f"{name!r}: choose one of {' and '.join(rivals)}")
        return cls(name, kind, mode, tuple(levers))

    @property
    def steps(self) -> str | None:
        """The preset by which it skips steps."""
        return next((lever for lever in self.levers if lever in STEPS), None)

    @property
    def without_steps(self) -> Variant:
        """The same where it computes all steps."""
        return Variant.of("+".join(each for each in self.name.split("+") if each not in STEPS))

    @property
    def is_quantised(self) -> bool:
        """Whether it asks for 8 bits, in which not every model has anything to gain."""
        return any(isinstance(NUMBERS.get(lever), Quantised) for lever in self.levers)

    @property
    def switch(self) -> str | None:
        """In what the pictures differ between which it changes."""
        return next((lever for lever in self.levers if lever in SWITCHES), None)

    @property
    def is_cold(self) -> bool:
        """Whether a process is timed from its start to its first picture."""
        return COLD in self.levers

    @property
    def is_plain(self) -> bool:
        """Whether it computes at once: nothing is built, compiled or recorded first."""
        return self.kind == EAGER or self.name == RIVAL

    @property
    def needs_graphs(self) -> bool:
        return self.kind == EAGER_GRAPH or (self.kind in (COMPILE, RIVAL) and bool(self.mode))

    def with_lever(self, lever: str | None) -> Variant:
        """Of one of our engines; others stay as they are, and so do those that name another instead."""
        if lever is None or self.kind != OURS:
            return self
        taken = next((each for each in _INSTEAD if lever in each), {lever})
        return self if taken & set(self.levers) else Variant.of(f"{self.name}+{lever}")

    def why_left_out(self, case: Case, subject: Subject) -> str | None:
        """Why this variant means nothing here; None when it does."""
        if self.needs_graphs and subject.device.type != "cuda":
            return "CUDA graphs need a CUDA GPU"
        if CHANNELS_LAST in self.levers and not case.convolutional:
            return "the memory format of pictures means nothing to a transformer"
        if self.mode == FAST and (reason := fast_options.why_not(subject.device)):
            return reason
        if SAGE in self.levers and (reason := sage.why_not(subject.device)):
            return reason
        if isinstance(subject, Job):
            return self._why_not_of_job(subject)
        if isinstance(subject, Model):
            return self._why_not_of_model(subject)
        return None

    def _why_not_of_job(self, job: Job) -> str | None:
        of_calls = _OF_CALLS if self.kind == EAGER else SWITCHES
        if found := [lever for lever in self.levers if lever in of_calls]:
            return f"{found[0]!r} is about single calls"
        if self.steps is not None and (reason := why_too_short(job.steps)):
            return reason
        return _NOT_OF_JOBS.get(self.kind)

    def _why_not_of_model(self, model: Model) -> str | None:
        if found := [lever for lever in self.levers if lever in (*OF_JOBS, COLD)]:
            return f"{found[0]!r} is about whole pictures"
        if self.kind == NODE and model.patcher is None:
            return "ComfyUI's node compiles diffusion models only"
        if self.kind == EAGER and {BF16_MATH, SAGE} & set(self.levers) and not model.is_unet:
            return "only a UNet's attention can be told what to compute by"
        if self.kind == EAGER and FP32 in self.levers and model.patcher is None:
            return "a VAE's decoder is not compared with itself in fp32"
        if self.is_quantised and model.patcher is None:
            return "a VAE computes in its own precision: it has no large linear layers"
        if self.kind == RIVAL:
            return rivals.why_not(model, self.is_quantised)
        if self.kind == OURS and isinstance(model.source, PlainSource):
            return model.source.why_no_engine
        return None


def describe(name: str) -> str:
    """What a variant is, in plain words."""
    variant = Variant.of(name)
    base = name if variant.kind == EAGER_GRAPH else name.partition("+")[0]
    return "; ".join([_WORDS[base], *(_LEVER_WORDS[lever] for lever in variant.levers)])


def _levers_of(kind: str, mode: str) -> set[str] | None:
    if kind == EAGER and mode in ("", FAST):
        return set() if mode else {*_OF_CALLS, *STEPS, COLD}
    if kind == RIVAL and mode in ("", RECIPE):
        return {Quantised.INT8.value} if mode else set()
    if kind == NODE and not mode:
        return set()
    if kind == COMPILE and mode in MODES:
        return {CHANNELS_LAST, *SWITCHES, COLD}
    if kind == OURS and mode == BackendChoice.TENSORRT.value:
        return {MAX, FAST_BUILD, BAKE, AS_EXPORTED, *OF_JOBS, *SWITCHES, COLD, *_PRECISIONS}
    if kind == OURS and mode in _ENGINES:
        return {MAX, FAST_BUILD, *OF_GRAPHS, *OF_JOBS, *SWITCHES, COLD, *NUMBERS}
    return None
