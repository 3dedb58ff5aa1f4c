"""One sampling run of a pipeline, of which some steps are skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UnsupportedModel
from ...sampling.presets import Preset
from .conditions import Conditions, latent_of
from .plan import Plan


class Picture:
    """From the first call of a network to the last call of `scheduler.step`.

    Attributes:
        plan: None until the first step ends.
    """

    def __init__(self, pipeline: Any, scheduler: Any, preset: Preset) -> None:
        self.scheduler = scheduler
        self.plan: Plan | None = None
        self._pipeline, self._preset = pipeline, preset
        self._timesteps = scheduler.timesteps
        self._conditions = Conditions()
        self._outputs: dict[Any, Any] = {}  # of each network by its input's shape, on the meta device
        self._reason = ""  # why nothing can stand in for a network
        self._asked = 0  # for how many samples the networks were asked in the first step
        self._skips: bool | None = None  # the step that is under way; None between steps
        self._changes = 0  # of the conditions, when that was decided

    def goes_on(self, scheduler: Any) -> bool:
        """Whether the next call of a network belongs to this picture still: each picture sets its scheduler anew."""
        same = self.scheduler is scheduler and self._timesteps is scheduler.timesteps
        return same and (self.plan is None or not self.plan.is_over)

    def goes_to(self, time: Any) -> bool:
        """Whether a step at that time belongs to this picture still.

        Raises:
            UnsupportedModel: it does not, and yet its networks were not called.
        """
        goes = self.plan is None or self.plan.position_of(time) is not None
        if self._skips and not goes:
            raise UnsupportedModel(
                f"{type(self._pipeline).__name__} does not go through the steps of its scheduler one after another, "
                "so none of them can be skipped. Sample outside of skip_steps."
            )
        return goes

    def call(
        self, name: str, is_control: bool, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a network: its output, or zeros of the same shape in a step that is skipped."""
        self._conditions.call(name, getattr(self._pipeline, "_guidance_scale", None), args, kwargs)
        if self._skips is None:
            self._changes = self._conditions.changes
            self._skips = self.plan is not None and self.plan.skips_next(self._changes)
        latent = latent_of(args, kwargs)
        key = (name, None if latent is None else latent.shape)
        if self._skips and key in self._outputs:
            return _mapped(self._outputs[key], _zeros)
        if self.plan is None and not is_control and latent is not None:
            self._asked += len(latent)
        output = original(*args, **kwargs)
        if latent is None or not (is_control or _is_one_tensor(output)):
            self._reason = "the network takes or gives something else than one tensor"
        self._outputs[key] = _mapped(output, _without_numbers)
        return output

    def step(self, given: Mapping[str, Any]) -> Tensor:
        """What `scheduler.step` is to be given for its `model_output`.

        Args:
            given: its arguments.
        """
        self._conditions.end_step()
        if self.plan is None:
            # Pipelines hardly agree on how they call it; that each sample is asked for twice they do agree on.
            guided = self._asked > len(given["sample"])
            self.plan = Plan(self._pipeline, self.scheduler, self._preset, given, guided, self._reason)
        skips, self._skips = bool(self._skips), None
        # What changed in a skipped step after that was decided is for the next one to notice.
        return self.plan.step(given, skips, self._changes if skips else self._conditions.changes)


def _is_one_tensor(output: Any) -> bool:
    values = list(output.values()) if isinstance(output, dict) else output
    return isinstance(values, (list, tuple)) and len(values) == 1 and isinstance(values[0], Tensor)


def _without_numbers(tensor: Tensor) -> Tensor:
    """Of the same shape; takes no memory."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):  # as diffusers' output classes are
        return type(value)(**{name: _mapped(each, change) for name, each in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, change) for each in value)
    return value
