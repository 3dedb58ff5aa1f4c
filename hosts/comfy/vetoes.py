"""What a plain engine cannot honour. Each check gives one reason in words, or None."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COMPILE_KEY = "torch.compile"


def why_not_this_run(patcher: Any, model_options: Mapping[str, Any]) -> str | None:
    """Reasons that hold for a whole sampling run and are known at its beginning."""
    import comfy.model_management as management
    import comfy.patcher_extension as extension

    if getattr(management, "in_training", False):
        return "the model is being trained"
    if any(getattr(patcher, "injections", {}).values()):
        return "another node injects layers of its own into the model"
    if getattr(patcher, "hook_patches", None):
        return "weight hooks change the model between steps"
    if any(name.startswith("diffusion_model") for name in patcher.object_patches):
        name = next(name for name in patcher.object_patches if name.startswith("diffusion_model"))
        return f"another node replaces {name} of the model"
    options = model_options.get("transformer_options", {})
    if extension.get_wrappers_with_key(extension.WrappersMP.APPLY_MODEL, _COMPILE_KEY, options):
        return "TorchCompileModel compiles the same model; remove one of the two nodes"
    return None


def why_not_this_call(given: Mapping[str, Any]) -> str | None:
    """Reasons that hold for one call of the UNet.

    Args:
        given: all arguments of the call that are no tensors, by name, a ControlNet's apart.
    """
    if reason := why_not_these_options(given.get("transformer_options") or {}):
        return reason
    for name, value in given.items():
        if name != "transformer_options" and value not in (None, [], {}):
            return f"the model is given {name!r}, which engines do not take"
    return None


def why_not_in_this_mode(device: torch.device) -> str | None:
    """Reasons that lie in what torch does with each of its functions just now, compiled code's apart."""
    if torch.is_autocast_enabled(device.type):
        return "another node has torch compute in lower precision (autocast)"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    if other := next((mode for mode in modes if not isinstance(mode, DeviceContext)), None):
        return f"another node changes what torch's functions do ({type(other).__name__})"
    return None


def why_not_these_tensors(tensors: Iterable[torch.Tensor]) -> str | None:
    """Reasons that lie in the tensors that a call is given."""
    if any(tensor.requires_grad for tensor in tensors):
        return "gradients are asked for, which engines do not give"
    return None


def why_not_these_options(options: Mapping[str, Any]) -> str | None:
    """Reasons in a call's `transformer_options`."""
    patches = options.get("patches", {})
    if any(patches.values()) and not _are_idle(patches, options):
        names = sorted(name for name, those in patches.items() if those)
        return f"another node patches the model ({', '.join(names)})"
    if any(options.get("patches_replace", {}).values()):
        names = sorted(name for name, patches in options["patches_replace"].items() if patches)
        return f"another node replaces parts of the model ({', '.join(names)}), as IP-Adapter and PAG do"
    if "optimized_attention_override" in options:
        return "another node replaces the attention function"
    if options.get("rope_options"):
        return "another node scales or shifts the model's positions (rope_options)"
    return None


_DEEP_SHRINK = "comfy_extras.nodes_model_downscale"


def _are_idle(patches: Mapping[str, Iterable[Any]], options: Mapping[str, Any]) -> bool:
    """Whether all patches are those of Kohya Deep Shrink, at a noise level at which it leaves everything as it is."""
    functions = [each for those in patches.values() for each in those]
    if any(getattr(each, "__globals__", {}).get("__name__") != _DEEP_SHRINK for each in functions):
        return False
    sigmas = options.get("sigmas")
    if sigmas is None:
        return False
    sigma = float(sigmas[0])
    windows = [inspect.getclosurevars(each).nonlocals for each in functions]
    begins = [(each["sigma_end"], each["sigma_start"]) for each in windows if "sigma_start" in each]
    return bool(begins) and not any(end <= sigma <= start for end, start in begins)
