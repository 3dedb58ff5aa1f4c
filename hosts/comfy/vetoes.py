"""What a plain engine cannot honour. Each check gives one reason in words, or None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..source_code import why_replaced
from ..walk import layers_of

_COMPILE_KEY = "torch.compile"


def why_not_this_model(patcher: Any, model_options: Mapping[str, Any]) -> str | None:
    """Why engines would not be used for a model that is loaded."""
    return why_not_this_run(patcher, model_options) or why_not_these_layers(patcher.model.diffusion_model)


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


def why_not_these_layers(unet: torch.nn.Module) -> str | None:
    """Reasons that lie in the layers of a loaded model: what others did to them, perhaps while it was loaded."""
    layers = layers_of(unet)
    for name, layer in layers.items():
        own = layer.__dict__
        if "forward" in own or own.get(_COMPILED) is not None:
            return f"another extension changed how {name or 'the model'} computes"
    return why_replaced(unet, layers)


def replaced_in(layer: torch.nn.Module) -> str | None:
    """A method of its class that the layer itself has another one of; None where there is none."""
    own = layer.__dict__
    if own.get(_COMPILED) is not None:
        return _COMPILED
    methods = _methods_of(type(layer))
    return None if methods.isdisjoint(own) else next(name for name in own if name in methods)


def _methods_of(kind: type) -> frozenset[str]:
    """Of a class of layers, but for what every layer has itself. What others do to the class, `why_replaced` sees."""
    found = _methods.get(kind)
    if found is None:
        named = frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))
        found = _methods[kind] = named - _OF_EVERY_LAYER
    return found


_methods: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
"""Weak, since a class may know a whole model."""


_COMPILED = "_compiled_call_impl"
"""What torch calls instead of everything else, once it is there."""
_OF_EVERY_LAYER = frozenset(vars(torch.nn.Module()))


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


def why_not_these_tensors(tensors: Iterable[torch.Tensor]) -> str | None:
    """Reasons that lie in the tensors that a call is given."""
    if any(tensor.requires_grad for tensor in tensors):
        return "gradients are asked for, which engines do not give"
    return None


def why_not_these_options(options: Mapping[str, Any]) -> str | None:
    """Reasons in a call's `transformer_options`."""
    if any(options.get("patches", {}).values()):
        names = sorted(name for name, patches in options["patches"].items() if patches)
        return f"another node patches the model ({', '.join(names)})"
    if any(options.get("patches_replace", {}).values()):
        names = sorted(name for name, patches in options["patches_replace"].items() if patches)
        return f"another node replaces parts of the model ({', '.join(names)}), as IP-Adapter and PAG do"
    if "optimized_attention_override" in options:
        return "another node replaces the attention function"
    if options.get("rope_options"):
        return "another node scales or shifts the model's positions (rope_options)"
    return None
