"""From a kind of block and one of its calls to the engines that would do: one for all sizes, or one for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...compile_backend.blocks.backend import BlockBackend
from ...compile_backend.blocks.program import LARGEST, BlockArchitecture
from ...core.dtypes import dtype_name, dtype_of
from ...core.shapes import Shape, ShapeProfile, ShapeRange
from ...core.spec import BackendConfig, EngineSpec, Optimize, Precision
from ...engine_cache import key_of
from ..planning.plan import Plan


@dataclass(frozen=True)
class BlockPlan(Plan):
    """One engine of a kind of block."""

    backend: BlockBackend

    def __str__(self) -> str:
        size = " for one size" if self.spec.is_static else ""
        return f"blocks {self.spec.fingerprint.architecture_name}{size}"


def block_plans(
    architecture: BlockArchitecture,
    dtypes: Sequence[torch.dtype],
    precision: Precision,
    device: torch.device,
    optimize: Optimize,
    backend: BlockBackend,
) -> list[BlockPlan]:
    """The engine for all sizes where the architecture leaves any axis open, and that for the example's sizes.

    Args:
        dtypes: of the example's tensors.
    """
    profiles = [_profile(architecture.example, architecture.open_axes), ShapeProfile.static(architecture.example)]
    optimize = Optimize.BALANCED if optimize is Optimize.BLOCKS else optimize
    specs = [
        EngineSpec(
            role=architecture.role,
            fingerprint=architecture.fingerprint,
            profile=profile,
            dtypes={name: dtype_name(dtype) for name, dtype in zip(architecture.example, dtypes, strict=True)},
            output_dtype=dtype_name(dtype_of(precision)),
            precision=precision,
            optimize=optimize,
            backend=BackendConfig(backend.name, backend.options(device, precision, optimize)),
        )
        for profile in dict.fromkeys(profiles)
    ]
    environment = backend.environment(device)
    return [BlockPlan(architecture, spec, key_of(spec, environment), backend, device, precision) for spec in specs]


def _profile(example: Mapping[str, Shape], open_axes: Mapping[str, tuple[int, ...]]) -> ShapeProfile:
    """Axes that are open may have any size: that of the example is no part of it."""
    return ShapeProfile(
        {
            name: tuple(
                ShapeRange(2, 2, LARGEST) if axis in open_axes.get(name, ()) else ShapeRange.exactly(size)
                for axis, size in enumerate(shape)
            )
            for name, shape in example.items()
        }
    )
