"""Which steps of one picture are computed, and what the others are filled in with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.errors import UnsupportedModel, warn_once
from ...sampling.few_steps import few_step_name
from ...sampling.presets import Preset
from ...sampling.run import SkippingRun
from ...sampling.task import Task
from .schedulers import Terms, Timeline, is_distilled, sampler_name

log = logging.getLogger(__name__)


class Plan:
    """Made when a picture's first step ends: only then a scheduler is told all that it samples with.

    Attributes:
        sampler: ComfyUI's name of the scheduler's method.
        steps: of the picture.
        rule: for the skipped ones.
        reason: why every one is computed; empty where that is not so.
        remark: what else people should know of it.

    Raises:
        ValueError: the preset's steps do not belong to a picture of so many.
    """

    def __init__(
        self, pipeline: Any, scheduler: Any, preset: Preset, given: Mapping[str, Any], guided: bool, reason: str
    ) -> None:
        """
        Args:
            given: arguments of the first call of `scheduler.step`.
            guided: a negative prompt took part in it.
            reason: that is known already, or nothing.
        """
        self._scheduler, self._timeline, self._position = scheduler, Timeline(scheduler), -1
        first = self._timeline.position(given["timestep"], after=-1) or 0
        # Less than the rest where a pipeline leaves the end to another one.
        count = getattr(pipeline, "_num_timesteps", None) or len(self._timeline.terms)
        self._terms = dict(enumerate(self._timeline.terms[first : first + count], first))
        self._sigmas = list(dict.fromkeys(terms.sigma for terms in self._terms.values()))  # PNDM has one twice
        self.steps = len(self._sigmas)
        self.sampler = sampler_name(scheduler, given.get("eta") or 0.0)
        levels = (*self._sigmas, 0.0)
        has_mask = "Inpaint" in type(pipeline).__name__
        named = few_step_name([str(getattr(pipeline, "name_or_path", None) or "")])
        task = Task(
            self.sampler,
            self.steps,
            guided,
            has_mask,
            is_distilled=bool(named) or is_distilled(scheduler),
            distilled_by=named,
            sigmas=levels,
            cfg=_guidance(pipeline) if guided else 1.0,
        )
        self.rule = preset.rule_for(task)
        reasons = (reason, self._timeline.reason, _why_not_this_call(given), preset.why_not(task))
        self.reason = next(filter(None, reasons), "")
        self.remark = "" if self.reason else preset.remark(task)
        self._computed = tuple(range(self.steps)) if self.reason else preset.computed(task)
        self._run = SkippingRun(levels, self._computed, self.rule)
        self._changes, self._forced = -1, 0
        if self.reason:
            log.warning("Slipstream skips no steps: %s", self.reason)
        if self.remark:
            warn_once(log, f"Slipstream skips steps as in {preset.name}: {self.remark}")

    @property
    def is_over(self) -> bool:
        return self._position >= max(self._terms, default=0)

    @property
    def counts(self) -> tuple[int, int]:
        """Steps that were computed, and that were skipped; all of them where there is a reason for that."""
        return (self.steps, 0) if self.reason else (self._run.computed_calls, self._run.skipped_calls)

    @property
    def came_to_nothing(self) -> bool:
        """Whether the picture is done, and no step was skipped although some should have been."""
        return self.is_over and not self._run.skipped_calls and len(self._computed) < self.steps

    def position_of(self, time: Any) -> int | None:
        """Where among the scheduler's steps that time is; None where it is none to come."""
        return self._timeline.position(time, self._position)

    def skips_next(self, changes: int) -> bool:
        """Whether the next step is skipped.

        Args:
            changes: of the conditions; the step is computed where there were any since the last one.
        """
        return self._skips(self._position + 1, changes)

    def step(self, given: Mapping[str, Any], skips: bool, changes: int) -> Tensor:
        """What the scheduler is to be given for its `model_output`.

        Args:
            given: its arguments.
            skips: the networks were not called.
            changes: of the conditions.

        Raises:
            UnsupportedModel: they were not, and nothing can stand in for them.
        """
        predicted: Tensor = given["model_output"]
        position = self.position_of(given["timestep"])
        may_skip = position is not None and self._skips(position, changes)
        if skips and not may_skip:
            raise _lost()
        self._forced += may_skip and not skips  # computed after all: then it counts as the first one
        self._position, self._changes = self._position + 1 if position is None else position, changes
        if self.reason or self._position not in self._terms:
            return predicted
        return self._filled_in(self._terms[self._position], given, skips)

    def _skips(self, position: int, changes: int) -> bool:
        here, before = self._terms.get(position), self._terms.get(self._position)
        if self.reason or here is None or before is None or changes != self._changes:
            return False
        return here.sigma < before.sigma and self._sigmas.index(here.sigma) not in self._computed

    def _filled_in(self, terms: Terms, given: Mapping[str, Any], skips: bool) -> Tensor:
        predicted: Tensor = given["model_output"]
        latent: Tensor = given["sample"].float()
        if hasattr(self._scheduler, "scale_model_input"):
            latent = self._scheduler.scale_model_input(latent, given["timestep"])

        def compute() -> Tensor:
            if skips:
                raise _lost()
            return terms.denoised(latent, predicted.float())

        conditions = (self._changes, self._forced)
        denoised = self._run(terms.common(latent), terms.sigma, compute, conditions)
        return terms.predicted(latent, denoised).to(predicted.dtype) if skips else predicted


def _guidance(pipeline: Any) -> float | None:
    """The scale of guidance, where a pipeline tells it; it may be of another kind, so it is asked for where guided."""
    scale = getattr(pipeline, "guidance_scale", None)
    return float(scale) if isinstance(scale, (int, float)) else None


def _why_not_this_call(given: Mapping[str, Any]) -> str | None:
    if given["model_output"].shape != given["sample"].shape:
        return "the network predicts something else than the latent alone"
    if given.get("per_token_timesteps") is not None:
        return "parts of the latent have noise of their own"
    return None


def _lost() -> UnsupportedModel:
    return UnsupportedModel(
        "The pipeline did not take the step whose networks were skipped, so this picture cannot go on. Sample outside "
        "of skip_steps; it serves pipelines that go through their scheduler's steps one after another."
    )
