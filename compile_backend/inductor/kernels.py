"""What is chosen about kernels while code is compiled: to be entered as well where compiled code is looked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...core.spec import EngineSpec
from .attention import fastest_attention
from .reductions import whole_rows


@contextmanager
def chosen_kernels(spec: EngineSpec, device: torch.device) -> Iterator[None]:
    with fastest_attention(device), whole_rows(spec):
        yield
