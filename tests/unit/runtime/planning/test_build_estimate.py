"""How long a build will take, by earlier ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.spec import Role
from slipstream.engine_cache import BuildHistory
from slipstream.runtime.planning.build_estimate import estimate, estimator, past_build, say_estimate, say_roughly
from slipstream.runtime.planning.plan import Plan
from slipstream.tests.fakes import NullBackend, make_plan


@pytest.fixture
def history(tmp_path: Path) -> BuildHistory:
    return BuildHistory(tmp_path)


@pytest.fixture
def plan() -> Plan:
    return make_plan(8)


def other_model(plan: Plan, layers: int = 0) -> Plan:
    fingerprint = dataclasses.replace(plan.spec.fingerprint, architecture="b" * 64, layers=layers)
    return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, fingerprint=fingerprint))


def as_block(plan: Plan) -> Plan:
    """As long as it is told by another backend, as those of blocks are."""
    return dataclasses.replace(
        plan, spec=dataclasses.replace(plan.spec, role=Role.BLOCK), backend=NullBackend("of blocks")
    )


def remember(history: BuildHistory, plan: Plan, seconds: float, operations: int = 300, **changes: Any) -> None:
    assert history.add(dataclasses.replace(past_build(plan, operations, seconds), **changes))


def test_nothing_known(history: BuildHistory, plan: Plan) -> None:
    assert estimate(history, plan) is None
    assert estimate(history, plan, 300) is None


def test_the_median_of_the_same_architecture(history: BuildHistory, plan: Plan) -> None:
    remember(history, other_model(plan), 1000)
    for seconds in (50, 60, 500):
        remember(history, plan, seconds)
    assert estimate(history, plan) == 60
    assert estimate(history, make_plan(16), 12345) == 60, "another size of picture"


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another computer"}, {"device": "NVIDIA Something"}, {"threads": 1000},
        {"backend": "another"}, {"optimize": "max"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_builds_under_other_conditions_do_not_count(history: BuildHistory, plan: Plan, change: dict[str, Any]) -> None:
    remember(history, plan, 60, **change)
    assert estimate(history, plan) is None and estimate(history, plan, 300) is None


def test_another_architecture_goes_by_operations_once_counted(history: BuildHistory, plan: Plan) -> None:
    for seconds in (30, 60, 90):
        remember(history, plan, seconds, operations=300)
    assert estimate(history, other_model(plan), 1000) == pytest.approx(200)
    assert estimate(history, other_model(plan)) is None


def test_operations_that_another_backend_counted_are_known_before(history: BuildHistory, plan: Plan) -> None:
    remember(history, plan, 60, operations=300)
    remember(history, other_model(plan), 5, operations=1000, backend="another")
    assert estimate(history, other_model(plan)) == pytest.approx(200)


def test_before_operations_are_counted_it_goes_by_layers(history: BuildHistory, plan: Plan) -> None:
    remember(history, plan, 60, operations=300, layers=100)
    assert estimate(history, other_model(plan, layers=50)) == pytest.approx(30)
    assert estimate(history, other_model(plan, layers=50), 600) == pytest.approx(120)


def test_kinds_of_blocks_take_as_long_as_each_other(history: BuildHistory, plan: Plan) -> None:
    """On a CPU, one with 12 layers took 16 s, and one with 20 layers 15 s."""
    whole, block = other_model(plan, layers=600), as_block(other_model(plan, layers=20))
    remember(history, whole, 120, operations=3000)
    for seconds in (15, 16, 40):
        remember(history, as_block(plan), seconds, operations=30, layers=12)
    assert estimate(history, block) == estimate(history, block, 72) == 16
    assert estimate(history, whole) == 120, "those of blocks are of another backend"


def test_the_builds_pace_is_read_once(history: BuildHistory, plan: Plan) -> None:
    remember(history, plan, 60)
    expected = estimator(history, other_model(plan))
    remember(history, other_model(plan), 1)
    assert expected(0) is None and expected(600) == pytest.approx(120)


def test_layers_do_not_enter_the_key(plan: Plan) -> None:
    counted = dataclasses.replace(plan.spec.fingerprint, layers=686)
    spec = dataclasses.replace(plan.spec, fingerprint=counted)
    assert type(plan.key)(spec, plan.key.environment).digest == plan.key.digest


def test_another_backend_has_its_own_pace(history: BuildHistory, plan: Plan) -> None:
    remember(history, plan, 60)
    assert estimate(history, make_plan(8, NullBackend("another"))) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (7, "7 s"), (42, "40 s"), (89, "90 s"), (125, "2 min"), (3700, "62 min")],
)
def test_a_guess_is_told_roughly(seconds: float, words: str) -> None:
    assert say_roughly(seconds) == words


def test_what_people_are_told() -> None:
    assert say_estimate(None) == "" and say_estimate(None, 5) == ""
    assert say_estimate(125) == ", about 2 min by earlier builds on this machine"
    assert say_estimate(125, 85) == ", about 2 min by earlier builds on this machine, 40 s left"
    assert say_estimate(125, 300) == ", about 2 min by earlier builds on this machine, done any moment"
