"""What a preset's rows hang on beside the seeds: its steps, its rule, and the code of both."""

from __future__ import annotations

import functools
import hashlib

from ....sampling import reuse, schedule
from ....sampling.presets import Preset
from ....sampling.task import Task
from .protocol import SAMPLERS, STEPS

_DIGITS = 12


def fingerprint(preset: Preset) -> str:
    """Of how it chooses and fills in steps, not of where it is shipped."""
    rules = [preset.rule_for(Task(sampler, steps)).value for sampler, _ in SAMPLERS for steps in STEPS]
    told = repr((preset.selection, rules, _code()))
    return hashlib.sha256(told.encode()).hexdigest()[:_DIGITS]


@functools.cache
def _code() -> str:
    digest = hashlib.sha256()
    for module in (reuse, schedule):
        with open(str(module.__file__), encoding="utf-8") as source:  # line ends do not count
            digest.update(source.read().encode())
    return digest.hexdigest()
