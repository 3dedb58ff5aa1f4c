"""The base of both backends that compile torch modules."""

from __future__ import annotations

import torch

from ..core.environment import Environment
from ..core.spec import EngineSpec
from .cpp.toolchain import TRITON


class CompilingBackend:
    """A backend whose engines are for one exact shape and read the host's own weights."""

    can_bake = False

    def environment(self, device: torch.device) -> Environment:
        return Environment.current(device, packages=TRITON if device.type == "cuda" else ())

    def why_unsupported(self, spec: EngineSpec) -> str | None:
        return None if spec.is_static else "compiled engines are made for one exact shape"

    def build_bytes(self, spec: EngineSpec) -> int:
        return 0
