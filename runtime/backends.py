"""The backends at hand, in order of preference, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compile_backend import AOTInductorBackend, TorchCompileBackend
from ..core.errors import BackendUnavailable
from ..core.protocols import Backend
from ..trt_backend import why_unavailable as why_no_tensorrt
from .settings import BackendChoice


@dataclass(frozen=True)
class BackendPick:
    """The backend to use, and why those before it in the chain were passed over."""

    backend: Backend
    passed_over: tuple[str, ...] = ()


def default_backends() -> list[Backend]:
    """Compiled backends, the best first."""
    return [AOTInductorBackend(), TorchCompileBackend()]


def backend_named(name: str) -> Backend:
    """
    Raises:
        BackendUnavailable: this version has no such backend.
    """
    for backend in default_backends():
        if backend.name == name:
            return backend
    raise BackendUnavailable(f"This version of Slipstream has no backend {name!r}; build the engine again")


def candidates(choice: BackendChoice, device: torch.device, backends: list[Backend]) -> list[BackendPick]:
    """Backends that can run an engine on `device`, the best first.

    Raises:
        BackendUnavailable: none can; the message lists every reason.
    """
    passed: list[str] = []
    if choice in (BackendChoice.AUTO, BackendChoice.TENSORRT):
        passed.append(f"tensorrt: {why_no_tensorrt()}")
        if choice is BackendChoice.TENSORRT:
            raise BackendUnavailable(f"{passed[0]}. Choose backend auto or compiled")
    picks = []
    for backend in backends:
        if reason := backend.why_unavailable(device):
            passed.append(f"{backend.name}: {reason}")
        else:
            picks.append(BackendPick(backend, tuple(passed)))
    if not picks:
        raise BackendUnavailable("No backend works on this machine. " + "; ".join(passed))
    return picks
