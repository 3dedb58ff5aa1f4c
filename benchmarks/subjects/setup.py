"""What setting up a variant takes and gives, and what variants of models and of jobs have in common."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core.protocols import Tensors
from ...core.spec import Precision, Quantised
from ...engine_cache import EngineStore
from ...runtime.settings.model_settings import BuildPolicy


@dataclass
class Ready:
    """A variant that computes.

    Attributes:
        compute: one call, which is what is timed.
        prepare: from a subject's inputs to what `compute` takes.
        result: from what `compute` took and gave to a subject's outputs.
        facts: further fields of its row.
        copied_bytes: of weights that it holds beside the host's, only because the host's serve the other variants.
        engine_calls: made so far; None where there is no engine.
        reasons: why calls went to the plain model; empty where none did.
        quantised: what large linear layers multiply in, where not in `precision`.
        wanted_calls: of engines in one call, where they are not the subject's own number.
        skips: steps of a picture.
        picture: begins a picture and gives what computes its calls, where that is work of its own; None: `compute`.
    """

    compute: Callable[[Any], Any]
    precision: Precision
    prepare: Callable[[Any], Any] = lambda inputs: inputs
    result: Callable[[Any, Any], Tensors] = lambda taken, given: given
    facts: dict[str, Any] = field(default_factory=dict)
    copied_bytes: int = 0
    engine_calls: Callable[[], int | None] = lambda: None
    reasons: Callable[[], str] = lambda: ""
    quantised: Quantised | None = None
    wanted_calls: int | None = None
    skips: bool = False
    picture: Callable[[], AbstractContextManager[Callable[[Any], Any]]] | None = None

    @property
    def numbers(self) -> str:
        """By which the precision was chosen, e.g. "fp16" or "fp8"."""
        found: str = (self.quantised or self.precision).value
        return found


@dataclass(frozen=True)
class SetupContext:
    """Where variants are set up: the engines' store, a folder of ours for scratch, and who hears of progress.

    Attributes:
        compiled: where torch keeps what it compiles, and finds what it has compiled; None: an empty folder each time.
        builds: when an engine is built that a whole picture lacks.
    """

    store: EngineStore
    scratch: Path
    tell: Callable[[str], None]
    compiled: Path | None = None
    builds: BuildPolicy = BuildPolicy.FIRST_USE


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """By name, as far as the packages tell."""
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):  # copied without its metadata
            found[name] = importlib.metadata.version(name)
    return found


def apart(module: Callable[..., Any]) -> Callable[..., Any]:
    """The module as a function whose code nobody else has: torch keeps what it compiled with the code object, where
    another variant's would be found and its guards be asked."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    forward.__code__ = forward.__code__.replace()
    return forward


@contextmanager
def compiler_cache(setup_context: SetupContext) -> Iterator[None]:
    """The context's, or an empty one: then no variant gains from what was compiled for another, and `build_s` is of a
    first time."""
    # Only the environment: these folders are asked for at each compilation, and read again later in the process.
    folder = str(setup_context.compiled or tempfile.mkdtemp(dir=setup_context.scratch))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    yield


def bytes_of(module: torch.nn.Module) -> int:
    """Of its weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())
