"""Step skipping in the Forge family: around the prediction of a step, outside of guidance, ControlNets and engines.

A conditioning modifier, the last of them, asks the host for the prediction where it is computed; in every step it then
leaves the host nothing to compute and gives the result by a function that comes after guidance. So previews,
inpainting, progress and prompt schedules stay the host's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...sampling.presets import Preset
from ...sampling.run import Skipped, SkippingRun
from ...sampling.task import Task
from ..equal_by_value import equal_by_value
from ..step_conditions import StepConditions
from .families import Family

_MODIFIERS = "conditioning_modifiers"
Conds = list[dict[str, Any]]


@contextmanager
def skipping(
    family: Family, patcher: Any, denoiser: Any, preset: Preset, task: Task, tell: Callable[[Skipped], None]
) -> Iterator[None]:
    """A run whose predictions are skipped as `preset` says.

    Args:
        patcher: `forge_objects.unet` of the run.
        denoiser: the host's `CFGDenoiser`.
        tell: told what happened.

    Raises:
        ValueError: the preset's steps do not belong to a run of that length.
    """
    steps, rule = task.steps, preset.rule_for(task)
    if reason := preset.why_not(task):
        yield
        tell(Skipped(preset.name, task.sampler, steps, steps, 0, rule.value, reason))
        return
    run = SkippingRun(task.sigmas, preset.computed(task), rule)
    modifier = _Modifier(family, denoiser, run)
    options = patcher.model_options
    options[_MODIFIERS] = [*options.get(_MODIFIERS, []), modifier]
    try:
        yield
    finally:
        options[_MODIFIERS] = [each for each in options[_MODIFIERS] if each is not modifier]
        counts = run.computed_calls + modifier.passed, run.skipped_calls
        run.forget()
        tell(Skipped(preset.name, task.sampler, steps, *counts, rule.value, "", preset.remark(task)))


class _Modifier:
    """See the module.

    Attributes:
        passed: calls that were left to the host as they are.
    """

    def __init__(self, family: Family, denoiser: Any, run: SkippingRun) -> None:
        self._family, self._denoiser, self._run = family, denoiser, run
        self._prompts = _Prompts()
        self._conditions = StepConditions(self._prompts)
        self.passed = 0

    def __deepcopy__(self, memo: Any) -> _Modifier:
        return self  # patchers copy their options when they are cloned

    def __call__(
        self,
        model: Any,
        x: torch.Tensor,
        timestep: torch.Tensor,
        uncond: Conds | None,
        cond: Conds,
        cond_scale: float,
        model_options: dict[str, Any],
        seed: Any,
    ) -> tuple[Any, ...]:
        # Some samplers ask for more than the prediction, and video is computed in windows.
        if getattr(self._denoiser, "need_last_noise_uncond", False) or x.ndim != 4:
            self.passed += 1
            return model, x, timestep, uncond, cond, cond_scale, model_options, seed

        def compute() -> torch.Tensor:
            predict = self._family.predict()
            return predict(model, x, timestep, uncond, cond, cond_scale, model_options, seed)

        sigma = float(timestep.flatten()[0])
        self._prompts.look(cond, uncond or [], cond_scale)
        denoised = self._run(x, sigma, compute, self._conditions.next(sigma))
        after = {"sampler_post_cfg_function": [lambda _: denoised]}
        return model, x, timestep, None, [], 1.0, after, seed


class _Prompts:
    """What `StepConditions` looks at. Hosts make conditions anew in every step, so they are compared by value."""

    def __init__(self) -> None:
        self.conds: dict[str, Conds] = {}
        self.cfg: float | None = None

    def look(self, cond: Conds, uncond: Conds, cfg: float) -> None:
        self.cfg = float(cfg)
        now = {"positive": cond, "negative": uncond}
        if not equal_by_value(self.conds, now, holder="cond"):
            self.conds = now
