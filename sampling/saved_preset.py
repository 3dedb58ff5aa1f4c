"""A preset that a calibration found."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from .presets import Preset, Selection
from .run import SAME_SIGMA
from .samplers import SamplerKind, method_of
from .schedule import Steps
from .task import Task

_FORMAT = 1


@dataclass(frozen=True)
class SavedPreset:
    """The computed steps that a calibration found, and what it was made with.

    Attributes:
        name: that the user picks; also of its file.
        computed: steps, of `steps`.
        model, sampler, scheduler, cfg: that it was calibrated with.
        held_out_db: closeness to the full run on pictures that it was not fitted on.
        saved: the day, such as 2025-11-30.
        has_mask: whether that was inpainting.
        sigmas: of its runs; empty where they were not written down.
    """

    name: str
    steps: int
    computed: Steps
    model: str
    sampler: str
    scheduler: str
    cfg: float
    held_out_db: float
    saved: str
    has_mask: bool = False
    sigmas: tuple[float, ...] = ()

    def record(self) -> dict[str, Any]:
        """All but the name, for JSON."""
        return {"format": _FORMAT} | {key: value for key, value in asdict(self).items() if key != "name"}

    def preset(self) -> Preset:
        """For runs of so many steps, by the same sampler and as much guided; others compute every step, and say why."""
        note = (
            f"calibrated {self.saved}: {len(self.computed)} of {self.steps} steps, {self.model}, {self.sampler}, "
            f"{self.scheduler}, CFG {self.cfg:g}, {self.held_out_db:.1f} dB"
        )
        return _Calibrated(self.name, OneLength(steps=self.steps, fixed=self.computed), note, known=self)


@dataclass(frozen=True)
class OneLength(Selection):
    """Steps of a run of one length alone."""

    steps: int = 0
    fixed: Steps = ()

    def why_not(self, steps: int) -> str | None:
        if steps == self.steps:
            return None
        return (
            f"these steps were calibrated for runs of {self.steps} steps, and this one has {steps}; sample with "
            f"{self.steps} steps, or calibrate with {steps}"
        )

    def computed(self, steps: int) -> Steps:
        """The fixed steps.

        Raises:
            ValueError: the run has another length.
        """
        if (reason := self.why_not(steps)) is not None:
            raise ValueError(f"{reason[0].upper()}{reason[1:]}.")
        return self.fixed


@dataclass(frozen=True, kw_only=True)
class _Calibrated(Preset):
    known: SavedPreset

    def why_not(self, task: Task) -> str | None:
        if task.kind is SamplerKind.SEVERAL_CALLS:
            return super().why_not(task)
        if (another := _what_it_is_not_for(self.known, task)) is not None:
            return f"{self.name} was calibrated {another}; sample so, or calibrate anew"
        return self.selection.why_not(task.steps)

    def remark(self, task: Task) -> str:
        others = _what_differs(self.known, task)
        return f"calibrated with {' and '.join(others)}" if others else ""


def _what_it_is_not_for(known: SavedPreset, task: Task) -> str | None:
    if method_of(task.sampler) != method_of(known.sampler):
        return f"with {known.sampler}, and this is {task.sampler}"
    if task.guided != (known.cfg > 1):
        return "at CFG 1, and this is above" if task.guided else "at CFG above 1, and this is CFG 1"
    if task.has_mask != known.has_mask:
        mask = "with a mask for inpainting" if known.has_mask else "without a mask for inpainting"
        return f"{mask}, and this is {_with(task.has_mask)}"
    return "on latents of one part, and this has several" if task.has_parts else None


def _with(there: bool) -> str:
    return "with one" if there else "without"


def _what_differs(known: SavedPreset, task: Task) -> list[str]:
    """What the steps were found with and this run does not have, as far as both are known."""
    others = []
    if known.sigmas and task.sigmas and not _are_close(known.sigmas, task.sigmas):
        others.append(f"another schedule ({known.scheduler})")
    if task.cfg is not None and task.cfg != known.cfg:
        others.append(f"CFG {known.cfg:g}")
    if task.model and task.model != known.model:
        others.append(f"a model of the class {known.model}")
    return others


def _are_close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=SAME_SIGMA) for a, b in pairs)


def from_record(name: str, record: Any) -> SavedPreset:
    """What `SavedPreset.record` gave, read from a file that may hold anything.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: it is no such record.
    """
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']!r} is not known to this version")
    record = {"has_mask": False, "sigmas": ()} | record  # which were not always written down
    values = {field.name: record[field.name] for field in fields(SavedPreset) if field.name != "name"}
    floats, texts = ("cfg", "held_out_db"), ("model", "sampler", "scheduler", "saved")
    if not all(isinstance(values[key], str) for key in texts):
        raise TypeError(f"{', '.join(texts)} must be texts")
    computed, steps = tuple(values["computed"]), values["steps"]
    if not all(type(step) is int for step in (*computed, steps)):
        raise TypeError("steps must be whole numbers")
    if not computed or computed[0] != 0 or computed[-1] >= steps or not _rises(computed):
        raise ValueError(f"{list(computed)} are no steps of a run of {steps}")
    if not isinstance(values["has_mask"], bool):
        raise TypeError("has_mask must be true or false")
    sigmas = tuple(map(float, values["sigmas"]))
    changed = {"computed": computed, "sigmas": sigmas} | {key: float(values[key]) for key in floats}
    return SavedPreset(name, **(values | changed))


def _rises(steps: Steps) -> bool:
    return all(before < after for before, after in itertools.pairwise(steps))
