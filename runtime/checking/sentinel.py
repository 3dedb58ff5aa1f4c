"""Engines in use are compared with the model from time to time: one real call is computed by both.

What an engine stands for was compared when it was made and when it was loaded, on inputs of its own. Here it is
compared on what a sampler gives it, with all that other extensions did to the model by then.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from ...core.errors import SlipstreamError
from ...core.formatting import say_share
from ...core.protocols import ModelSource, Tensors
from ...core.spec import EngineSpec, Precision
from ...engine_cache import Verification
from .rounding_switches import exact_fp32
from .verify import is_finite, limit_of_spec, relative_error

EVERY = 1000
"""Calls of engines between two comparisons of the same model with the same patches; one takes as long as a call of the
model, which is a few of an engine."""

_LEAST = {Precision.FP32: 1e-5, Precision.FP16: 1e-3, Precision.BF16: 8e-3}
"""Differences below this are rounding in the precision that a model computes in."""
_REMEMBERED = 1000


class StartAgain(SlipstreamError):
    """What an engine computed in this run was wrong, so that sampling has to begin anew, without it."""


class Sentinel:
    """Says when a call is to be computed by engine and model: the first of each case, then one in 1000.

    A case is a model with its weights, and what else is known about a run that may change what it computes.
    """

    def __init__(self) -> None:
        self._since: OrderedDict[Hashable, int] = OrderedDict()
        self._counting = threading.Lock()

    def is_due(self, case: Hashable) -> bool:
        with self._counting:
            return self._since.get(case, EVERY) >= EVERY

    def count(self, case: Hashable) -> None:
        """An engine answered a call."""
        with self._counting:
            if case in self._since:
                self._since[case] += 1

    def compared(self, case: Hashable) -> None:
        """A call was computed by engine and model, and the results agree."""
        with self._counting:
            self._since[case] = 0
            self._since.move_to_end(case)
            while len(self._since) > _REMEMBERED:
                self._since.popitem(last=False)


def why_wrong(
    source: ModelSource, spec: EngineSpec, known: Verification | None, inputs: Tensors, found: Tensors, wanted: Tensors
) -> str | None:
    """What is wrong with an engine's answer to a real call, in words; None where nothing is.

    It may be twice as far from the model's own as both were from fp32 when the engine was measured. Where it is further
    off, the call in fp32 decides: real inputs may be harder to compute than random ones, for both of them.

    Args:
        known: what was measured; None where it is not known.
        inputs: of the engine.
        wanted: the model's own answer.
    """
    least = max(_LEAST[spec.precision], _LEAST[source.precision])
    errors = (known.relative_error, known.eager_error or 0.0) if known is not None else (limit_of_spec(spec), 0.0)
    difference, limit = relative_error(found, wanted), 2 * max(least, sum(errors))
    if difference <= limit or not is_finite(wanted):  # a model that computes NaN is nothing to compare with
        return None
    with exact_fp32():
        reference = source.reference(inputs)
    of_engine, of_model = relative_error(found, reference), relative_error(wanted, reference)
    is_engine_right = of_engine <= 2 * max(least, errors[0], of_model)
    is_model_itself = of_model <= 2 * max(least, errors[1], of_engine)
    if is_engine_right and is_model_itself and difference <= limit_of_spec(spec):
        return None
    cause = "it computes something else than it was built from" if is_model_itself else "another extension changed it"
    subject = "the engine" if is_model_itself else "the model"
    return (
        f"an engine gave another result than the model in the midst of use: {say_share(difference)} apart, where "
        f"{say_share(limit)} is allowed ({subject}: {cause})"
    )
