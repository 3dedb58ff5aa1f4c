"""What engines cannot honour about a VAE. Each check gives one reason in words, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...model_patches import why_not_these_tensors


def why_not_this_vae(patcher: Any, model: torch.nn.Module) -> str | None:
    """Reasons that lie in how other nodes have ComfyUI patch the VAE."""
    if reason := why_nothing_of_it(patcher, model):
        return reason
    if any(getattr(patcher, "injections", {}).values()):
        return "another node injects layers of its own into the VAE"
    if getattr(patcher, "hook_patches", None):
        return "weight hooks change the VAE"
    if patcher.object_patches:
        return f"another node replaces {next(iter(patcher.object_patches))} of the VAE"
    return None


def why_nothing_of_it(patcher: Any, model: torch.nn.Module) -> str | None:
    """Those for which no part of the VAE may run on engines either."""
    import comfy.model_management as management

    if getattr(management, "in_training", False):
        return "the model is being trained"
    if patcher.model is not model:
        return "another node replaced the VAE's model"
    return None


def why_not_this_call(
    given: Any, extra: Mapping[str, Any] | tuple[Any, ...], channels: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Reasons that hold for one call of a half.

    Args:
        given: latents or pixels, as they were handed over.
        extra: whatever came with them.
        channels, dtype, device: that an engine takes.
    """
    if extra:
        return f"the VAE is given {next(iter(extra))!r}, which engines do not take"
    if not torch.is_tensor(given) or given.ndim != 4 or given.shape[1] != channels or not given.numel():
        shape = "×".join(map(str, given.shape)) if torch.is_tensor(given) else type(given).__name__
        return f"the VAE is given {shape}, and engines take pictures and their latents ({channels} channels)"
    if (given.dtype, given.device.type) != (dtype, device.type):
        return f"the VAE is given {given.dtype} on {given.device}, engines take {dtype} on {device}"
    return why_not_these_tensors((given,))
