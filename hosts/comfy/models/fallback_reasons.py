"""What a plain engine cannot honour. Each check gives one reason in words, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...model_patches import why_not_these_options

ON_ANOTHER_GPU = "this part of the batch runs on another GPU's copy of the model"

_COMPILE_KEY = "torch.compile"


def why_not_this_run(patcher: Any, model_options: Mapping[str, Any]) -> str | None:
    """Reasons that hold for a whole sampling run and are known at its beginning."""
    if reason := why_nothing_of_it(model_options):
        return reason
    if any(getattr(patcher, "injections", {}).values()):
        return "another node injects layers of its own into the model"
    if getattr(patcher, "hook_patches", None):
        return "weight hooks change the model between steps"
    if name := next((name for name in patcher.object_patches if name.startswith("diffusion_model")), None):
        return f"another node replaces {name} of the model"
    return None


def why_nothing_of_it(model_options: Mapping[str, Any]) -> str | None:
    """Those for which no part of the model may run on engines either."""
    import comfy.model_management as management
    import comfy.patcher_extension as extension

    if getattr(management, "in_training", False):
        return "the model is being trained"
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
