"""Engines that copy weights are compared with the model whenever they did."""

from __future__ import annotations

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.tests.fakes import (
    FIRST_USE,
    FakeSource,
    NullBackend,
    NullEngine,
    build_only,
    make_inputs,
    make_model,
    run_once,
)

CALL = CallShape.of(make_inputs())


@pytest.fixture(autouse=True)
def _copying(backend: NullBackend) -> None:
    backend.copies_weights = True


def only_engine(backend: NullBackend) -> NullEngine:
    (engine,) = backend.engines
    return engine


def test_the_same_weights_again_are_not_compared_again(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    run_once(provider, source)
    calls = only_engine(backend).calls
    for _ in range(3):
        assert run_once(provider, source).engine is not None
    assert only_engine(backend).calls == calls


def test_a_lora_that_came_and_went_is_compared_each_time(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    run_once(provider, source)
    references = source.reference_calls
    for lora in (0.25, 0.0):
        source.lora = lora
        calls = only_engine(backend).calls
        for _ in range(2):
            assert run_once(provider, source).engine is not None
        assert only_engine(backend).calls == calls + 1
    assert source.reference_calls == references, "one call of engine and plain model, none in fp32"


def test_the_first_comparison_of_a_process_is_one(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    provider.make(source, CALL, FIRST_USE, HostHooks())
    later = EngineProvider(EngineStore(provider.store.root), [backend])
    run_once(later, source)
    assert backend.engines[-1].calls == 1


def test_a_refit_that_went_wrong_never_serves_and_is_not_kept(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    run_once(provider, source)
    source.lora, backend.refits = 0.25, False
    offer = run_once(provider, source)
    assert offer.engine is None and "the model's weights did not reach the engine" in offer.reason
    assert only_engine(backend).closed
    assert run_once(provider, source).engine is not None, "loaded anew it takes them"


@pytest.mark.parametrize("effect", [2e-3, 4e-3, 1e-2])
def test_a_lora_of_little_effect_that_did_not_arrive_shows(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, effect: float
) -> None:
    run_once(provider, source)
    source.lora, backend.refits = effect, False
    assert run_once(provider, source).engine is None


def test_what_was_wrong_with_a_lora_is_right_without(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    run_once(provider, source)
    source.lora, backend.error = 0.25, 1e-2
    for _ in range(4):
        assert run_once(provider, source).engine is None
    source.lora, backend.error = 0.0, 0.0
    assert run_once(provider, source).engine is not None


def test_failures_with_successes_in_between_do_not_add_up(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    for lora in (0.1, 0.2, 0.3):
        source.lora, backend.refits = lora, True
        assert run_once(provider, source).engine is not None
        source.lora, backend.refits = lora + 0.05, False
        assert run_once(provider, source).engine is None
    backend.refits = True
    assert run_once(provider, source).engine is not None


def test_an_engine_that_is_wrong_twice_is_left_alone(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    run_once(provider, source)
    source.lora, backend.error = 0.25, 1e-2
    reasons = {run_once(provider, source).reason for _ in range(5)}
    assert len(reasons) == 1 and "differs from the model" in reasons.pop()
    assert len(backend.engines) == 2 and all(engine.closed for engine in backend.engines)
    backend.error = 0.0
    assert run_once(provider, source).engine is None


def test_an_engine_that_is_wrong_for_one_checkpoint_serves_another(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.error = 1e-2
    for _ in range(3):
        assert run_once(provider, source).engine is None
    backend.error = 0.0
    assert run_once(provider, FakeSource(make_model(5))).engine is not None


def test_an_interrupt_in_the_comparison_leaves_no_unproven_engine(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    run_once(provider, source)
    source.lora, backend.refits = 0.25, False
    with monkeypatch.context() as cancelling:
        cancelling.setattr(source, "eager", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_once(provider, source)
    offer = run_once(provider, source)
    assert offer.engine is not None
    wanted = source.bind(source.precision).tensors["shift"]
    assert offer.engine.engine.weights["shift"].equal(wanted)  # type: ignore[attr-defined]


def test_weights_that_cannot_be_had_do_not_cost_the_engine(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    from slipstream.core.errors import UnsupportedModel

    run_once(provider, source)
    source.unavailable = UnsupportedModel("the weights are offloaded")
    assert run_once(provider, source).engine is None
    source.unavailable = None
    assert run_once(provider, source).engine is not None
    assert not only_engine(backend).closed


def test_an_engine_that_was_deleted_and_built_again_is_recorded_again(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.copies_weights = False
    run_once(provider, source)
    (entry,) = provider.store.list()
    assert entry.manifest.verifications
    provider.pool.clear()
    assert provider.store.delete(entry.digest)
    run_once(provider, source)
    (again,) = provider.store.list()
    assert again.manifest.verifications == entry.manifest.verifications


def test_what_was_wrong_is_known_until_it_is_right(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.error = 0.1
    run_once(provider, source)
    (entry,) = provider.store.list()
    assert "differs from the model" in str(provider.what_is_wrong(entry))
    backend.error = 0.0
    assert run_once(provider, source).engine is not None
    assert provider.what_is_wrong(entry) is None


def test_an_engine_that_was_built_anew_is_not_refused_for_the_last_one(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.error = 0.1
    run_once(provider, source)
    (entry,) = provider.store.list()
    provider.pool.clear()
    provider.store.delete(entry.digest)
    backend.content = "another"
    build_only(provider, source)
    (again,) = provider.store.list()
    assert again.digest == entry.digest
    assert provider.what_is_wrong(entry) is not None and provider.what_is_wrong(again) is None
