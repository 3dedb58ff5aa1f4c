"""Which weights a model has, and which file they came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ....core.version import STARTED
from ....engine_cache import WeightsMemo, digest_tensors, file_identity
from ...architecture import Remembered

_digests: Remembered[str] = Remembered()


def unet_digest(patcher: Any, memo: WeightsMemo | None) -> str:
    """Digest of the UNet's unpatched weights.

    Computed once for a loaded model, and once for an unchanged checkpoint file, since it reads gigabytes. It only says
    with which weights an engine was verified; the weights that an engine computes with are always the live ones.
    """
    return _digests.get(patcher.model.diffusion_model, None, lambda: _remembered_digest(patcher, memo))


def original_digest(patcher: Any, module: torch.nn.Module, names: frozenset[str]) -> str:
    """Digest of some of a module's unpatched weights, computed once while it is loaded.

    Args:
        patcher: of this very module.
        names: in its state dict.
    """

    def digest() -> str:
        weights = _original(patcher)
        return digest_tensors({name: weights[name] for name in names}, patcher.load_device)

    return _digests.get(module, names, digest)


def _original(patcher: Any, prefix: str | None = None) -> dict[str, torch.Tensor]:
    """Whatever is applied now, the original comes first in each list: (weight, convert function)."""
    return {name: entry[0][0] for name, entry in patcher.get_key_patches(prefix).items()}


def _remembered_digest(patcher: Any, memo: WeightsMemo | None) -> str:
    weights = _original(patcher, "diffusion_model.")
    path = _checkpoint_of(patcher)
    if memo is None or path is None:
        return digest_tensors(weights, patcher.load_device)
    part = _stored_as(weights)
    if (known := memo.get(path, part)) is not None:
        return known
    seen = file_identity(path)
    digest = digest_tensors(weights, patcher.load_device)
    memo.put(path, digest, seen, part)
    return digest


def _checkpoint_of(patcher: Any) -> Path | None:
    """The file that ComfyUI's loader read; None where it does not say (before 0.16, other loaders)."""
    loader = getattr(patcher, "cached_patcher_init", None)
    path = loader[1][0] if loader and loader[1] else None
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    found = os.stat(path)
    # A file that was replaced since may not be the one that was loaded.
    return Path(path) if max(found.st_mtime, found.st_ctime) < STARTED else None


def _stored_as(weights: dict[str, torch.Tensor]) -> str:
    """The dtype counts too: one file gives other weights when it is loaded in another dtype."""
    return "unet sums " + "+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}))
