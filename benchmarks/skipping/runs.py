"""Everything that the protocol samples, kept on disk: latents of all samples, seconds, computed steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from . import ways
from .protocol import Condition, converged
from .subject import Subject
from .ways import Way

Say = Callable[[str], None]

_TIMED_STEPS, _TIMED_RUNS = 20, 5


@dataclass(frozen=True)
class Made:
    """
    Attributes:
        steps: of its sigmas.
    """

    latents: Tensor
    seconds: float
    calls: int
    steps: int


@dataclass(frozen=True)
class Costs:
    """Seconds of a step of the whole batch, medians over runs: computed, and skipped."""

    computed: float
    skipped: float

    def affordable(self, preset: Made) -> int:
        """How many plain steps take the time of a preset's run."""
        skipped = preset.steps - preset.calls
        return max(2, round(preset.calls + skipped * self.skipped / self.computed))


class Shelf:
    """What was made, by CFG and name. Plain runs are shared by all conditions that compare with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, key: str) -> bool:
        return self._file(key).exists()

    def add(self, key: str, made: Made) -> None:
        part = self._file(key).with_suffix(f".{os.getpid()}")
        figures = {"seconds": made.seconds, "calls": made.calls, "steps": made.steps}
        torch.save((made.latents.half() if made.latents.isfinite().all() else made.latents, json.dumps(figures)), part)
        part.replace(self._file(key))

    def take(self, key: str) -> Made:
        latents, figures = torch.load(self._file(key), weights_only=True)
        return Made(latents.float(), **json.loads(figures))

    def costs(self, cfg: float) -> Costs:
        """
        Raises:
            FileNotFoundError: nothing of that CFG was sampled.
        """
        return Costs(**json.loads(self._costs_file(cfg).read_text()))

    def add_costs(self, cfg: float, costs: Costs) -> None:
        part = self._costs_file(cfg).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(costs)))
        part.replace(self._costs_file(cfg))

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.pt"

    def _costs_file(self, cfg: float) -> Path:
        return self._folder / f"cfg{cfg:g}-costs.json"


def key_of(condition: Condition, way: Way) -> str:
    """Plain runs do not hang on whose rivals they are."""
    if way.name.startswith("plain-"):
        return f"cfg{condition.cfg:g}-{way.name}"
    return f"{condition}-{way.name}"


def run_all(subject: Subject, shelf: Shelf, conditions: Iterable[Condition], say: Say) -> None:
    """Make what the shelf lacks."""
    for condition in conditions:
        _Runs(subject, shelf, condition, say).make()


class _Runs:
    """One condition's."""

    def __init__(self, subject: Subject, shelf: Shelf, condition: Condition, say: Say) -> None:
        self._subject, self._shelf, self._condition, self._say = subject, shelf, condition, say

    def make(self) -> None:
        subject, condition = self._subject, self._condition
        costs = self._shelf.costs(self._condition.cfg)
        self._made(ways.full(subject, condition))
        if (last := converged(condition)) is not None:
            _Runs(subject, self._shelf, last, self._say)._made(ways.full(subject, last))
        wanted = set()
        for way in ways.presets(subject, condition):
            made = self._made(way)
            if way.name.startswith("preset-"):
                wanted.add(costs.affordable(made))
        for steps in sorted(wanted):
            for way in ways.plain(subject, condition, steps):
                self._made(way)
        for way in (*ways.caches(subject, condition), ways.random_places(subject, condition)):
            self._made(way)

    def _made(self, way: Way) -> Made:
        key = key_of(self._condition, way)
        if not self._shelf.has(key):
            done = self._subject.sample(way.sampler, way.sigmas, self._condition.cfg, way.patch)
            made = Made(done.latents, done.seconds, done.calls, len(way.sigmas) - 1)
            self._shelf.add(key, made)
            self._say(f"{key}: {made.calls} of {made.steps} steps, {made.seconds:.2f} s")
        return self._shelf.take(key)


def time_steps(subject: Subject, shelf: Shelf, cfgs: Iterable[float], say: Say) -> None:
    """Put on the shelf what a step costs, where that is missing, for each CFG, which decides on the size of a batch."""
    for cfg in cfgs:
        try:
            shelf.costs(cfg)
        except FileNotFoundError:
            costs = _timed(subject, cfg)
            shelf.add_costs(cfg, costs)
            say(f"cfg {cfg:g}: {costs}")


def _timed(subject: Subject, cfg: float) -> Costs:
    condition = Condition("euler", "normal", cfg, _TIMED_STEPS)
    full = ways.full(subject, condition)
    half = next(way for way in ways.presets(subject, condition) if way.name == "preset-fast")
    whole, skipping = (
        [subject.sample(way.sampler, way.sigmas, cfg, way.patch) for _ in range(_TIMED_RUNS)] for way in (full, half)
    )
    computed = median(each.seconds / each.calls for each in whole)
    skipped = median((each.seconds - each.calls * computed) / (_TIMED_STEPS - each.calls) for each in skipping)
    return Costs(computed, max(0.0, skipped))
