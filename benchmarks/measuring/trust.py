"""Whether what a variant computed may be trusted."""

from __future__ import annotations

from collections.abc import Mapping

from ..subjects.setup import Ready
from ..subjects.subject import Judge


def why_not(ready: Ready, judge: Judge, errors: Mapping[str, float], wanted: int) -> str | None:
    """Why a row may not be trusted; None where it may.

    Args:
        errors: relative to fp32, by output.
        wanted: calls of engines, where all of it runs on them.
    """
    served, reasons = ready.engine_calls(), ready.reasons()
    if served is not None and (served != wanted or reasons):
        return f"the engine served {served} of {wanted} calls: {reasons or 'no reason was given'}"
    for output, error in errors.items():
        limit = judge.limit(output, ready.precision, served is not None, ready.quantised, ready.skips)
        if not error <= limit:
            return f"differs from fp32 by {error:.1e}, allowed is {limit:.1e} in {ready.numbers}"
    return None
