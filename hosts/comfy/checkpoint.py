"""Which weights a model has, and which file they came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ... import STARTED
from ...engine_cache import WeightsMemo, digest_tensors, file_identity

_digests: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def unet_digest(patcher: Any, memo: WeightsMemo | None) -> str:
    """Digest of the UNet's unpatched weights.

    Computed once for a loaded model, and once for an unchanged checkpoint file, since it reads gigabytes. It only says
    with which weights an engine was verified; the weights that an engine computes with are always the live ones.
    """
    unet = patcher.model.diffusion_model
    if unet not in _digests:
        _digests[unet] = _remembered_digest(patcher, memo)
    return _digests[unet]


def _remembered_digest(patcher: Any, memo: WeightsMemo | None) -> str:
    # Whatever is applied now, the original comes first in each list: (weight, convert function).
    weights = {name: entry[0][0] for name, entry in patcher.get_key_patches("diffusion_model.").items()}
    path = _checkpoint_of(patcher)
    if memo is None or path is None:
        return digest_tensors(weights)
    part = _stored_as(weights)
    if (known := memo.get(path, part)) is not None:
        return known
    seen = file_identity(path)
    digest = digest_tensors(weights)
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
    """One file gives other numbers when it is loaded in another dtype."""
    return "unet " + "+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}))
