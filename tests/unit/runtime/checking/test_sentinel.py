"""Engines in use are held against the model now and then."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.protocols import Tensors
from slipstream.runtime.checking import sentinel as sentinel_module
from slipstream.runtime.checking.sentinel import Sentinel, StartAgain
from slipstream.runtime.module import AcceleratedModule, Run
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.fakes import FIRST_USE, FakeSource, NullBackend, make_inputs

INPUTS = make_inputs()


@pytest.fixture
def module(provider: EngineProvider) -> AcceleratedModule:
    return AcceleratedModule(provider, FIRST_USE)


class Host:
    """Calls its model, perhaps changed by somebody of whom nobody knows.

    Attributes:
        beside: how often a call was computed by the model beside an engine.
    """

    def __init__(self, source: FakeSource) -> None:
        self.source, self.beside, self.factor = source, 0, 1.0
        self.error: Exception | None = None

    def eager(self) -> Tensors:
        return {name: self.factor * tensor for name, tensor in self.source.eager(INPUTS).items()}

    def undisturbed(self) -> Tensors:
        self.beside += 1
        if self.error is not None:
            raise self.error
        return self.eager()

    def call(self, run: Run) -> torch.Tensor:
        return run(INPUTS, self.eager, None, self.undisturbed)["out"]


@pytest.fixture
def host(source: FakeSource) -> Host:
    return Host(source)


def picture(module: AcceleratedModule, host: Host, calls: int = 3, conditions: object = None) -> list[torch.Tensor]:
    with module.run(host.source, conditions=conditions) as run:  # type: ignore[arg-type]
        return [host.call(run) for _ in range(calls)]


def test_each_case_is_due_once_and_then_rarely() -> None:
    sentinel = Sentinel()
    for case in ("one", "other"):
        assert sentinel.is_due(case)
        sentinel.compared(case)
        assert not sentinel.is_due(case)
    for _ in range(sentinel_module.EVERY):
        assert not sentinel.is_due("one")
        sentinel.count("one")
    assert sentinel.is_due("one") and not sentinel.is_due("other")


def test_old_cases_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel_module, "_REMEMBERED", 2)
    sentinel = Sentinel()
    for case in range(3):
        sentinel.compared(case)
    assert [case for case in range(3) if sentinel.is_due(case)] == [0]


def test_the_first_call_of_a_model_is_computed_both_ways(module: AcceleratedModule, host: Host) -> None:
    picture(module, host)
    picture(module, host)
    assert host.beside == 1 and module.status.engine_calls == 6
    picture(module, host, conditions="another node's wrapper")
    assert host.beside == 2


def test_what_nobody_noticed_is_found_on_the_first_call(module: AcceleratedModule, host: Host) -> None:
    host.factor = 1.001
    found = picture(module, host)
    assert all(torch.equal(each, host.eager()["out"]) for each in found)
    assert (module.status.engine_calls, module.status.eager_calls) == (1, 3)
    (reason,) = module.status.to_json()["reasons"]
    assert "gave another result than the model in the midst of use" in reason and "another extension" in reason
    picture(module, host)
    assert module.status.engine_calls == 1
    assert "is not used" in module.status.to_json()["now"]


def test_an_engine_that_went_wrong_is_told_from_a_model_that_did(
    module: AcceleratedModule, host: Host, backend: NullBackend
) -> None:
    picture(module, host, conditions="first")
    backend.error = 1e-3
    picture(module, host, conditions="second")
    (reason,) = module.status.to_json()["reasons"]
    assert "something else than it was built from" in reason


def test_sampling_begins_anew_where_engines_served_before(
    module: AcceleratedModule, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_module, "EVERY", 4)
    picture(module, host)
    with module.run(host.source, can_start_again=True) as run:
        host.call(run)
        host.factor = 1.001  # in the midst of the run
        with pytest.raises(StartAgain):
            for _ in range(9):
                host.call(run)
        assert run.has_to_start_again and host.beside == 2
        assert torch.equal(host.call(run), host.eager()["out"])  # and so on: the engine is not asked any more


def test_a_run_that_cannot_begin_anew_is_compared_at_its_beginning_alone(
    module: AcceleratedModule, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_module, "EVERY", 4)
    picture(module, host, calls=20)
    assert host.beside == 1
    picture(module, host)
    assert host.beside == 2


def test_real_inputs_that_are_harder_for_both_are_no_difference(
    module: AcceleratedModule, host: Host, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are as far off from fp32: the engine to one side, the model to the other."""
    picture(module, host, conditions="first")
    backend.error, host.factor = 3e-5, 1 - 3e-5
    picture(module, host, conditions="second")
    assert host.beside == 2 and module.status.eager_calls == 0


def test_a_model_that_computes_nan_says_nothing_about_the_engine(module: AcceleratedModule, host: Host) -> None:
    host.factor = float("nan")
    picture(module, host)
    assert host.beside == 1 and (module.status.engine_calls, module.status.eager_calls) == (3, 0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("another node's code")])
def test_a_call_that_cannot_be_computed_both_ways_is_the_engines(
    error: Exception, module: AcceleratedModule, host: Host
) -> None:
    host.error = error
    picture(module, host)
    assert host.beside == 1 and (module.status.engine_calls, module.status.eager_calls) == (3, 0)


@pytest.mark.parametrize("steps", [4, 20, 30])
def test_it_costs_less_than_a_hundredth(steps: int, module: AcceleratedModule, host: Host) -> None:
    """Of the time of a hundred pictures, with a model that takes three times as long as its engine."""
    for _ in range(100):
        picture(module, host, calls=steps)
    assert 1 <= host.beside and 3 * host.beside <= 0.01 * 100 * steps
