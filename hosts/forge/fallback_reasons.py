"""What an engine cannot honour in a WebUI of the Forge family. Each check gives one reason in words, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_patches import why_not_these_options

_COMPILED = "_torch_compile_config"
"""Neo's own extension leaves it in a model that it compiles."""

_MODIFIERS = {
    "block_modifiers": "changes the model between its blocks, as HyperTile and Kohya's hires fix do",
    "block_inner_modifiers": "changes the model inside of its blocks, as multi-resolution extensions do",
    "group_norm_wrapper": "replaces a normalisation of the model",
}
_IGNORED = {"transformer_options", "control", "control_model"}


def why_not_this_run(p: Any, patcher: Any) -> str | None:
    """Reasons that hold for a whole sampling run and are known at its beginning.

    Args:
        p: the WebUI's processing.
        patcher: `forge_objects.unet`.
    """
    if getattr(p, "refiner_checkpoint_info", None) is not None and getattr(p, "refiner_switch_at", None):
        return "a refiner takes over in the midst of the run"
    if getattr(patcher.model, _COMPILED, None) is not None:
        return "this WebUI's own torch.compile is on for the same model; set it to Disable"
    if name := next((name for name in patcher.object_patches if name.startswith("diffusion_model")), None):
        return f"another extension replaces {name} of the model"
    if any(getattr(patcher, "injections", None) or {}):
        return "another extension injects layers of its own into the model"
    return None


def why_not_this_call(given: Mapping[str, Any]) -> str | None:
    """Reasons that hold for one call of the UNet.

    Args:
        given: all arguments of the call that are no tensors, by name.
    """
    options = given.get("transformer_options") or {}
    if reason := why_not_these_options(options):
        return reason.replace("another node", "another extension")
    for name, what in _MODIFIERS.items():
        if options.get(name):
            return f"another extension {what}"
    if options.get("wrappers", {}).get("diffusion_model"):
        return "another extension wraps the model"
    for name, value in given.items():
        if name not in _IGNORED and value not in (None, [], {}):
            return f"the model is given {name!r}, which engines do not take"
    return None
