"""Engines with embedded weights: which plan asks for one, when it may be built, and which weights go into it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from ...core.errors import StoreError, UnsupportedModel
from ...core.protocols import ModelSource
from ...core.spec import Precision
from ...engine_cache import key_of
from ..settings.model_settings import BuildPolicy
from .plan import Plan


def baked(plan: Plan, source: ModelSource) -> Plan:
    """The same engine with the weights of `source` embedded; other weights make it another engine."""
    fingerprint = replace(plan.spec.fingerprint, weights=source.weights_digest())
    spec = replace(plan.spec, fingerprint=fingerprint, backend=replace(plan.spec.backend, contains_weights=True))
    save = functools.partial(_save_weights, source, spec.precision)
    return replace(plan, spec=spec, key=key_of(spec, plan.key.environment), save_weights=save)


def is_baked(plan: Plan) -> bool:
    return plan.spec.backend.contains_weights


def fitting(wanted: list[Plan], source: ModelSource) -> list[Plan]:
    """The plans whose engines could compute with the weights that the model uses now."""
    return [plan for plan in wanted if not (is_baked(plan) and source.is_patched)]


def why_not_built(plan: Plan, source: ModelSource, policy: BuildPolicy) -> str | None:
    """Why a run does not get this engine built; None where it may be."""
    if not is_baked(plan):
        return None
    if source.is_patched:
        return "the engine's weights are baked in, and a LoRA changes them: switch bake off"
    if policy is BuildPolicy.BACKGROUND:
        return (
            "an engine with baked weights is built while the run waits: set build to "
            f'"{BuildPolicy.FIRST_USE.value}", or use Build Engine'
        )
    return None


def _save_weights(source: ModelSource, precision: Precision, path: Path) -> None:
    """Write the weights as a safetensors file.

    Raises:
        StoreError: no space or no permission, or the weights cannot be read now, e.g. for lack of memory.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_on_cpu(source, precision), str(path))
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"The model's weights cannot be written: {error}; free some space, then queue again"
        ) from error
    except UnsupportedModel as error:
        raise StoreError(f"The model's weights cannot be read now: {error}; queue again") from error


def _on_cpu(source: ModelSource, precision: Precision) -> dict[str, torch.Tensor]:
    """Contiguous, and each in memory of its own: the file's format knows no views."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    with source.bind(precision) as weights:
        for name, tensor in weights.items():
            moved = tensor.detach().to("cpu").contiguous()
            place = moved.untyped_storage().data_ptr()
            found[name] = moved.clone() if place in seen else moved
            seen.add(place)
    return found
