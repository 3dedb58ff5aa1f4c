"""The backends at hand, in order of preference, and the choice among them."""

from __future__ import annotations

import torch

from ...compile_backend import AOTInductorBackend, TorchCompileBackend
from ...compile_backend.blocks.backend import BlockBackend
from ...compile_backend.blocks.triton_backend import TritonBlockBackend
from ...core.errors import BackendUnavailable
from ...core.protocols import Backend
from ...trt_backend import TensorRTBackend
from ..settings.model_settings import SWITCHED_OFF, BackendChoice


def default_backends() -> list[Backend]:
    """The best first, as measured: TensorRT where no package can be compiled ahead of time."""
    return [AOTInductorBackend(), TensorRTBackend(), TorchCompileBackend()]


def backend_named(name: str) -> Backend:
    """
    Raises:
        BackendUnavailable: this version has no such backend.
    """
    for backend in (*default_backends(), BlockBackend(), TritonBlockBackend()):
        if backend.name == name:
            return backend
    raise BackendUnavailable(f"This version of Slipstream has no backend {name!r}; build the engine again")


def candidates(choice: BackendChoice, device: torch.device, backends: list[Backend]) -> list[Backend]:
    """Backends that can run an engine on `device`, the best first.

    Raises:
        BackendUnavailable: none can, and the message lists every reason; or acceleration is switched off.
    """
    if choice is BackendChoice.OFF:
        raise BackendUnavailable(f"{SWITCHED_OFF[0].upper()}{SWITCHED_OFF[1:]}; choose another backend to build")
    chosen = [backend for backend in backends if _is_chosen(backend, choice)]
    passed = [] if chosen else [f"{choice.value}: there is no such backend here"]
    found = []
    for backend in chosen:
        if reason := backend.why_unavailable(device):
            passed.append(f"{backend.name}: {reason}")
        else:
            found.append(backend)
    if not found:
        raise BackendUnavailable("No backend works on this machine. " + "; ".join(passed) + _instead(choice))
    return found


def _is_chosen(backend: Backend, choice: BackendChoice) -> bool:
    if choice is BackendChoice.TENSORRT:
        return backend.name == TensorRTBackend.name
    return choice is BackendChoice.AUTO or backend.name != TensorRTBackend.name


def _instead(choice: BackendChoice) -> str:
    return ". To do without TensorRT, choose backend auto or compiled" if choice is BackendChoice.TENSORRT else ""
