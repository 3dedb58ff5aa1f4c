"""How much faster an engine is, measured when it is compared."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from slipstream.engine_cache import EngineStore, Verification
from slipstream.runtime.cuda_graphs import inlined, is_inlined
from slipstream.runtime.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.speed import measure_speed
from slipstream.tests.fakes import FIRST_USE, FakeSource, NullBackend, make_inputs, run_once

CALL = CallShape.of(make_inputs())


def kept(provider: EngineProvider) -> Verification:
    (entry,) = provider.store.list()
    (result,) = entry.manifest.verifications.values()
    return result


def slow(source: FakeSource, seconds: float) -> None:
    fast = source.eager

    def eager(inputs: Any) -> Any:
        time.sleep(seconds)
        return fast(inputs)

    source.eager = eager  # type: ignore[method-assign]


def test_a_build_ends_with_a_measurement(provider: EngineProvider, source: FakeSource) -> None:
    slow(source, 0.02)
    _, entry = provider.prepare(source, CALL, FIRST_USE, HostHooks())
    result = kept(provider)
    assert result.eager_ms is not None and result.engine_ms is not None and result.speedup is not None
    assert 20 <= result.eager_ms < 200 and result.engine_ms < result.eager_ms
    assert result.speedup == pytest.approx(result.eager_ms / result.engine_ms)
    assert entry.manifest.timed == result


@pytest.mark.parametrize(("engine_ms", "said"), [(20.0, True), (11.5, False), (5.0, False)])
def test_an_engine_that_is_slower_than_the_model_is_named(
    provider: EngineProvider,
    source: FakeSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine_ms: float,
    said: bool,
) -> None:
    figures = itertools.cycle([engine_ms, 10.0])
    monkeypatch.setattr("slipstream.runtime.speed.milliseconds", lambda compute, device: next(figures))
    assert run_once(provider, source).engine is not None
    assert (f"takes {engine_ms:.1f} ms a call, the plain model 10.0 ms" in caplog.text) == said


def test_a_run_is_told(provider: EngineProvider, source: FakeSource) -> None:
    from slipstream.runtime.module import AcceleratedModule

    module = AcceleratedModule(provider, FIRST_USE)
    with module.run(source) as run:
        run(make_inputs(), lambda: source.eager(make_inputs()))
    use = module.status.last_engine
    assert use is not None and use.speedup == kept(provider).speedup


def test_another_start_does_not_measure_again(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    run_once(provider, source)
    later = EngineProvider(EngineStore(provider.store.root), [backend])
    run_once(later, source)
    assert backend.engines[-1].calls == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a kernel broke")])
def test_what_goes_wrong_leaves_no_figure_and_costs_no_engine(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> float:
        raise error

    monkeypatch.setattr("slipstream.runtime.speed.milliseconds", broken)
    assert run_once(provider, source).engine is not None
    result = kept(provider)
    assert result.speedup is result.engine_ms is result.eager_ms is None


def test_a_large_model_is_timed_once(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runtime.speed._SECONDS", 0.0)
    offer = run_once(provider, source)
    assert offer.engine is not None and offer.plan is not None
    offer.engine.engine.update_weights(source.bind(source.precision).tensors)
    calls = offer.engine.engine.calls  # type: ignore[attr-defined]
    assert measure_speed(offer.engine.engine, source, offer.plan.spec) is not None
    assert offer.engine.engine.calls == calls + 1  # type: ignore[attr-defined]


class Cancelled(Exception):
    pass


def test_a_cancel_ends_it(provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []

    def check() -> None:
        if timed:
            raise Cancelled

    def milliseconds(compute: object, device: object) -> float:
        timed.append(compute)
        return 1.0

    monkeypatch.setattr("slipstream.runtime.speed.milliseconds", milliseconds)
    hooks = HostHooks(check_interrupted=check, interruptions=(Cancelled,))
    with pytest.raises(Cancelled):
        provider.offer(source, CALL, FIRST_USE, hooks)
    assert len(timed) == 2, "one pair of calls"
    assert provider.offer(source, CALL, FIRST_USE, HostHooks()).engine is not None


# ---------------------------------------------------------------------------------- when, and who hears of it


def test_whoever_listens_hears_of_times_once(provider: EngineProvider, source: FakeSource) -> None:
    heard: list[float | None] = []
    provider.on_timed = lambda: heard.append(kept(provider).speedup)
    for _ in range(2):
        run_once(provider, source)
    assert len(heard) == 1 and heard[0] is not None


def test_a_listener_that_breaks_costs_no_engine(provider: EngineProvider, source: FakeSource) -> None:
    def broken() -> None:
        raise RuntimeError("the page is gone")

    provider.on_timed = broken
    assert run_once(provider, source).engine is not None


def test_what_was_never_timed_is_timed_by_the_next_process_once(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def broken(*_: object) -> float:
        tried.append(1)
        raise RuntimeError("a kernel broke")

    with monkeypatch.context() as breaking:
        breaking.setattr("slipstream.runtime.speed.milliseconds", broken)
        backend.copies_weights = True  # it is compared again with each LoRA
        for lora in (0.0, 0.25, 0.0):
            source.lora = lora
            assert run_once(provider, source).engine is not None
    assert len(tried) == 1 and kept(provider).speedup is None
    references, earlier = source.reference_calls, kept(provider)
    later = EngineProvider(EngineStore(provider.store.root), [backend])
    run_once(later, source)
    assert kept(later).speedup is not None and source.reference_calls == references, "it was not verified anew"
    assert (kept(later).when, kept(later).relative_error) == (earlier.when, earlier.relative_error)


def test_within_a_whole_step_the_engine_is_timed_as_it_runs_elsewhere(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = run_once(provider, source)
    assert offer.engine is not None and offer.plan is not None
    engine = offer.engine.engine
    engine.update_weights(source.bind(source.precision).tensors)
    calls, inlining = engine.calls, []  # type: ignore[attr-defined]

    def milliseconds(compute: object, device: object) -> float:
        inlining.append((is_inlined(), engine.calls - calls))  # type: ignore[attr-defined]
        return 1.0

    monkeypatch.setattr("slipstream.runtime.speed.milliseconds", milliseconds)
    with inlined():
        assert measure_speed(engine, source, offer.plan.spec) is not None
        assert is_inlined()
    assert set(inlining) == {(False, 1)}, "the call that makes its graph is not timed"
