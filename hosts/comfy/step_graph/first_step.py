"""What a step consisted of, kept for the pictures after it, which can begin with a replay. Attacks overhead.

A run's first step goes the usual way, kernel by kernel, since that shows what the step is. Where an earlier picture was
made by the same work, its known_step says so. What is a matter of the run is asked anew: whether engines may answer and
which do, with the weights as they are now, and what hints and prompts are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from weakref import ref

import torch

from ....runtime.loaded.engine_pool import LoadedEngine
from ....runtime.module import Run, Served
from ....runtime.planning.plan import CallShape
from ....runtime.settings.model_settings import Levers
from ...model_patches import why_not_these_tensors
from ..run.step_contents import Conditions, kind_of_conditions
from .step import Pattern, Step

WHOLE = "whole"
_KEPT = 16
_known: OrderedDict[Hashable, KnownStep] = OrderedDict()

Part = str | int
"""The model as a whole, one half of it, or a ControlNet by its place."""


@dataclass(frozen=True)
class KnownStep:
    """A pattern without what belongs to one picture alone.

    Attributes:
        calls: of engines, in their order: whose, and of what shapes.
        conditions, hints: what conditioned the model, apart from tensor values.
        levers: by which it came about.
        engines: that computed it.
        kinds: see `Pattern`.
    """

    order: tuple[int, ...]
    calls: tuple[tuple[Part, CallShape], ...]
    is_halved: bool
    way: str
    conditions: Hashable
    hints: Hashable
    levers: Levers
    engines: tuple[ref[LoadedEngine], ...]
    kinds: tuple[Hashable, ...] = ()

    @property
    def is_at_hand(self) -> bool:
        """Whether its engines are loaded still, and take the model's weights where they lie."""
        engines = [engine() for engine in self.engines]
        return all(engine is not None and not engine.engine.copies_weights for engine in engines)


def remember(step: Step, pattern: Pattern) -> None:
    """Keep what a step consisted of that was replayed."""
    if (known_step := _known_step_of(step, pattern)) is not None:
        _known[step.kind] = known_step
        while len(_known) > _KEPT:
            _known.popitem(last=False)


def recall(step: Step) -> KnownStep | None:
    """What a step like this one consisted of; None: it is not known, or was another's work."""
    known_step = _known.get(step.kind)
    if known_step is None or known_step.levers != step.levers:
        return None
    _known.move_to_end(step.kind)
    return known_step if known_step.conditions == kind_of_conditions(step.guider, known_step.order) else None


def forget(step: Step) -> None:
    _known.pop(step.kind, None)


def pattern_by(
    known_step: KnownStep, step: Step, x: torch.Tensor, sigma: torch.Tensor, conditions: Conditions
) -> Pattern | None:
    """The pattern with this run's engines; None where one does not answer.

    Whether others changed the model is asked only where an engine would be loaded or compared.

    Raises:
        NotServed: an engine may not answer.
        Exception: whatever ComfyUI's code raises while it makes the hints ready.
    """
    calls = step.calls
    if why_not_these_tensors(conditions.tensors.values()) is not None:
        return None
    if not known_step.is_at_hand and calls.veto_of_run is not None:
        return None
    if step.used and known_step.is_halved != (calls.halves is not None):
        return None  # the halves may have been built since
    step.prepare_hints(known_step.order, {"x": x, "sigma": sigma, **conditions.tensors})
    if known_step.hints != _kind_of_hints(step):
        return None
    served, owner = [], None
    for part, shape in known_step.calls:
        run = _run_of(part, step)
        offer = None if run is None else run.offer_for(shape)
        if run is None or offer is None or offer.engine is None:
            return None
        served.append(Served(run, offer))
        if not run.is_part and not isinstance(part, int):
            owner = offer.engine
    if owner is None or (known_step.is_halved and not (calls.halves is not None and calls.halves.is_proved)):
        return None
    found = Pattern(known_step.order, served, owner, known_step.is_halved, known_step.way, kinds=known_step.kinds)
    found.is_chosen = found.checked = found.is_known = True
    return found


def _known_step_of(step: Step, pattern: Pattern) -> KnownStep | None:
    calls = []
    for served in pattern.served:
        part, shapes = _part_of(served.run, step), served.run.calls_of(served.offer)
        if part is None or len(shapes) != 1:
            return None  # one engine for calls of several shapes: which of them this was is not known
        calls.append((part, shapes[0]))
    conditions = kind_of_conditions(step.guider, pattern.order)
    engines = tuple(map(ref, pattern.engines))
    return KnownStep(
        pattern.order, tuple(calls), pattern.is_halved, pattern.way, conditions, _kind_of_hints(step), step.levers,
        engines, pattern.kinds,
    )  # fmt: skip


def _kind_of_hints(step: Step) -> Hashable:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(step.hints().items()))


def _part_of(run: Run, step: Step) -> Part | None:
    if run is step.calls.whole:
        return WHOLE
    if step.calls.halves is not None and (half := step.calls.halves.half_of(run)) is not None:
        return half
    return next((place for place, control in enumerate(step.used) if control.calls().run is run), None)


def _run_of(part: Part, step: Step) -> Run | None:
    if isinstance(part, int):
        found: Run | None = step.used[part].calls().run
        return found
    if part == WHOLE:
        return step.calls.whole
    halves = step.calls.halves
    return None if halves is None or halves.is_refused else halves.run(part)
