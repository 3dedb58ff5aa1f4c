"""Facts about engines as plain data, and whether one would be used on this machine now."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from ...core.errors import SlipstreamError
from ...core.protocols import Backend
from ...core.shapes import ShapeProfile
from ...core.spec import Optimize, Precision, Role
from ...engine_cache import EngineStore, Entry, Manifest, canonical, describe_differences
from ...engine_cache.key import KEY_SCHEMA
from ..checking.step_times import why_retired
from ..loaded.canary import Canary
from ..planning.backends import backend_named
from ..planning.plan import say_batch, say_sizes


def overview(store: EngineStore) -> dict[str, Any]:
    """What `list` tells: the store, and each of its engines, the most recently used first."""
    engines = [summary(entry) for entry in store.list()]
    return {
        "store": str(store.root),
        "bytes": sum(engine["bytes"] for engine in engines),
        "limit_bytes": store.limit_bytes,
        "free_bytes": store.free_bytes(),
        "engines": engines,
    }


def summary(entry: Entry) -> dict[str, Any]:
    """One engine in brief."""
    manifest = entry.manifest
    reasons = why_entry_not_used(entry)
    return {
        "digest": manifest.digest,
        "label": manifest.label,
        "role": manifest.role,
        "backend": manifest.backend,
        "precision": manifest.precision_name,
        "optimize": manifest.optimize,
        "bytes": entry.bytes,
        "created": manifest.created,
        "build_s": manifest.build.seconds,
        "last_used": datetime.fromtimestamp(entry.last_used, timezone.utc).isoformat(timespec="seconds"),
        "error": manifest.worst_error,
        **_speed(manifest),
        "state": "stale" if reasons else "ok",
        "reasons": reasons,
        "caution": Canary(entry.marks).caution(entry.digest),
        "retired": why_retired(manifest) is not None,
        "gpu": _environment_of(manifest).get("gpu"),
        "trusted": entry.why_untrusted() is None,
        "adoptable": entry.adoptable,
        "base": entry.is_in_base,
        **_shapes(manifest),
    }


def _shapes(manifest: Manifest) -> dict[str, str]:
    """The pictures and batches that an engine takes, for people; that of a block sees neither."""
    if manifest.role == Role.BLOCK.value:
        return {"resolution": say_sizes_of_blocks(manifest.profile), "batch": ""}
    return {"resolution": say_sizes(manifest.profiles), "batch": say_batch(manifest.profiles)}


ANY_SIZE = "any size"


def say_sizes_of_blocks(profile: ShapeProfile) -> str:
    """The pictures that an engine of blocks is for. In some sizes alone it serves where the same numbers must be equal,
    which `block_plans` notes in the midst of their ranges."""
    if profile.is_static:
        return "one size"
    ranges = (each for axes in profile.inputs.values() for each in axes)
    return "some sizes" if any(each.opt > each.min for each in ranges) else ANY_SIZE


def _speed(manifest: Manifest) -> dict[str, Any]:
    speed = manifest.speed
    return {
        "speedup": speed.speedup if speed else None,
        "engine_ms": speed.engine_ms if speed else None,
        "eager_ms": speed.eager_ms if speed else None,
        "timed_by": manifest.timed_by,
    }


def details(entry: Entry) -> dict[str, Any]:
    """What `show` tells: all that is known about an engine."""
    manifest = entry.manifest
    return {
        **summary(entry),
        "directory": str(entry.directory),
        "slipstream": manifest.slipstream,
        "signature": manifest.signature,
        "shapes": {name: [str(axis) for axis in axes] for name, axes in manifest.profile.inputs.items()},
        "build_phases": dict(manifest.build.phases),
        "details": dict(manifest.details),
        "files": {name: asdict(record) for name, record in manifest.files.items()},
        "verifications": {weights: asdict(result) for weights, result in manifest.verifications.items()},
        "factors": dict(manifest.factors),
    }


def why_entry_not_used(entry: Entry) -> list[str]:
    """Like `why_not_used`, and why its code would not be loaded."""
    return [*filter(None, [entry.why_untrusted()]), *why_not_used(entry.manifest)]


def why_not_used(manifest: Manifest) -> list[str]:
    """Why ComfyUI on this machine would not look for this engine now, in words; empty when it would.

    Whether the model's own code has changed can only be said with the model at hand.
    """
    try:
        backend = backend_named(manifest.backend)
        devices = list(_devices(manifest))
        if not devices:
            return [f"made for {_made_for(manifest)}, which this machine has not"]
        differences = min((_why_not_on(device, backend, manifest) for device in devices), key=len)
        return [*differences, *filter(None, [why_retired(manifest)])]
    except (SlipstreamError, ValueError) as error:  # an option or precision of another version
        return [str(error)]


def _why_not_on(device: torch.device, backend: Backend, manifest: Manifest) -> list[str]:
    if reason := backend.why_unavailable(device):
        return [reason]
    return describe_differences(manifest.factors, _factors_now(device, backend, manifest))


def _factors_now(device: torch.device, backend: Backend, manifest: Manifest) -> dict[str, Any]:
    """The key's factors if the same engine were asked for on `device` today."""
    spec = manifest.factors["spec"]
    options = backend.options(device, Precision(manifest.precision), Optimize(manifest.optimize))
    return {
        "schema": KEY_SCHEMA,
        "spec": {**spec, "backend": {**spec["backend"], "options": canonical(options, "options")}},
        "environment": _environment_now(backend.name, device),
    }


@functools.cache
def _environment_now(backend: str, device: torch.device) -> Any:
    return canonical(backend_named(backend).environment(device), "environment")


def _devices(manifest: Manifest) -> Iterator[torch.device]:
    """Devices of this machine of the kind that the engine runs on."""
    kind = _environment_of(manifest).get("device", "cpu")
    if kind != "cuda":
        yield torch.device(kind)
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield torch.device("cuda", index)


def _made_for(manifest: Manifest) -> str:
    return str(_environment_of(manifest).get("gpu") or "a GPU")


def _environment_of(manifest: Manifest) -> Mapping[str, Any]:
    found = manifest.factors.get("environment", {})
    return found if isinstance(found, Mapping) else {}
