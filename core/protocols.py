"""The interfaces between folders: what a host supplies, what a backend does and what an engine offers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from .environment import Environment
from .progress import ProgressCallback
from .shapes import ShapeProfile
from .spec import EngineSpec, ModelFingerprint, Optimize, Precision, Role

Tensors = dict[str, torch.Tensor]

HandOut = Callable[[Sequence[torch.Tensor], torch.Size, str], torch.Tensor]
"""What others compute in the midst of a call: given tensors, the first of which has the result's dtype, the result's
shape, and what is to be computed of them, it gives the result, contiguous and in memory of its own."""


@dataclass(frozen=True)
class Artifact:
    """What a build made: `files` (names inside `directory`) and facts about them that go into the manifest."""

    directory: Path
    files: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """A loaded artifact. Not thread-safe: one owner at a time."""

    @property
    def profile(self) -> ShapeProfile: ...

    @property
    def device_bytes(self) -> int:
        """Device memory that the engine holds itself, weights that the host supplied not counted."""
        ...

    @property
    def generation(self) -> int:
        """Grows whenever an address that a CUDA graph may have captured is invalidated."""
        ...

    @property
    def copies_weights(self) -> bool:
        """Whether it computes with copies of the weights; after an update its output is checked against the model's."""
        ...

    def __call__(self, **tensors: torch.Tensor) -> Tensors:
        """Run once. The outputs are fresh tensors.

        Raises:
            ShapeOutsideProfile: names, shapes, dtypes, strides or device differ from what it was built for.
            IncompatibleEngine: no weights have been supplied.
        """
        ...

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: Hashable = None) -> None:
        """Compute with `weights` (state-dict names) from now on; they are kept alive, and not copied where possible.

        Args:
            version: see `BoundWeights`; with that of the last call nothing is looked at or copied again.

        Raises:
            IncompatibleEngine: a name is missing, a shape, stride or dtype differs, or the engine contains others.
        """
        ...

    def release_weights(self) -> None:
        """Let go of the supplied weights; calls fail until `update_weights`."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A way to make engines. It never sees the cache.

    Attributes:
        can_bake: whether it can embed the model's weights in an artifact (`BackendConfig.contains_weights`).
    """

    name: str
    can_bake: bool

    def environment(self, device: torch.device) -> Environment: ...

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        """The options that shape an artifact of this kind; all of them enter the key."""
        ...

    def why_unavailable(self, device: torch.device) -> str | None:
        """What this machine lacks to load an artifact, and how to get it; None when nothing does."""
        ...

    def why_cannot_build(self, device: torch.device) -> str | None:
        """What this machine lacks to build one; None when nothing does."""
        ...

    def why_unsupported(self, spec: EngineSpec) -> str | None:
        """Why this backend cannot build `spec`; None when it can."""
        ...

    def build_bytes(self, spec: EngineSpec) -> int:
        """Device memory that building `spec` takes, roughly; 0 where it builds with next to none."""
        ...

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        """Trace and compile the model into files inside `job.directory`; runs in the worker process.

        Raises:
            UnsupportedModel: the model cannot be traced.
            BuildFailed: the compiler made nothing that may be used.
        """
        ...

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> Engine:
        """Load an artifact. It computes once `update_weights` has been called.

        Args:
            outputs: names of the program's results, in order.

        Raises:
            IncompatibleEngine: the artifact does not fit this machine.
        """
        ...


class Architecture(Protocol):
    """The computation of a model, without its weights.

    Small, so that it may outlive the model in the build queue. Its `__reduce__`, or its fields where it is a
    dataclass, say by plain data how the worker process makes it anew.
    """

    role: Role
    outputs: tuple[str, ...]

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Its `weights` are left out."""
        ...

    def placeholder(self, precision: Precision, device: torch.device) -> torch.nn.Module:
        """The model for export: takes the inputs as keywords, returns a tuple of tensors; its weights are placeholders.

        Raises:
            UnsupportedModel: this architecture cannot be built apart from its host's module.
        """
        ...

    def random_inputs(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        seed: int,
    ) -> Tensors:
        """Fresh inputs as a sampler would give them: noise, timesteps, text-like context."""
        ...


@dataclass(frozen=True)
class BuildJob:
    """One engine to be made inside `directory`: all that the worker process is given.

    Attributes:
        environment: the host's, which the worker's must equal.
        weights: a safetensors file of the model's weights, for an artifact that contains them; None for others.
        keep: a folder that outlives builds, for what they learn about this machine; None where there is none.
    """

    directory: Path
    spec: EngineSpec
    architecture: Architecture
    device: torch.device
    environment: Environment
    weights: Path | None = None
    keep: Path | None = None


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class BoundWeights:
    """A model's weights where they lie: an engine reads them there until they are released.

    Attributes:
        tensors: by the names of the placeholder.
        version: equal for two bindings of one model whose tensors lie in the same places with the same values; None
            where nobody knows.
        release: lets the host move or free them again. It may be called once, from any thread.
    """

    tensors: Mapping[str, torch.Tensor]
    version: Hashable = None
    release: Callable[[], None] = _nothing

    def __enter__(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def __exit__(self, *_: object) -> None:
        self.release()


class ModelSource(Protocol):
    """One live model of a host, as the runtime sees it. Used inside a run, never kept after it."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def precision(self) -> Precision:
        """The precision in which the host computes."""
        ...

    @property
    def is_patched(self) -> bool:
        """Whether it computes with other weights than those of `weights_digest`, as with a LoRA."""
        ...

    def weights_digest(self) -> str:
        """Digest of the unpatched weights; remembered, since the first call may read gigabytes."""
        ...

    def bind(self, precision: Precision) -> BoundWeights:
        """The weights as they are to be used now, LoRA included, held where they lie until they are released.

        Raises:
            UnsupportedModel: they cannot be had in this dtype on this device, e.g. for lack of memory.
        """
        ...

    def eager(self, inputs: Tensors) -> Tensors:
        """The host's own module, in its own precision."""
        ...

    def reference(self, inputs: Tensors) -> Tensors:
        """The host's own module in fp32, with the weights it uses now."""
        ...
