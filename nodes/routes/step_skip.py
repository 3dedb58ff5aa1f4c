"""The route that says which steps a choice of Step Skip computes, before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from ...sampling.few_steps import few_step_name
from ...sampling.presets import CUSTOM, HISTORICAL, Preset
from ...sampling.task import Task
from .guard import Answer, Route, asks
from .rules import Refused

_NUMBERS = {"steps": int, "cfg": float, "share": float, "computed_steps": int, "power": float}
_UNREAD = "whole_steps"
"""Pages tell of how long a run this is a part; its own steps alone count."""
_MOST_STEPS = 10000
_T = TypeVar("_T")


@asks("preset", "sampler", "scheduler", "files", "step_list", "mask", _UNREAD, *_NUMBERS)
def foresee(request: web.Request) -> Answer:
    from ..shared.skip_inputs import known_presets, preset_of

    query = request.query
    given = {name: _number(query[name], name, kind) for name, kind in _NUMBERS.items() if name in query}
    steps, cfg = given.pop("steps", 20), given.pop("cfg", 8.0)
    if not 1 <= steps <= _MOST_STEPS:
        raise Refused("bad_request", f"steps must be a whole number from 1 to {_MOST_STEPS}.")
    few = few_step_name(query.get("files", "").split("|"))
    sampler, scheduler = query.get("sampler", "euler"), query.get("scheduler", "")
    task = Task(
        sampler,
        steps,
        guided=cfg > 1,
        has_mask=query.get("mask") == "true",
        is_distilled=bool(few),
        distilled_by=few,
        named_schedule=scheduler,
        cfg=cfg,
    )
    try:
        chosen = preset_of(query.get("preset", CUSTOM), step_list=query.get("step_list", ""), **given)
        computed, reason = _foreseen(chosen, task)
    except ValueError as error:
        raise Refused("bad_request", str(error)) from None
    others = {name: _foreseen(preset, task) for name, preset in known_presets().items()}
    presets = {name: {"computed": len(steps), "reason": why} for name, (steps, why) in others.items()}
    remark = "" if reason else chosen.remark(task)
    shown = {"computed": computed, "reason": reason, "remark": remark, "picture_db": _picture_db(chosen, task, reason)}
    return {"steps": steps, **shown, "presets": presets, "offered": _offered(presets)}


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
