"""How much faster an engine is than the model that it stands for: measured once, when it is compared."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..core.errors import first_line
from ..core.protocols import Engine, ModelSource, Tensors
from ..core.spec import EngineSpec
from .cuda_graphs import not_inlined
from .measure import milliseconds
from .verify import tuned_inputs

log = logging.getLogger(__name__)

_SECONDS = 2.0
"""No pair of calls begins later than this after the first."""
_REPEATS = {"cuda": 10}
_FEW = 3

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Speed:
    """Milliseconds of one call, the median of a few."""

    engine_ms: float
    eager_ms: float


def measure_speed(
    engine: Engine, source: ModelSource, spec: EngineSpec, check_interrupted: Callable[[], None] = lambda: None
) -> Speed | None:
    """Time engine and host's module, in its own precision, at the shapes that the engine is tuned for.

    Both must have computed these shapes before. Within `inlined()` the engine is timed as it runs elsewhere. It takes
    little, and nothing depends on it: whatever goes wrong, out of memory included, leaves None.

    Raises:
        whatever `check_interrupted` raises, which is asked before each pair of calls.
    """
    inputs = _or_none(spec, lambda: tuned_inputs(source, spec))
    if inputs is None:
        return None
    with not_inlined(engine) as was_inlined:
        if was_inlined and _or_none(spec, lambda: engine(**inputs)) is None:  # its graph is made by this call
            return None
        return _measured(engine, source, spec, inputs, check_interrupted)


def _measured(
    engine: Engine, source: ModelSource, spec: EngineSpec, inputs: Tensors, check_interrupted: Callable[[], None]
) -> Speed | None:
    def both() -> tuple[float, float]:
        """They take turns, so that a busy moment hits both."""
        with torch.no_grad():
            return (
                milliseconds(lambda: engine(**inputs), source.device),
                milliseconds(lambda: source.eager(inputs), source.device),
            )

    samples: list[tuple[float, float]] = []
    for _ in _turns(_REPEATS.get(source.device.type, _FEW)):
        check_interrupted()
        if (pair := _or_none(spec, both)) is None:
            return None
        samples.append(pair)
    ours, plain = (round(statistics.median(column), 4) for column in zip(*samples, strict=True))
    return Speed(ours, plain) if min(ours, plain) > 0 else None


def _turns(most: int) -> Iterator[None]:
    """At least one, and no further ones once they took long."""
    started = time.monotonic()
    for turn in range(most):
        if turn == 0 or time.monotonic() - started < _SECONDS:
            yield


def _or_none(spec: EngineSpec, attempt: Callable[[], _Answer]) -> _Answer | None:
    try:
        return attempt()
    except Exception as error:  # whatever compiled code or a host raises
        reason = first_line(error)
    # Out here the error is gone, and with it the frames that kept tensors alive.
    log.debug("Slipstream: the engine for %s was not timed: %s", spec.describe(), reason)
    return None
