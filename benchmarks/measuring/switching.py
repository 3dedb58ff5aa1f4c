"""What a change between two pictures costs: the first call at another size or batch, against those that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ...runtime.checking.measure import statistics_of
from ..subjects.models import Model
from ..subjects.rows import Row
from ..subjects.setup import Ready
from ..subjects.variants import SWITCH_BATCH, SWITCH_SIZE, Variant
from . import trust

if TYPE_CHECKING:
    from .measure import Challenge

CHANGES: dict[str, Callable[[Model], Model]] = {
    SWITCH_SIZE: Model.half_as_wide_again,
    SWITCH_BATCH: Model.of_twice_the_batch,
}


def sides_of(model: Model, variant: Variant) -> list[Model]:
    """The model as its case calls it, and, of a variant that changes to and fro, as it is called in between."""
    return [model] if variant.switch is None else [model, CHANGES[variant.switch](model)]


@dataclass
class Side:
    """One of the two kinds of pictures.

    Attributes:
        taken: what a picture's calls take, one after the other.
        changed: ms of first calls, where the picture before was of the other kind.
        again: ms of first calls, where it was of the same kind.
        steady: ms of later calls.
    """

    model: Model
    challenge: Challenge
    taken: Sequence[Any]
    changed: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)

    def row(self) -> Row:
        return {
            **statistics_of(self.changed),
            "again_ms": round(median(self.again), 4),
            "steady_ms": round(median(self.steady), 4),
        }


class Switch:
    """A variant that paints two pictures of a kind, then two of the other, and so on."""

    def __init__(self, ready: Ready, models: Sequence[Model], challenges: Sequence[Challenge]) -> None:
        self.ready = ready
        self.vram_mb: float | None = None
        self._calls = 0
        self._errors: dict[str, float] = {}
        prepared = [[ready.prepare(example.inputs) for example in each.examples] for each in challenges]
        self._sides = [Side(*each) for each in zip(models, challenges, prepared, strict=True)]

    def warm_up(self, turns: int) -> None:
        """Paint without timing: what is captured or compiled for a shape is captured or compiled here."""
        for _ in range(turns):
            for side in self._sides:
                self._paint(side)
                self._paint(side)

    def take_turns(self, turns: int) -> None:
        for _ in range(turns):
            for side in self._sides:
                for firsts in (side.changed, side.again):
                    first, *rest = self._paint(side)
                    firsts.append(first)
                    side.steady += rest

    def check(self) -> None:
        """Compare each side with fp32, on all of its inputs; the largest error counts."""
        for side in self._sides:
            with ExitStack() as picture:
                call = self._begin(picture)
                for taken, example in zip(side.taken, side.challenge.examples, strict=True):
                    given = self.ready.result(taken, self._counted(call, taken))
                    found = side.challenge.judge.errors(given, example.reference)
                    self._errors = {
                        output: max(error, self._errors.get(output, 0.0)) for output, error in found.items()
                    }

    def row(self) -> Row:
        """What was found out, with the reason why it may not be trusted, if there is one."""
        own, other = self._sides
        found = {"vram_mb": self.vram_mb, "precision": self.ready.numbers, **self.ready.facts}
        found |= {"engine_calls": self.ready.engine_calls() or 0, "error": max(self._errors.values(), default=0.0)}
        shapes = {name: list(shape) for name, shape in other.model.shapes.items()}
        failed = trust.why_not(self.ready, own.challenge.judge, self._errors, self._calls)
        return {**own.row(), **found, "other": {"shapes": shapes, **other.row()}, "failed": failed}

    def _paint(self, side: Side) -> list[float]:
        """Milliseconds of a picture's calls; what begins a picture belongs to the first."""
        with ExitStack() as picture:
            calls: list[Callable[[Any], Any]] = []

            def first() -> None:
                calls.append(self._begin(picture))
                self._counted(calls[0], side.taken[0])

            spent = [side.model.milliseconds(first)]
            for taken in side.taken[1 : side.model.sets]:
                spent.append(side.model.milliseconds(lambda: self._counted(calls[0], taken)))  # noqa: B023
            return spent

    def _begin(self, picture: ExitStack) -> Callable[[Any], Any]:
        begin = self.ready.picture
        return picture.enter_context(nullcontext(self.ready.compute) if begin is None else begin())

    def _counted(self, call: Callable[[Any], Any], taken: Any) -> Any:
        self._calls += 1
        return call(taken)
