"""Measured closeness of presets to the full run, as it is shown beside them."""

from __future__ import annotations

from .measured import figures
from .presets import Preset
from .task import Task

CFG = 7.5
"""Of the figures that are shown: of the measured ones the nearest to what KSampler begins with, 8."""


def closeness(preset: Preset, steps: int, words: str = "{} to {}") -> str:
    """PSNR in dB of the decoded picture to that of all steps, over the samplers that the preset is for; else a dash.

    Args:
        words: for the least and the greatest.
    """
    samplers = {(figure.sampler, figure.scheduler) for figure in figures(preset.name)}
    tasks = [Task(sampler, steps, named_schedule=scheduler, cfg=CFG) for sampler, scheduler in sorted(samplers)]
    found = [preset.figure_for(task) for task in tasks if preset.why_not(task) is None]
    decibels = [figure.picture_db for figure in found if figure is not None]
    if not decibels:
        return "–"
    least, most = round(min(decibels)), round(max(decibels))
    return str(least) if least == most else words.format(least, most)
