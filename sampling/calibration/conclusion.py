"""What a calibration comes to, in one sentence."""

from __future__ import annotations

from ..presets import CUSTOM, HISTORICAL, PRESETS, Preset
from ..schedule import Steps
from ..task import Task
from .calibrated import Calibration
from .trial import mean

_ALIKE, _NEAR = 45.0, 35.0
"""Latent PSNR in dB: about 5 more than that of the decoded pictures, of which 40 are hard to tell apart."""


def built_in(task: Task, computed: Steps) -> Preset | None:
    """The preset that Slipstream brings whose steps these are; None where there is none."""
    ordinary = (preset for preset in PRESETS.values() if preset.name != HISTORICAL)
    own = (preset for preset in ordinary if computed in (preset.computed(task), preset.selection.computed(task.steps)))
    return next(own, None)


def conclusion(calibration: Calibration, builtin: Preset | None, task: Task, name: str, saved: float) -> str:
    """
    Args:
        builtin: see `built_in`, of the proposal.
        task: the run that was calibrated for.
        name: under which the proposal is saved; empty where it is not.
        saved: share of a run's time that the proposal saves.
    """
    choice, steps = calibration.choice, calibration.steps
    proposal, decibels = choice.proposal, mean(choice.proposal.held_out)
    behind = mean(choice.shortened.held_out) - decibels
    if behind > 0:
        return (
            f"Do not skip steps here: Skip Sigmas comes {behind:.1f} dB closer to your pictures with as many steps "
            "computed."
        )
    if builtin is not None:
        what = _choose(builtin, task, proposal.computed)
    else:
        chosen = f"Choose {name}" if name else f"Choose {CUSTOM} with the steps below"
        what = f"{chosen}: of {steps} steps {len(proposal.computed)} are computed, and"
    return (
        f"{what} your picture takes about {round(100 * saved)} % less time and {_how_close(decibels)} "
        f"({decibels:.0f} dB)."
    )


def _choose(builtin: Preset, task: Task, computed: Steps) -> str:
    """How to have steps of a preset: by its name, if it computes these and no more in such a run."""
    refuses, own = builtin.why_not(task) is not None, builtin.selection_for(task)
    law = own if own.computed(task.steps) == computed else builtin.selection
    if law is own and not refuses:
        return f"Choose {builtin.name}: no steps closer than its own were found, and"
    instead = "every step" if refuses else f"{len(builtin.computed(task))} steps"
    return (
        f"Choose {CUSTOM} with share {law.share:g} and power {law.power:g}, the steps of {builtin.name}, which by "
        f"itself computes {instead} here: no closer ones were found, and"
    )


def _how_close(decibels: float) -> str:
    if decibels >= _ALIKE:
        return "is hard to tell from the one of all steps"
    return (
        "differs a little from the one of all steps"
        if decibels >= _NEAR
        else "visibly differs from the one of all steps"
    )
