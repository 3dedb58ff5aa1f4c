"""This machine, in a few facts for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...core.errors import first_line
from ...core.protocols import Backend
from ...core.version import __version__
from ...engine_cache import BuildHistory
from ..planning.build_estimate import ROLES_OF_KIND, typical


def describe_machine(device: torch.device, backends: Iterable[Backend], history: BuildHistory) -> dict[str, Any]:
    """The GPU, what builds engines here or why it does not, and how long a build takes, of each kind of model."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    kinds = {kind: typical(history, roles=roles) for kind, roles in ROLES_OF_KIND.items()}
    return {
        "gpu": gpu,
        "backends": {backend.name: _why_not(backend, device) for backend in backends},
        "typical_build_s": None if (any_kind := typical(history)) is None else round(any_kind, 1),
        "build_s": {kind: None if seconds is None else round(seconds, 1) for kind, seconds in kinds.items()},
        "version": __version__,
    }


def _why_not(backend: Backend, device: torch.device) -> str | None:
    try:
        return backend.why_unavailable(device) or backend.why_cannot_build(device)
    except Exception as error:  # whatever a broken installation raises
        return first_line(error)
