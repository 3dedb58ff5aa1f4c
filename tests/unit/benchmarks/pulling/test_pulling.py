"""What is made of the figures of a server that pulled its engines."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.benchmarks.pulling.command import LIMIT_S, failures
from slipstream.runtime.reporting.status import ON_PURPOSE

FOUND = {"first_picture_s": 2.7, "rms": 0.001, "engine_calls": 7, "eager_calls": 0, "reasons": {}}


def test_pulled_engines_that_serve_in_time() -> None:
    assert failures(FOUND) == []
    timed = {"eager_calls": 2, "reasons": {ON_PURPOSE: 2}}
    assert failures({**FOUND, **timed}) == [], "steps that are timed without engines, to compare, are no failure"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"first_picture_s": LIMIT_S + 0.1}, "more than 5"),
        ({"rms": 0.1}, "differs by 0.1"),
        ({"rms": float("nan")}, "differs by nan"),
        ({"engine_calls": 0}, "no engine served"),
        ({"eager_calls": 3, "reasons": {ON_PURPOSE: 2, "no engine": 1}}, "1 calls"),
    ],
)
def test_each_trouble_is_told(changed: dict[str, Any], said: str) -> None:
    (failure,) = failures({**FOUND, **changed})
    assert said in failure
