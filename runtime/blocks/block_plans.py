"""From a kind of block and one of its calls to the engines that would do: for all sizes, for such, or for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """One engine of a kind of block.

    Attributes:
        of_such: it is for sizes of which the same are equal as in the example.
    """

    architecture: BlockArchitecture
    backend: BlockBackend
    of_such: bool = False

    def __str__(self) -> str:
        size = " for one size" if self.spec.is_static else " for some sizes" if self.of_such else ""
        return f"blocks {self.spec.fingerprint.architecture_name}{size}"


def block_plans(
    architecture: BlockArchitecture,
    dtypes: Sequence[torch.dtype],
    precision: Precision,
    device: torch.device,
    optimize: Optimize,
    backend: BlockBackend,
) -> list[BlockPlan]:
    """The engine for all sizes where the architecture leaves any axis open, that for sizes of which the same are equal
    as in the example, should the first take them for equal that are not here, and that for the example's sizes.

    Args:
        dtypes: of the example's tensors.
    """
    of_any, of_such = (_profile(architecture.example, architecture.open_axes, each) for each in (False, True))
    profiles = [of_any, of_such, ShapeProfile.static(architecture.example)]
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
    return [
        BlockPlan(
            architecture, spec, key_of(spec, environment), backend, device, precision, of_such=spec.profile is of_such
        )
        for spec in specs
    ]


def lent_plans(plan: BlockPlan) -> list[BlockPlan]:
    """The engines for all sizes from two on that may serve a plan's calls, in which there is one of something, too; the
    likeliest first."""
    found = []
    for larger in plan.architecture.larger:
        spec = replace(plan.spec, profile=_profile(larger.example, larger.open_axes, of_such=False))
        key = key_of(spec, plan.key.environment)
        found.append(replace(plan, architecture=larger, spec=spec, key=key, of_such=False))
    return found


def _profile(example: Mapping[str, Shape], open_axes: Mapping[str, tuple[int, ...]], of_such: bool) -> ShapeProfile:
    """Axes that are open may have any size: those of the example are no part of it.

    Args:
        of_such: but for which of them are equal, which a number in the midst of each range says.
    """
    numbers: dict[int, int] = {}

    def range_of(size: int) -> ShapeRange:
        return ShapeRange(2, 2 + (numbers.setdefault(size, len(numbers)) if of_such else 0), LARGEST)

    return ShapeProfile(
        {
            name: tuple(
                range_of(size) if axis in open_axes.get(name, ()) else ShapeRange.exactly(size)
                for axis, size in enumerate(shape)
            )
            for name, shape in example.items()
        }
    )
