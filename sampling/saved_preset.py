"""A preset that a calibration found."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields
from typing import Any

from .presets import Preset, Selection, Use
from .samplers import SamplerKind, kind_of
from .schedule import Steps

_FORMAT = 1


@dataclass(frozen=True)
class SavedPreset:
    """
    Attributes:
        name: that the user picks; also of its file.
        computed: steps, of `steps`.
        model, sampler, scheduler, cfg: that it was calibrated with.
        held_out_db: closeness to the full run on pictures that it was not fitted on.
        saved: the day, such as 2025-11-30.
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

    def record(self) -> dict[str, Any]:
        """All but the name, for JSON."""
        return {"format": _FORMAT} | {key: value for key, value in asdict(self).items() if key != "name"}

    def preset(self) -> Preset:
        """For runs of exactly so many steps; others compute every step, and say why."""
        note = (
            f"calibrated {self.saved}: {len(self.computed)} of {self.steps} steps, {self.model}, {self.sampler}, "
            f"{self.scheduler}, CFG {self.cfg:g}, {self.held_out_db:.1f} dB"
        )
        uses = frozenset({Use(kind_of(self.sampler), self.cfg > 1)})
        return _Calibrated(self.name, OneLength(steps=self.steps, fixed=self.computed), note, None, uses)


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
        """
        Raises:
            ValueError: the run has another length.
        """
        if (reason := self.why_not(steps)) is not None:
            raise ValueError(f"{reason[0].upper()}{reason[1:]}.")
        return self.fixed


class _Calibrated(Preset):
    def why_not(self, kind: SamplerKind, steps: int, guided: bool = True) -> str | None:
        if kind is SamplerKind.SEVERAL_CALLS:
            return super().why_not(kind, steps, guided)
        if kind not in (use.kind for use in self.uses):
            known = " and ".join(use.kind.value for use in self.uses)
            return f"{self.name} was calibrated with a sampler of another kind ({known}); calibrate with this one"
        return self.selection.why_not(steps)


def from_record(name: str, record: Any) -> SavedPreset:
    """What `SavedPreset.record` gave, read from a file that may hold anything.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: it is no such record.
    """
    if record["format"] != _FORMAT:
        raise ValueError(f"format {record['format']!r} is not known to this version")
    values = {field.name: record[field.name] for field in fields(SavedPreset) if field.name != "name"}
    numbers, words = ("cfg", "held_out_db"), ("model", "sampler", "scheduler", "saved")
    if not all(isinstance(values[key], str) for key in words):
        raise TypeError(f"{', '.join(words)} must be texts")
    computed, steps = tuple(values["computed"]), values["steps"]
    if not all(type(step) is int for step in (*computed, steps)):
        raise TypeError("steps must be whole numbers")
    if not computed or computed[0] != 0 or computed[-1] >= steps or not _rises(computed):
        raise ValueError(f"{list(computed)} are no steps of a run of {steps}")
    return SavedPreset(name, **(values | {"computed": computed} | {key: float(values[key]) for key in numbers}))


def _rises(steps: Steps) -> bool:
    return all(before < after for before, after in itertools.pairwise(steps))
