"""How much memory a call on an engine will take, as far as anybody knows."""

from __future__ import annotations

import pytest

from slipstream.core.spec import Precision
from slipstream.engine_cache import EngineStore
from slipstream.runtime import provider as provider_module
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, Forecast
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings
from slipstream.tests.fakes import FIRST_USE, FakeSource, NullBackend, build_only, make_inputs, run_once

CALL = CallShape.of(make_inputs())


@pytest.fixture(autouse=True)
def _engines_hold_memory(backend: NullBackend) -> None:
    backend.device_bytes = 5 << 20


def test_nothing_is_known_without_an_engine(provider: EngineProvider, source: FakeSource) -> None:
    assert provider.forecast(source, CALL, FIRST_USE) is None


def test_nothing_is_known_of_an_engine_that_never_ran(provider: EngineProvider, source: FakeSource) -> None:
    build_only(provider, source)
    assert provider.forecast(source, CALL, FIRST_USE) is None


def test_a_loaded_engine_takes_no_more(provider: EngineProvider, source: FakeSource) -> None:
    run_once(provider, source)
    assert provider.forecast(source, CALL, FIRST_USE) == Forecast(0, compares=False)


def test_an_engine_that_was_unloaded_takes_what_it_held(provider: EngineProvider, source: FakeSource) -> None:
    run_once(provider, source)
    provider.pool.clear()
    assert provider.forecast(source, CALL, FIRST_USE) == Forecast(5 << 20, compares=False)


def test_in_another_process_it_is_compared_first(provider: EngineProvider, source: FakeSource) -> None:
    run_once(provider, source)
    later = EngineProvider(EngineStore(provider.store.root), provider.backends)
    assert later.forecast(source, CALL, FIRST_USE) == Forecast(5 << 20, compares=True)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(backend=BackendChoice.OFF),
        Settings(policy=BuildPolicy.FIRST_USE, precision=Precision.BF16),
    ],
    ids=["switched off", "another engine"],
)
def test_calls_that_go_elsewhere(settings: Settings, provider: EngineProvider, source: FakeSource) -> None:
    run_once(provider, source)
    assert provider.forecast(source, CALL, settings) is None


def test_an_engine_that_is_left_alone_for_lack_of_memory(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(provider, source)
    monkeypatch.setattr(provider_module.Shortages, "why_not", lambda *args: "too little memory")
    assert provider.forecast(source, CALL, FIRST_USE) is None
