"""How the calls of a live diffusion model are led elsewhere for the length of one sampling run.

The model's own modules stay where they are: LoRA, offloading and saving keep working, whatever happens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ...stand_in import Compute, stand_in
from ..models.model_classes import ModelClass
from .wrapper_keys import ACCELERATE, RECORDING


def lead_calls(model_options: dict[str, Any], kind: ModelClass, key: str, compute: Compute) -> None:
    """Lead the calls of a run through `compute`, inside of all that other nodes put around them.

    Args:
        model_options: this run's own copy.
        key: of the wrapper.
    """
    from comfy.patcher_extension import WrappersMP

    where = WrappersMP.DIFFUSION_MODEL if kind.has_wrappers else WrappersMP.APPLY_MODEL
    wrapper = functools.partial(_around_the_module if kind.has_wrappers else _around_the_model, compute)
    put_innermost(wrappers_of(model_options, where), key, wrapper)


def are_led(options: Mapping[str, Any]) -> bool:
    """Whether an accelerated model leads the calls that are given these `transformer_options`."""
    from comfy.patcher_extension import WrappersMP

    wrappers = options.get("wrappers", {})
    return any(ACCELERATE in wrappers.get(where, {}) for where in (WrappersMP.DIFFUSION_MODEL, WrappersMP.APPLY_MODEL))


def wrappers_of(model_options: dict[str, Any], where: str) -> dict[str, list[Any]]:
    """Of a run's own options, by their keys: they run in the order of the dict, the first outside of the others."""
    options = model_options.setdefault("transformer_options", {})
    found: dict[str, list[Any]] = options.setdefault("wrappers", {}).setdefault(where, {})
    return found


def put_innermost(wrappers: dict[str, list[Any]], key: str, wrapper: Any) -> None:
    """In place of one of the same key."""
    wrappers.pop(key, None)
    wrappers[key] = [wrapper]


def put_around_ours(wrappers: dict[str, list[Any]], key: str, wrapper: Any) -> None:
    """Inside of what other nodes put there, and outside of what stands in for the model."""
    inner = {name: wrappers.pop(name) for name in (RECORDING, ACCELERATE) if name in wrappers}
    put_innermost(wrappers, key, wrapper)
    wrappers.update(inner)


def put_outermost(wrappers: dict[str, list[Any]], key: str, wrapper: Any) -> None:
    """In place of one of the same key."""
    others = {name: each for name, each in wrappers.items() if name != key}
    wrappers.clear()
    wrappers.update({key: [wrapper], **others})


def _around_the_module(compute: Compute, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return compute(executor.class_obj, executor, args, kwargs)


def _around_the_model(compute: Compute, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with stand_in(executor.class_obj, compute):
        result: torch.Tensor = executor(*args, **kwargs)
        return result
