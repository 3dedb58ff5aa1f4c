"""What ComfyUI, and the WebUIs whose code comes from it, let extensions patch in one call of a model.

Each check gives one reason why an engine cannot serve the call, or None.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def why_not_in_this_mode(device: torch.device) -> str | None:
    """Reasons in modes of torch that are active now: autocast, and modes that change what its functions do."""
    if torch.is_autocast_enabled(device.type):
        return "another node has torch compute in lower precision (autocast)"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    if other := next((mode for mode in modes if not isinstance(mode, DeviceContext)), None):
        return f"another node changes what torch's functions do ({type(other).__name__})"
    return None


def why_not_these_tensors(tensors: Iterable[torch.Tensor]) -> str | None:
    """Reasons in the tensors of a call: gradients are wanted."""
    if any(tensor.requires_grad for tensor in tensors):
        return "gradients are asked for, which engines do not give"
    return None


def why_not_these_options(options: Mapping[str, Any]) -> str | None:
    """Reasons in a call's `transformer_options`."""
    patches = options.get("patches", {})
    if (names := _names_in(patches)) and not _are_idle(patches, options):
        return f"another node patches the model ({', '.join(names)})"
    if names := _names_in(options.get("patches_replace", {})):
        return f"another node replaces parts of the model ({', '.join(names)}), as IP-Adapter and PAG do"
    if "optimized_attention_override" in options:
        return "another node replaces the attention function"
    if options.get("rope_options"):
        return "another node scales or shifts the model's positions (rope_options)"
    return None


def is_there(patches: Any) -> bool:
    """Whether there are any patches, whatever it is that others put there."""
    return isinstance(patches, torch.Tensor) or bool(patches)


def _names_in(patches: Mapping[Any, Any]) -> list[str]:
    return sorted(str(name) for name, those in patches.items() if is_there(those))


_DEEP_SHRINK = "comfy_extras.nodes_model_downscale"


def _are_idle(patches: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether all patches are those of Kohya Deep Shrink, at a noise level at which it leaves everything as it is."""
    functions: list[Any] = [
        each for those in patches.values() for each in (those if isinstance(those, list) else [those])
    ]
    if any(getattr(each, "__globals__", {}).get("__name__") != _DEEP_SHRINK for each in functions):
        return False
    sigmas = options.get("sigmas")
    if sigmas is None:
        return False
    sigma = float(sigmas[0])
    windows = [inspect.getclosurevars(each).nonlocals for each in functions]
    begins = [(each["sigma_end"], each["sigma_start"]) for each in windows if "sigma_start" in each]
    return bool(begins) and not any(end <= sigma <= start for end, start in begins)
