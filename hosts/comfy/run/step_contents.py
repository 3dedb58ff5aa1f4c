"""What a step of a run consists of, read from ComfyUI's guider: is it the same work each time, and on what?"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ....core.protocols import Tensors
from ...live_model.held_weights import version_of
from ...live_model.source_code import is_own
from ...model_patches import why_not_these_options

_PREFIX = "cond_"
_NOT_EACH_STEP = ("area", "mask", "hooks", "gligen", "default", "timestep_start", "timestep_end")
_OTHERS_COMBINE = (
    "model_function_wrapper",
    "sampler_cfg_function",
    "sampler_calc_cond_batch_function",
    "context_handler",
    "multigpu_clones",
)
_FUNCTIONS = (
    "sampling_function",
    "calc_cond_batch",
    "_calc_cond_batch_outer",
    "_calc_cond_batch",
    "cfg_function",
    "get_area_and_mult",
    "cond_cat",
)
_METHODS = ("apply_model", "_apply_model")
_OTHERS_LOOK = ("sampler_pre_cfg_function", "sampler_post_cfg_function")


def why_other_code(model: Any) -> str | None:
    """Which of the functions that a whole step stands for is not ComfyUI's own; None where all are."""
    import comfy.samplers as samplers

    owners = [(samplers, _FUNCTIONS), (samplers.CFGGuider, ("predict_noise",)), (type(model), _METHODS)]
    for owner, names in owners:
        for name in names:
            function = getattr(owner, name, None)
            if function is not None and not (isinstance(function, FunctionType) and is_own(function, "comfy")):
                return f"another extension replaced {name}"
    return next((f"another extension replaced {name}" for name in _METHODS if name in vars(model)), None)


def why_not_whole(guider: Any, model_options: dict[str, Any], x: torch.Tensor, key: str) -> str | None:
    """Why a step is not the same work as any other of its run; None where it is.

    Args:
        key: of our own wrappers.
    """
    from comfy.samplers import CFGGuider

    own = type(guider).predict_noise is CFGGuider.predict_noise and "predict_noise" not in vars(guider)
    if not own or not isinstance(guider.cfg, (int, float)):
        return "this guider combines prompts in a way of its own"
    if any(model_options.get(name) is not None for name in _OTHERS_COMBINE) or any(
        model_options.get(name) for name in _OTHERS_LOOK
    ):
        return "another node has a part in how prompts are combined"
    options = model_options.get("transformer_options", {})
    if reason := _why_not_these_wrappers(options, key) or why_not_these_options(options):
        return reason
    if _has_callbacks(guider.model_patcher):
        return "another node is told of each step"
    if x.requires_grad or x.ndim not in (4, 5) or getattr(x, "is_nested", False):
        return "the latent is of a rare kind"
    return _why_not_these_conds(guider)


def _why_not_these_wrappers(options: dict[str, Any], key: str) -> str | None:
    from comfy.patcher_extension import WrappersMP

    wrappers = options.get("wrappers", {})
    for kind in (WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL):
        if any(those for owner, those in wrappers.get(kind, {}).items() if owner != key):
            return "another node wraps the model"
    return None


def _has_callbacks(patcher: Any) -> bool:
    from comfy.patcher_extension import CallbacksMP

    kind = getattr(CallbacksMP, "ON_PREPARE_STATE", None)
    return kind is not None and bool(patcher.get_all_callbacks(kind))


def _why_not_these_conds(guider: Any) -> str | None:
    from comfy.conds import CONDCrossAttn, CONDNoiseShape, CONDRegular

    lists = [guider.conds.get("positive"), guider.conds.get("negative")]
    conds = [entries[0] for entries in lists if entries]
    if not lists[0] or any(entries is not None and len(entries) != 1 for entries in lists):
        return "a picture of several prompts"
    for cond in conds:
        if any(cond.get(name) is not None for name in _NOT_EACH_STEP) or cond.get("strength", 1.0) != 1.0:
            return "a prompt for a part of the picture or of the run"
        if any(
            type(value) not in (CONDRegular, CONDNoiseShape, CONDCrossAttn) for value in cond["model_conds"].values()
        ):
            return "a rare kind of conditioning"
    if len({frozenset(cond["model_conds"]) for cond in conds}) != 1:
        return "prompts of different kinds"
    if any(cond.get("control") is not conds[0].get("control") for cond in conds):
        return "a ControlNet for one of the prompts"
    return _why_not_this_chain(conds[0].get("control"))


def _why_not_this_chain(control: Any) -> str | None:
    from .controlnet_calls import AcceleratedControlNet

    if any(not isinstance(each, AcceleratedControlNet) or each.calls().why_not() for each in _chain(control)):
        return "a ControlNet without an engine"
    return None


