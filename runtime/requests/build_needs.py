"""What engines will take, told before their model is loaded: disk, memory of the device, time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.dtypes import dtype_name, dtype_of
from ...core.formatting import say_bytes
from ...core.protocols import Backend
from ...core.shapes import Shape, ShapeProfile
from ...core.spec import BackendConfig, EngineSpec, ModelFingerprint, Precision, Role
from ...engine_cache import Entry
from ..building.build import needed_bytes
from ..loaded.device_memory import free_bytes
from ..planning.backends import candidates
from ..planning.build_estimate import say_roughly, typical
from ..planning.engine_shapes import profiles_wanted
from ..provider import EngineProvider, known_device_bytes
from ..settings.model_settings import PIXELS, Resolution, Settings
from .build_requests import Wanted

_LATENT_CHANNELS, _TEXT_WIDTH = 4, 768
"""Of most models; they decide no figure here."""


@dataclass(frozen=True)
class Needs:
    """Figures of one request; None where they are not known.

    Attributes:
        backend: that will build.
        engines: how many.
        weights_bytes: of the model itself, which is loaded for the build.
        disk_bytes: that must be free during a build.
        kept_bytes: that all engines will take on disk.
        build_bytes: of the device's memory during a build, beside the model.
        engine_bytes: of the device's memory while an engine is in use, beside the model.
        seconds: for all engines.
        free_disk, free_device: what there is.
    """

    backend: str
    engines: int
    weights_bytes: int | None
    disk_bytes: int
    kept_bytes: int | None
    build_bytes: int | None
    engine_bytes: int | None
    seconds: float | None
    free_disk: int
    free_device: int | None

    @property
    def shortage(self) -> str:
        """What there is too little of, in words; empty where all suffices, as far as is known."""
        if self.free_disk < self.disk_bytes:
            return f"disk: {say_bytes(self.disk_bytes)} are needed, {say_bytes(self.free_disk)} are free"
        needed = (self.weights_bytes or 0) + (self.build_bytes or 0)
        if self.free_device is not None and self.free_device < needed:
            return f"GPU memory: {say_bytes(needed)} are needed, {say_bytes(self.free_device)} are free"
        return ""


def foresee(provider: EngineProvider, device: torch.device, wanted: Wanted, parameters: int | None) -> Needs:
    """
    Args:
        parameters: how many parameters the model's part has; None where that is not known.

    Raises:
        BackendUnavailable: nothing here could build it.
    """
    settings = provider.with_preferences(wanted.settings)
    precision = settings.compute_precision(Precision.FP16 if device.type == "cuda" else Precision.FP32)
    picks = candidates(settings.backend, device, provider.backends)
    offers = [(each, *_spec(each, device, wanted, settings, precision, parameters or 0)) for each in picks]
    able = (offer for offer in offers if offer[0].why_unsupported(offer[1]) is None)
    backend, spec, engines = next(able, offers[0])  # where none is, the request itself says why
    weights = None if parameters is None else parameters * dtype_of(precision).itemsize
    comparable = [entry for entry in provider.store.list() if _is_comparable(entry, spec)]
    baked = spec.backend.contains_weights
    each = typical(provider.history, settings.effort.value, (wanted.role,))
    return Needs(
        backend=backend.name,
        engines=engines,
        weights_bytes=weights,
        disk_bytes=needed_bytes(spec),
        kept_bytes=_times(engines, _middle([entry.bytes for entry in comparable]) if not baked else weights),
        build_bytes=backend.build_bytes(spec) if parameters is not None else None,
        engine_bytes=_middle([known for entry in comparable if (known := known_device_bytes(entry))]),
        seconds=None if each is None else engines * each,
        free_disk=provider.store.free_bytes(),
        free_device=free_bytes(device),
    )


def say_needs(needs: Needs) -> list[str]:
    """A line for each of disk, memory and time."""
    engines = "1 engine" if needs.engines == 1 else f"{needs.engines} engines"
    free = "" if needs.free_device is None else f"; {say_bytes(needs.free_device)} are free"
    time = "not known before the first such build on this machine"
    if needs.seconds is not None:
        time = f"about {say_roughly(needs.seconds)}, by earlier builds of whatever model on this machine"
    return [
        f"Builds: {engines}, by {needs.backend}",
        f"Disk: {say_bytes(needs.disk_bytes)} during the build, of which stays {_or_unknown(needs.kept_bytes)}; "
        f"{say_bytes(needs.free_disk)} are free",
        f"Memory of the device: {_or_unknown(needs.weights_bytes)} for the model; more during the build: "
        f"{_or_unknown(needs.build_bytes)}; more while an engine runs: {_or_unknown(needs.engine_bytes)}{free}",
        f"Time: {time}",
    ]


def _or_unknown(number: int | None) -> str:
    return "not known yet" if number is None else f"about {say_bytes(number)}"


def _spec(
    backend: Backend,
    device: torch.device,
    wanted: Wanted,
    settings: Settings,
    precision: Precision,
    parameters: int,
) -> tuple[EngineSpec, int]:
    """An engine of the request, and how many of them there will be."""
    calls = [_shapes(wanted, resolution) for resolution in settings.resolutions]
    profiles = [profiles_wanted(shapes, settings) for shapes in calls]

    def spec(profiles: Sequence[ShapeProfile]) -> EngineSpec:
        dtype = dtype_name(dtype_of(precision))
        return EngineSpec(
            role=wanted.role,
            fingerprint=ModelFingerprint("", parameters=parameters),
            profile=profiles[0],
            dtypes=dict.fromkeys(profiles[0].inputs, dtype),
            output_dtype=dtype,
            precision=precision,
            optimize=settings.effort,
            backend=BackendConfig(
                backend.name,
                backend.options(device, precision, settings.effort),
                contains_weights=settings.bake and backend.can_bake,
            ),
            more_profiles=tuple(profiles[1:]),
            quantised=settings.quantised_for(wanted.role),
        )

    first = spec(profiles[0])
    if not first.is_static and backend.why_unsupported(first) is not None:  # then an engine for each size
        return spec([ShapeProfile.static(calls[0])]), len(calls)
    return first, len(set(profiles))


def _shapes(wanted: Wanted, resolution: Resolution) -> dict[str, Shape]:
    height, width = resolution.height // PIXELS, resolution.width // PIXELS
    if wanted.role is Role.VAE_ENCODE:
        return {"pixels": (wanted.batch, 3, resolution.height, resolution.width)}
    latent = (wanted.batch, _LATENT_CHANNELS, height, width)
    if wanted.role is Role.VAE_DECODE:
        return {"z": latent}
    return {"x": latent, "timesteps": (wanted.batch,), "context": (wanted.batch, wanted.tokens, _TEXT_WIDTH)}


def _is_comparable(entry: Entry, spec: EngineSpec) -> bool:
    made = entry.manifest
    quantised = spec.quantised.value if spec.quantised else None
    return (made.role, made.backend, made.quantised) == (spec.role.value, spec.backend.name, quantised)


def _middle(numbers: Sequence[int]) -> int | None:
    return int(statistics.median(numbers)) if numbers else None


def _times(count: int, number: int | None) -> int | None:
    return None if number is None else count * number
