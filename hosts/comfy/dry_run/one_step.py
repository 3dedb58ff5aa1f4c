"""Sampling that only meets every shape: one step of each kind that a run has.

A kind of step is what takes part in it: a ControlNet that ends half-way leaves a model without control, which is
another shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ..process.build_waiting import throw_if_cancelled
from ..run.wrapper_keys import ONE_STEP, STEP_SKIP
from ..skip.skipping_sampler import SkippingSampler
from ..skip.step_skip import without_skipping


def one_step(patcher: Any) -> Any:
    """A clone of `patcher` that samples one step of each kind, and skips none; what is no model is given back."""
    if not hasattr(patcher, "add_wrapper_with_key"):
        return patcher
    from comfy.patcher_extension import WrappersMP

    clone = without_skipping(patcher)
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, ONE_STEP)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, ONE_STEP, _sample)
    wrappers = clone.wrappers[WrappersMP.OUTER_SAMPLE]
    others = {key: wrappers.pop(key) for key in list(wrappers) if key != ONE_STEP}
    wrappers.update(others)  # ours is the outermost
    return clone


def _sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(executor.original).bind(*args, **kwargs)
    guider, sigmas = executor.class_obj, given.arguments["sigmas"]
    if isinstance(sampler := given.arguments["sampler"], SkippingSampler):
        given.arguments["sampler"] = sampler._sampler
    given.arguments["callback"] = None  # a step that nobody looks at shows no preview on the user's node
    inside, conds = _without_skipping(executor), guider.conds
    result = None
    for first in first_steps(sigmas, list(_bounds(guider))):
        throw_if_cancelled()
        guider.conds = {name: [cond.copy() for cond in each] for name, each in conds.items()}
        given.arguments["sigmas"] = sigmas[first : first + 2]
        result = inside.execute(*given.args, **given.kwargs)
    return result


def first_steps(sigmas: torch.Tensor, bounds: list[float]) -> list[int]:
    """The first step of each kind.

    Args:
        sigmas: [N + 1], falling.
        bounds: sigmas at which something begins or ends.
    """
    found: dict[tuple[bool, ...], int] = {}
    for step, sigma in enumerate(sigmas[:-1].tolist()):
        kind = tuple(answer for bound in bounds for answer in (sigma <= bound, sigma < bound))
        found.setdefault(kind, step)
    return list(found.values()) or [0]


def _without_skipping(executor: Any) -> Any:
    """What is inside of our wrapper, less the wrappers that skip steps."""
    from comfy.patcher_extension import WrapperExecutor, WrappersMP

    wrappers = executor.class_obj.model_options["transformer_options"]["wrappers"][WrappersMP.OUTER_SAMPLE]
    skipping = wrappers.get(STEP_SKIP, [])
    inside = [wrapper for wrapper in executor.wrappers[executor.idx + 1 :] if wrapper not in skipping]
    return WrapperExecutor.new_class_executor(executor.original, executor.class_obj, inside)


def _bounds(guider: Any) -> Iterator[float]:
    """Sigmas at which a prompt or a ControlNet begins or ends within the run."""
    sampling = guider.model_patcher.get_model_object("model_sampling")
    for percent in _percents(guider.conds):
        if 0.0 < percent < 1.0:
            yield torch.tensor(float(sampling.percent_to_sigma(percent)), dtype=torch.float32).item()


def _percents(conds: dict[str, Any]) -> Iterator[float]:
    for cond in (cond for each in conds.values() for cond in each or []):
        yield from (float(cond[name]) for name in ("start_percent", "end_percent") if name in cond)
        control = cond.get("control")
        while control is not None:
            yield from map(float, getattr(control, "timestep_percent_range", ()))
            control = getattr(control, "previous_controlnet", None)
