"""Properties of plans: the engine that is planned for a call takes that call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.spec import Precision
from slipstream.runtime.planning.engine_shapes import clip_batch
from slipstream.runtime.planning.plan import CallShape, Plan, plans
from slipstream.runtime.settings.model_settings import Resolution, Settings, ShapeChoice
from slipstream.tests.fakes import CPU, FakeArchitecture, NullBackend

sides = st.integers(8, 256).map(lambda eighths: 8 * eighths)
calls = st.tuples(st.integers(1, 8), sides, sides, st.integers(1, 4).map(lambda part: 77 * part))
BACKEND = NullBackend()


def call_of(batch: int, height: int, width: int, tokens: int, dtype: torch.dtype = torch.float32) -> CallShape:
    x, context = (batch, 4, height // 8, width // 8), (batch, tokens, 5)
    return CallShape((("x", x, dtype), ("timesteps", (batch,), torch.float32), ("context", context, dtype)))


def planned(call: CallShape, chosen: Settings) -> Plan:
    return plans(FakeArchitecture(), call, Precision.FP32, CPU, chosen, [BACKEND])[0]


@given(calls, st.sampled_from(ShapeChoice), st.lists(st.tuples(sides, sides), max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_planned_engine_takes_its_call(
    call: tuple[int, ...], shapes: ShapeChoice, listed: list[tuple[int, int]]
) -> None:
    chosen = Settings(shapes=shapes, resolutions=tuple(Resolution(*size) for size in listed))
    shape = call_of(*call)
    if chosen.why_not_wanted(shape.shapes):
        return  # nobody asks for such an engine
    plan = planned(shape, chosen)
    # A batch above the largest of an engine for several sizes runs in parts.
    taken = shape.shapes if plan.spec.is_static else clip_batch(shape.shapes, chosen.max_batch)
    assert any(profile.accepts(taken) for profile in plan.spec.profiles)
    assert plan.serves(shape, chosen) or plan.spec.is_static
    assert plan.key.digest == planned(shape, chosen).key.digest


@given(calls, calls)
@settings(max_examples=200, deadline=None)
def test_calls_of_one_size_share_an_engine_and_no_others_do(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    chosen = Settings()
    first, second = planned(call_of(*one), chosen), planned(call_of(*other), chosen)
    assert (first.key.digest == second.key.digest) == (first.spec.profiles == second.spec.profiles)
    if one == other:
        assert first.key.digest == second.key.digest
    elif first.spec.is_static:
        assert first.key.digest != second.key.digest


@pytest.mark.parametrize("precision", list(Precision))
@given(call=calls)
@settings(max_examples=30, deadline=None)
def test_the_precision_that_was_chosen_is_planned(precision: Precision, call: tuple[int, ...]) -> None:
    plan = planned(call_of(*call), Settings(precision=precision))
    assert plan.spec.precision is precision
    assert plan.spec.dtypes["timesteps"] == "float32"
