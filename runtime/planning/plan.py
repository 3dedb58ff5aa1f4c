"""Which engine a call wants: spec and key, per backend of the chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...core.dtypes import INTEGER_INPUTS, dtype_name, dtype_of
from ...core.protocols import Architecture, Backend, Tensors
from ...core.shapes import Shape, ShapeProfile
from ...core.spec import BackendConfig, EngineSpec, Precision
from ...engine_cache import EngineKey, key_of
from ..settings.model_settings import Resolution, Settings, latent_of
from .backends import candidates
from .engine_shapes import profiles_wanted


@dataclass(frozen=True)
class Plan:
    """One engine that would do, by one backend.

    Attributes:
        host: what the model computed in when this was planned.
        save_weights: writes the model's weights into a safetensors file, for an engine that embeds them. It
            needs the live model: only while a run, or a person, waits.
    """

    architecture: Architecture
    spec: EngineSpec
    key: EngineKey
    backend: Backend
    device: torch.device
    host: Precision
    save_weights: Callable[[Path], None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        sizes, batch = say_sizes(self.spec.profiles), say_batch(self.spec.profiles)
        control = " with control" if any(name.startswith("control_") for name in self.spec.dtypes) else ""
        return f"{self.spec.fingerprint.architecture_name} {sizes} batch {batch}{control}"

    def serves(self, call: CallShape, settings: Settings) -> bool:
        """Whether `plans` would find this very engine for another call of the same model and settings."""
        dtypes = _dtype_names(call, self.host, self.spec.precision)
        return dtypes == self.spec.dtypes and profiles_wanted(call.shapes, settings) == self.spec.profiles


def say_sizes(profiles: Sequence[ShapeProfile]) -> str:
    """The pictures that an engine is for, e.g. "512×512" or "512×512…768×768"."""
    return ", ".join(dict.fromkeys(map(_say_size, profiles)))


def say_batch(profiles: Sequence[ShapeProfile]) -> str:
    """How many samples it takes at once, e.g. "2" or "1…4"."""
    batch = latent_of(profiles[0].inputs)[0]
    return _span(batch.min, batch.max)


def _say_size(profile: ShapeProfile) -> str:
    latent = latent_of(profile.inputs)
    smallest, largest = (Resolution.of_call(_end(profile, end)) for end in ("min", "max"))
    frames = f" {latent[2]} latent frames" if len(latent) == 5 and latent[2].max > 1 else ""
    return f"{_span(smallest, largest)}{frames}"


def _end(profile: ShapeProfile, end: str) -> dict[str, Shape]:
    return {name: tuple(getattr(axis, end) for axis in axes) for name, axes in profile.inputs.items()}


def _span(smallest: object, largest: object) -> str:
    return str(smallest) if smallest == largest else f"{smallest}…{largest}"


@dataclass(frozen=True)
class CallShape:
    """Names, shapes and dtypes of one call's inputs; equal for calls that no engine tells apart."""

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
            name: dtype_of(precision) if dtype == dtype_of(host) and name not in INTEGER_INPUTS else dtype
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
    """Engines that would do, the best first: where one for several sizes is asked for, those of backends that make it.

    Raises:
        BackendUnavailable: no backend runs on `device`.
    """
    precision = settings.compute_precision(host_precision)
    dtypes = _dtype_names(call, host_precision, precision)
    chosen = candidates(settings.backend, device, backends)
    profiles = profiles_wanted(call.shapes, settings)
    specs = [_spec(architecture, call.shapes, profiles, dtypes, precision, device, settings, each) for each in chosen]
    found = [
        Plan(architecture, spec, key_of(spec, backend.environment(device)), backend, device, host_precision)
        for spec, backend in zip(specs, chosen, strict=True)
    ]
    return sorted(found, key=lambda plan: plan.spec.profiles != profiles)


def _dtype_names(call: CallShape, host: Precision, precision: Precision) -> dict[str, str]:
    return {name: dtype_name(dtype) for name, dtype in call.dtypes(host, precision).items()}


def _spec(
    architecture: Architecture,
    shapes: Mapping[str, Shape],
    profiles: Sequence[ShapeProfile],
    dtypes: Mapping[str, str],
    precision: Precision,
    device: torch.device,
    settings: Settings,
    backend: Backend,
) -> EngineSpec:
    options = backend.options(device, precision, settings.effort)
    profile, *more = profiles
    spec = EngineSpec(
        role=architecture.role,
        fingerprint=architecture.fingerprint,
        profile=profile,
        dtypes=dtypes,
        output_dtype=dtype_name(dtype_of(precision)),
        precision=precision,
        optimize=settings.effort,
        backend=BackendConfig(backend.name, options),
        more_profiles=tuple(more),
        quantised=settings.quantised_for(architecture.role),
    )
    if not spec.is_static and backend.why_unsupported(spec) is not None:  # then an engine for each size
        return replace(spec, profile=ShapeProfile.static(shapes), more_profiles=())
    return spec