def chain_of(guider: Any) -> list[Any]:
    """The ControlNets of a step, in the order in which they are computed."""
    return [*_chain(conds_of(guider, (0,))[0].get("control"))][::-1]


def _chain(control: Any) -> Iterator[Any]:
    """A ControlNet and those before it, the last to be computed first."""
    while control is not None:
        yield control
        control = control.previous_controlnet


def controls_of(guider: Any) -> list[Any]:
    """All ControlNets of a run, each once, whichever prompts they are for."""
    conds = [cond for each in guider.conds.values() for cond in each or ()]
    found = {id(control): control for cond in conds for control in _chain(cond.get("control"))}
    return list(found.values())


def behind(prefix: str, tensors: Tensors) -> Tensors:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def kind_of_control(control: Any) -> Hashable:
    """Every value of a ControlNet that a captured graph holds as a constant."""
    extra = tuple(sorted((name, repr(value)) for name, value in control.extra_args.items()))
    return (
        weakref.ref(control.control_model),
        control.strength,
        control.strength_type,
        control.global_average_pooling,
        control.manual_cast_dtype,
        tuple(control.extra_conds),
        extra,
    )


def kind_of_sampling(model: Any) -> Hashable:
    """The model, and every value of its noise schedule that a captured graph holds as a constant."""
    sampling = model.model_sampling
    numbers = {name: value for name, value in vars(sampling).items() if isinstance(value, (bool, int, float, str))}
    return weakref.ref(model), weakref.ref(sampling), tuple(sorted(numbers.items()))


def kind_of_conditions(guider: Any, order: tuple[int, ...]) -> Hashable:
    """What conditions the model, apart from tensor values: equal where it gives inputs of the same shapes."""
    return tuple(
        (name, type(cond), tuple(cond.cond.shape), cond.cond.dtype)
        for each in _model_conds(guider, order)
        for name, cond in sorted(each.items())
    )


_Source = tuple[torch.Tensor, str, int]
"""A conditioning tensor, its name and its version."""


@dataclass(frozen=True)
class Conditions:
    """What conditions the model in every step of a run, as one batch on its device.

    Attributes:
        tensors: by the name of the model's argument behind a prefix.
    """

    tensors: Tensors
    _sources: tuple[_Source, ...]
    _batch: int

    @classmethod
    def of(cls, guider: Any, x: torch.Tensor, order: tuple[int, ...], device: torch.device) -> Conditions:
        """
        Args:
            order: which prompts make up the batch, see `Pattern`.
        """
        sources = _model_conds(guider, order)
        first, *others = [
            {name: _processed(cond, x.shape[0], device) for name, cond in them.items()} for them in sources
        ]
        tensors = {_PREFIX + name: cond.concat([other[name] for other in others]) for name, cond in first.items()}
        return cls(tensors, _tensors_of(sources), x.shape[0])

    def are_of(self, guider: Any, x: torch.Tensor, order: tuple[int, ...]) -> bool:
        """Whether they are what these very conditions give."""
        now = _tensors_of(_model_conds(guider, order))
        same = len(now) == len(self._sources) and all(
            one[0] is other[0] and one[1:] == other[1:] for one, other in zip(now, self._sources, strict=True)
        )
        return same and x.shape[0] == self._batch

    @staticmethod
    def named(tensors: Tensors) -> dict[str, Any]:
        """Those of a graph's inputs, by the names of the model's arguments."""
        return behind(_PREFIX, tensors)


def _tensors_of(conds: list[dict[str, Any]]) -> tuple[_Source, ...]:
    """What they are made of: another tensor, or one that was written into, is another condition."""
    return tuple((cond.cond, name, version_of(cond.cond)) for each in conds for name, cond in sorted(each.items()))


def _processed(cond: Any, batch_size: int, device: torch.device) -> Any:
    """A condition for a batch, moved before it becomes a part of one: there a copy wakes no threads of the CPU."""
    found = cond.process_cond(batch_size=batch_size, area=None)
    return type(found)(found.cond.to(device))


def conds_of(guider: Any, order: tuple[int, ...]) -> list[dict[str, Any]]:
    """The one prompt and the one negative prompt, in the order of a batch, see `Pattern`."""
    lists = {0: guider.conds.get("positive"), 1: guider.conds.get("negative")}
    return [lists[place][0] for place in order]


def _model_conds(guider: Any, order: tuple[int, ...]) -> list[dict[str, Any]]:
    return [cond["model_conds"] for cond in conds_of(guider, order)]
