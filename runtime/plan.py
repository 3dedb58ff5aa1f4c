"""Which engine a call wants: spec and key, per backend of the chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..core.dtypes import WHOLE_NUMBERS, dtype_name, dtype_of
from ..core.protocols import Architecture, Backend, Tensors
from ..core.shapes import Shape, ShapeProfile
from ..core.spec import BackendConfig, EngineSpec, Precision
from ..engine_cache import EngineKey
from .backends import candidates
from .settings import Resolution, Settings, latent_of


@dataclass(frozen=True)
class Plan:
    """One engine that would do, by one backend."""

    architecture: Architecture
    spec: EngineSpec
    key: EngineKey
    backend: Backend
    device: torch.device

    def __str__(self) -> str:
        latent = latent_of(self.spec.profile.opt)
        frames = f" {latent[2]} latent frames" if len(latent) == 5 and latent[2] > 1 else ""
        name = self.spec.fingerprint.architecture_name
        return f"{name} {Resolution.of_latent(latent)}{frames} batch {latent[0]}"


@dataclass(frozen=True)
class CallShape:
    """Names, shapes and dtypes of one call's inputs; equal for calls that one static engine serves."""

    inputs: tuple[tuple[str, Shape, torch.dtype], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(sorted(self.inputs, key=lambda described: described[0])))

    @classmethod
    def of(cls, inputs: Tensors) -> CallShape:
        return cls(tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()))

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: shape for name, shape, _ in self.inputs}

    def dtypes(self, host: Precision, precision: Precision) -> dict[str, torch.dtype]:
        """What the engine takes: the host's compute dtype gives way to `precision`, others (timesteps) stay."""
        return {
            name: dtype_of(precision) if dtype == dtype_of(host) and name not in WHOLE_NUMBERS else dtype
            for name, _, dtype in self.inputs
        }


def plans(
    architecture: Architecture,
    call: CallShape,
    host_precision: Precision,
    device: torch.device,
    settings: Settings,
    backends: list[Backend],
) -> list[Plan]:
    """Engines that would do, the best first.

    Raises:
        BackendUnavailable: no backend runs on `device`.
    """
    precision = settings.precision or host_precision
    dtypes = {name: dtype_name(dtype) for name, dtype in call.dtypes(host_precision, precision).items()}
    picks = candidates(settings.backend, device, backends)
    return [_plan(architecture, call.shapes, dtypes, precision, device, settings, pick.backend) for pick in picks]


def _plan(
    architecture: Architecture,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    precision: Precision,
    device: torch.device,
    settings: Settings,
    backend: Backend,
) -> Plan:
    options = backend.options(device, precision, settings.optimize)
    spec = EngineSpec(
        role=architecture.role,
        fingerprint=architecture.fingerprint,
        profile=ShapeProfile.static(shapes),
        dtypes=dtypes,
        output_dtype=dtype_name(dtype_of(precision)),
        precision=precision,
        optimize=settings.optimize,
        backend=BackendConfig(backend.name, options),
    )
    return Plan(architecture, spec, EngineKey(spec, backend.environment(device)), backend, device)
