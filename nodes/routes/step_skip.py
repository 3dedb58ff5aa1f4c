"""The route that says which steps a choice of Step Skip computes, before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from ...sampling.few_steps import few_step_name
from ...sampling.presets import CUSTOM, HISTORICAL, Preset
from ...sampling.task import Task
from .guard import Answer, Route, asks
from .rules import Refused

_NUMBERS = {
    "steps": int, "denoise": float, "start_at_step": int, "end_at_step": int, "cfg": float,
    "share": float, "computed_steps": int, "power": float,
}  # fmt: skip
_RUN = "steps", "denoise", "start_at_step", "end_at_step", "cfg"
_MOST_STEPS = 10000
_NOT_KNOWN: Answer = {
    "steps": None, "computed": None, "reason": "", "remark": "", "picture_db": None, "presets": {},
}  # fmt: skip
_T = TypeVar("_T")


@asks("preset", "sampler", "scheduler", "files", "step_list", "mask", *_NUMBERS)
def foresee(request: web.Request) -> Answer:
    from ..shared.skip_inputs import known_presets, preset_of

    query = request.query
    given = {name: _number(query[name], name, kind) for name, kind in _NUMBERS.items() if name in query}
    run = {name: given.pop(name) for name in _RUN if name in given}
    task = _task_of(query, run)
    try:
        chosen = preset_of(query.get("preset", CUSTOM), step_list=query.get("step_list", ""), **given)
        if task is None:
            return {**_NOT_KNOWN, "offered": [*(name for name in known_presets() if name != HISTORICAL), CUSTOM]}
        computed, reason = _foreseen(chosen, task)
    except ValueError as error:
        raise Refused("bad_request", str(error)) from None
    others = {name: _foreseen(preset, task) for name, preset in known_presets().items()}
    presets = {name: {"computed": len(steps), "reason": why} for name, (steps, why) in others.items()}
    remark = "" if reason else chosen.remark(task)
    shown = {"computed": computed, "reason": reason, "remark": remark, "picture_db": _picture_db(chosen, task, reason)}
    return {"steps": task.steps, **shown, "presets": presets, "offered": _offered(presets)}


def _task_of(query: Mapping[str, str], run: dict[str, Any]) -> Task | None:
    """The run that is asked about; None where its steps, sampler or CFG are not told, on which all depends.

    Raises:
        Refused: a number is out of range.
    """
    from ...hosts.comfy.skip.sampling_task import foreseen_steps

    if not 1 <= run.get("steps", 1) <= _MOST_STEPS:
        raise Refused("bad_request", f"steps must be a whole number from 1 to {_MOST_STEPS}.")
    if not 0 <= run.get("denoise", 1) <= 1:
        raise Refused("bad_request", "denoise must be a number from 0 to 1.")
    if "sampler" not in query or not {"steps", "cfg"} <= run.keys():
        return None
    cfg, sampler, scheduler = run.pop("cfg"), query["sampler"], query.get("scheduler", "")
    steps = foreseen_steps(sampler, scheduler, **run)
    few = few_step_name(query.get("files", "").split("|"))
    return Task(
        sampler,
        steps,
        guided=cfg > 1,
        has_mask=query.get("mask") == "true",
        is_distilled=bool(few),
        distilled_by=few,
        named_schedule=scheduler,
        cfg=cfg,
    )


def _foreseen(preset: Preset, task: Task) -> tuple[list[int], str]:
    """Steps that are computed in a run, and why all of them are; empty where some are skipped."""
    if (reason := preset.why_not(task)) is not None:
        return list(range(task.steps)), reason
    return sorted(preset.computed(task)), ""


def _picture_db(preset: Preset, task: Task, reason: str) -> float | None:
    """How close the demo model's pictures came in the measured case that is most like the run."""
    figure = None if reason else preset.figure_for(task)
    return None if figure is None else figure.picture_db


def _offered(presets: dict[str, dict[str, Any]]) -> list[str]:
    """For the list: what skips steps in such a run, most of the picture kept first; then the rest."""
    shown = [name for name in presets if name != HISTORICAL]
    skipping = sorted(
        (name for name in shown if not presets[name]["reason"]), key=lambda name: -presets[name]["computed"]
    )
    return [*skipping, CUSTOM, *(name for name in shown if name not in skipping)]


def _number(text: str, name: str, kind: Callable[[str], _T]) -> _T:
    try:
        return kind(text[:40])
    except ValueError:
        raise Refused("bad_request", f"{name} must be a number.") from None


ROUTES: list[Route] = [("GET", "/step-skip", foresee)]
