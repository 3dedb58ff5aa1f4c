"""The route that says which steps a choice of Step Skip computes, before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from ...sampling.presets import CUSTOM, PRESETS, Preset
from ...sampling.task import Task
from .guard import Answer, Route, asks
from .rules import Refused

_NUMBERS = {"steps": int, "cfg": float, "share": float, "computed_steps": int, "power": float}
_MOST_STEPS = 10000
_T = TypeVar("_T")


@asks("preset", "sampler", "step_list", *_NUMBERS)
def foresee(request: web.Request) -> Answer:
    from ..shared.skip_inputs import preset_of

    query = request.query
    given = {name: _number(query[name], name, kind) for name, kind in _NUMBERS.items() if name in query}
    steps, cfg = given.pop("steps", 20), given.pop("cfg", 8.0)
    if not 1 <= steps <= _MOST_STEPS:
        raise Refused("bad_request", f"steps must be a whole number from 1 to {_MOST_STEPS}.")
    task = Task(query.get("sampler", "euler"), steps, guided=cfg > 1, cfg=cfg)
    try:
        chosen = preset_of(query.get("preset", CUSTOM), step_list=query.get("step_list", ""), **given)
        computed, reason = _foreseen(chosen, task)
    except ValueError as error:
        raise Refused("bad_request", str(error)) from None
    others = {name: _foreseen(preset, task) for name, preset in PRESETS.items()}
    presets = {name: {"computed": len(steps), "reason": why} for name, (steps, why) in others.items()}
    return {"steps": steps, "computed": computed, "reason": reason, "presets": presets}


def _foreseen(preset: Preset, task: Task) -> tuple[list[int], str]:
    """Steps that are computed in a run, and why all of them are; empty where some are skipped."""
    if (reason := preset.why_not(task)) is not None:
        return list(range(task.steps)), reason
    return sorted(preset.selection.computed(task.steps)), ""


def _number(text: str, name: str, kind: Callable[[str], _T]) -> _T:
    try:
        return kind(text[:40])
    except ValueError:
        raise Refused("bad_request", f"{name} must be a number.") from None


ROUTES: list[Route] = [("GET", "/step-skip", foresee)]
