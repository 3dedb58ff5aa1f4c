"""The processor's vector instructions. To find them out torch's compiler compiles and loads a library for each kind.

On a slow processor that takes longer than the rest of a build.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def vector_instructions(device: torch.device, keep: Path | None) -> Iterator[None]:
    """Compile for a GPU without vector instructions, of which its packages need none, and for the CPU with those that
    this processor and compiler have.

    Args:
        keep: a folder that outlives builds, in which the next one finds the libraries; None: they are made anew.
    """
    from torch._inductor import cpu_vec_isa

    if device.type != "cpu":
        before = cpu_vec_isa.valid_vec_isa_list
        cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
        try:
            yield
        finally:
            cpu_vec_isa.valid_vec_isa_list = before
        return
    if keep is not None:
        with _compiler_cache(keep / "vector_instructions"):
            cpu_vec_isa.pick_vec_isa()
    yield


@contextmanager
def _compiler_cache(folder: Path) -> Iterator[None]:
    """Meanwhile torch's compiler keeps what it makes there."""
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(_CACHE)
        if before is not None:
            os.environ[_CACHE] = before


_CACHE = "TORCHINDUCTOR_CACHE_DIR"
