"""Each factor that is left out of the key on purpose is noticed by the tests of the key."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.engine_cache import key as key_module
from slipstream.tests.unit.engine_cache import test_key
from slipstream.tests.unit.engine_cache.support import make_environment, make_spec

CHECKS = {
    "spec": test_key.test_every_field_of_the_spec_enters_unless_marked,
    "environment": test_key.test_every_field_of_the_environment_enters_unless_marked,
}


TOLD_BY_WEIGHTS = "spec.backend.contains_weights"
"""Where it is true, the digest of the weights is in the key too, which alone tells the two apart."""


def factors() -> list[str]:
    """The path of every field that enters a key."""
    found = [*test_key.changes(make_spec(), "spec"), *test_key.changes(make_environment(), "environment")]
    return sorted({path.partition("#")[0] for path, in_key, _ in found if in_key} - {TOLD_BY_WEIGHTS})


def without(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one factor out of all keys from now on."""
    canonical = key_module.canonical

    def mutated(value: Any, where: str) -> Any:
        return None if where == path else canonical(value, where)

    monkeypatch.setattr(key_module, "canonical", mutated)


def caught(path: str) -> bool:
    """Whether a test of the key fails for one of the changes to this factor."""
    rows = [*test_key.changes(make_spec(), "spec"), *test_key.changes(make_environment(), "environment")]
    for where, in_key, changed in rows:
        if where.partition("#")[0] == path:
            try:
                CHECKS[path.partition(".")[0]](where, in_key, changed)
            except AssertionError:
                return True
    return False


def test_there_are_as_many_factors_as_ever() -> None:
    assert len(factors()) >= 20
    assert not any(map(caught, factors())), "without a mutation every test passes"


@pytest.mark.parametrize("path", factors())
def test_a_factor_that_is_left_out_is_noticed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(path, monkeypatch)
    assert caught(path)


def test_weights_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "_required_weights", lambda spec: "")
    with pytest.raises(AssertionError):
        test_key.test_weights_enter_only_where_the_artifact_contains_them()
