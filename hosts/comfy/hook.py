"""How the calls of a live diffusion model are led elsewhere for the length of one sampling run.

The model's own modules stay where they are: LoRA, offloading and saving keep working, whatever happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .model_classes import ModelClass

Plain = Callable[..., torch.Tensor]
Compute = Callable[[Any, Plain, tuple[Any, ...], dict[str, Any]], torch.Tensor]
"""Given the module that is called, a way to call it as it is, and the call's arguments."""

_NAME = "diffusion_model"


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


def wrappers_of(model_options: dict[str, Any], where: str) -> dict[str, list[Any]]:
    """Of a run's own options, by their keys: they run in the order of the dict, the first outside of the others."""
    options = model_options.setdefault("transformer_options", {})
    found: dict[str, list[Any]] = options.setdefault("wrappers", {}).setdefault(where, {})
    return found


def put_innermost(wrappers: dict[str, list[Any]], key: str, wrapper: Any) -> None:
    """In place of one of the same key."""
    wrappers.pop(key, None)
    wrappers[key] = [wrapper]


def _around_the_module(compute: Compute, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return compute(executor.class_obj, executor, args, kwargs)


def _around_the_model(compute: Compute, executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with _stand_in(executor.class_obj, compute):
        result: torch.Tensor = executor(*args, **kwargs)
        return result


@contextmanager
def _stand_in(model: torch.nn.Module, compute: Compute) -> Iterator[None]:
    """Let `model.diffusion_model` be a stand-in: an attribute of the instance, which hides the submodule.

    While the stand-in is called, the submodule is back: whoever looks meanwhile, at its weights say, finds it.
    """
    module: Any = model.diffusion_model
    attributes = vars(model)

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        del attributes[_NAME]
        try:
            return compute(module, module, args, kwargs)
        finally:
            attributes[_NAME] = stand_in

    stand_in = _StandIn(module, call)
    attributes[_NAME] = stand_in
    try:
        yield
    finally:
        del attributes[_NAME]


class _StandIn:
    """A module whose calls are led elsewhere; in all else it is the module."""

    def __init__(self, module: Any, call: Plain) -> None:
        self._module = module
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
