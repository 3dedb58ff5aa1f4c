"""From a call to an engine that is loaded, right, and nobody else's; or to a reason."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.environment import versions_now
from slipstream.core.errors import (
    BuildCancelled,
    BuildDied,
    BuildFailed,
    IncompatibleEngine,
    StoreError,
    UnsupportedModel,
)
from slipstream.core.progress import CancelToken, Progress, ignore_progress
from slipstream.core.spec import Precision, Quantised
from slipstream.engine_cache import EngineStore
from slipstream.runtime import provider as provider_module
from slipstream.runtime.building import build as build_module
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.building.build_queue import TicketState
from slipstream.runtime.loaded.canary import LOAD, USE
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks, Offer
from slipstream.runtime.reporting.engine_info import summary
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings, parse_resolutions
from slipstream.tests.fakes import (
    BACKGROUND,
    FIRST_USE,
    MANUAL,
    FakeSource,
    FakeWorker,
    NullBackend,
    NullEngine,
    ask,
    build_only,
    make_inputs,
    make_model,
    wait_until,
)
from slipstream.tests.unit.runtime.doomed import Doomed
from slipstream.tests.unit.trt_backend.support import library_of
from slipstream.trt_backend import TensorRTBackend

CALL = CallShape.of(make_inputs())
FP8 = Settings(policy=BuildPolicy.FIRST_USE, precision=Quantised.FP8)
POLICIES = [FIRST_USE, BACKGROUND, MANUAL]


class Interrupted(Exception):
    """What a host raises when its user presses cancel."""


def assert_serves(offer: Offer, source: FakeSource, seed: int = 3) -> None:
    inputs = make_inputs(seed=seed)
    assert offer.engine is not None, offer.reason
    assert torch.allclose(offer.engine.engine(**inputs)["out"], source.eager(inputs)["out"])


def return_it(provider: EngineProvider, offer: Offer) -> None:
    assert offer.engine is not None, offer.reason
    provider.pool.give_back(offer.engine)


def restarted(provider: EngineProvider) -> EngineProvider:
    """As in the next process: the same store, nothing in memory."""
    return EngineProvider(EngineStore(provider.store.root), provider.backends)


# ------------------------------------------------------------------------------------------- hit and miss


@pytest.mark.parametrize("settings", POLICIES, ids=lambda settings: settings.policy.value)
def test_what_is_in_the_store_is_used_whatever_the_policy(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, settings: Settings
) -> None:
    build_only(provider, source)
    offer = ask(restarted(provider), source, settings)
    assert_serves(offer, source)
    assert worker.builds == 1


def test_a_call_is_prepared_by_its_plans_its_engine_and_what_a_build_takes(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    missing = provider.prepare(source, CALL, MANUAL)
    assert missing.found is None and missing.expected is None, "nothing was built here before"
    made = provider.make(source, CALL, MANUAL, HostHooks(), missing)
    assert made.is_new and made.plan is missing.plans[0]
    there = provider.prepare(source, CALL, MANUAL)
    assert there.found == (made.plan, made.entry) and there.expected is None
    assert not provider.make(source, CALL, MANUAL, HostHooks(), there).is_new
    larger = provider.prepare(source, CallShape.of(make_inputs(16)), MANUAL)
    assert larger.found is None and larger.expected is not None and worker.builds == 1


def test_a_hit_is_logged(provider: EngineProvider, source: FakeSource, caplog: pytest.LogCaptureFixture) -> None:
    build_only(provider, source)
    with caplog.at_level(logging.INFO, "slipstream"):
        for _ in range(2):
            return_it(provider, ask(provider, source))
    assert caplog.text.count("cache hit, Tiny 64×64 batch 2") == 1


def test_first_use_waits_for_the_build(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    assert_serves(ask(provider, source, FIRST_USE), source)
    assert worker.builds == 1


def test_first_use_waits_though_the_host_is_busy_with_this_run(provider: EngineProvider, source: FakeSource) -> None:
    provider.run_began()
    assert_serves(ask(provider, source, FIRST_USE), source)


def test_background_goes_on_without(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    worker.gate.clear()
    offer = ask(provider, source, BACKGROUND)
    assert offer.engine is None and "built in the background" in offer.reason
    worker.gate.set()
    wait_until(lambda: not provider.queue.pending())
    assert_serves(ask(provider, source, BACKGROUND), source)
    assert worker.builds == 1


def test_background_builds_hold_still_during_a_run(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    provider.run_began()
    ask(provider, source, BACKGROUND)
    assert not worker.started.wait(0.3)
    provider.run_ended()
    assert worker.started.wait(30)


def test_manual_builds_nothing(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    offer = ask(provider, source, MANUAL)
    assert offer.engine is None and "build it with the Build Engine node" in offer.reason
    assert provider.queue.pending() == [] and worker.builds == 0


def test_a_damaged_engine_is_told_from_one_that_was_never_built(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    ask(provider, source, FIRST_USE)
    (entry,) = provider.store.list()
    (entry.directory / "manifest.json").write_text("{", encoding="utf-8")
    offer = ask(EngineProvider(provider.store, provider.backends), source, MANUAL)
    assert offer.engine is None and "is damaged and was set aside" in offer.reason and "build it" in offer.reason


def test_a_build_of_another_process_is_told_from_our_own(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    (plan,) = provider.plans(source, CALL, BACKGROUND)
    with provider.store.reserve(plan.key.digest):
        ask(provider, source, BACKGROUND)
        wait_until(lambda: (ticket := provider.queue.find(plan.key.digest)) is not None and ticket.waits_for_another)
        ticket = provider.queue.find(plan.key.digest)
        assert ticket is not None and ticket.describe() == "queued: another process is building this engine"
        assert "another process is building the engine for" in ask(provider, source, BACKGROUND).reason
    wait_until(lambda: not provider.queue.pending())
    assert worker.builds == 1


def test_first_use_behind_a_background_build_that_holds_still(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    """The run that waits makes the host busy, and a busy host pauses background builds: no waiting in a ring."""
    worker.gate.clear()
    ask(provider, source, BACKGROUND, CallShape.of(make_inputs(16)))
    assert worker.started.wait(30)
    provider.run_began()
    threading.Timer(0.3, worker.gate.set).start()
    done = threading.Thread(target=ask, args=(provider, source, FIRST_USE), daemon=True)
    done.start()
    done.join(20)
    assert not done.is_alive()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(backend=BackendChoice.OFF), "switched off"),
        (Settings(resolutions=parse_resolutions("512x512")), "64×64 is not in the node's list"),
        (Settings(backend=BackendChoice.TENSORRT), "choose backend auto or compiled"),
    ],
    ids=["off", "another resolution", "tensorrt"],
)
def test_settings_that_want_no_engine(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, settings: Settings, words: str
) -> None:
    offer = ask(provider, source, settings)
    assert offer.engine is None and words in offer.reason and worker.builds == 0


def test_a_machine_that_cannot_build_says_why(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, worker: FakeWorker
) -> None:
    backend.cannot_build = "no C++ compiler was found"
    offer = ask(provider, source)
    assert offer.engine is None and "null: no C++ compiler was found" in offer.reason
    assert worker.builds == 0


def test_a_machine_that_cannot_build_still_uses_what_is_there(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    build_only(provider, source)
    backend.cannot_build = "no C++ compiler was found"
    assert_serves(ask(restarted(provider), source), source)


def test_an_engine_in_eight_bits_is_told_of_as_that(provider: EngineProvider, source: FakeSource) -> None:
    offer = ask(provider, source, FP8)
    assert offer.plan is not None and offer.engine is not None, offer.reason
    assert (offer.plan.spec.quantised, offer.plan.spec.precision) == (Quantised.FP8, source.precision)
    (entry,) = provider.store.list()
    assert (entry.manifest.precision, entry.manifest.quantised) == ("fp32", "fp8")
    assert summary(entry)["precision"] == "fp8"
    assert ask(provider, source).plan != offer.plan, "auto is another engine"


@pytest.fixture
def old_tensorrt(monkeypatch: pytest.MonkeyPatch) -> NullBackend:
    """One that knows no eight bits here."""
    monkeypatch.setattr("slipstream.trt_backend.backend.find_library", lambda device: library_of("8.6.1")[0])
    backend = NullBackend("tensorrt")
    backend.why_unsupported = TensorRTBackend().why_unsupported  # type: ignore[method-assign]
    return backend


def test_a_backend_without_eight_bits_gives_way(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, old_tensorrt: NullBackend
) -> None:
    provider.backends.insert(0, old_tensorrt)
    offer = ask(provider, source, FP8)
    assert offer.plan is not None and offer.plan.backend.name == "null"
    assert [job.spec.backend.name for job in worker.jobs] == ["null"]


def test_tensorrt_by_name_says_that_it_has_no_eight_bits(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, old_tensorrt: NullBackend
) -> None:
    provider.backends.append(old_tensorrt)
    for policy in BuildPolicy:
        offer = ask(provider, source, replace(FP8, policy=policy, backend=BackendChoice.TENSORRT))
        assert offer.engine is None and "tensorrt: TensorRT 8.6.1 does not compute in 8 bits here" in offer.reason
    assert not worker.builds and not provider.store.list()


def test_an_engine_in_another_precision(provider: EngineProvider, source: FakeSource) -> None:
    offer = ask(provider, source, Settings(policy=BuildPolicy.FIRST_USE, precision=Precision.FP16))
    assert offer.plan is not None and offer.plan.spec.precision is Precision.FP16
    assert offer.engine is not None and offer.engine.engine.weights["scale"].dtype == torch.float16


def test_two_checkpoints_share_an_engine(provider: EngineProvider, worker: FakeWorker) -> None:
    first, second = FakeSource(make_model(1)), FakeSource(make_model(2))
    for source in (first, second):
        offer = ask(provider, source)
        assert_serves(offer, source)
        return_it(provider, offer)
    assert worker.builds == 1 and len(provider.store.list()) == 1


# --------------------------------------------------------------------------------------------- the chain


@pytest.fixture
def chain(store: EngineStore, monkeypatch: pytest.MonkeyPatch) -> EngineProvider:
    backends = [NullBackend("first"), NullBackend("second")]
    worker = FakeWorker(backends)

    def run_build(job: object, *args: object, **kwargs: object) -> object:
        if job.spec.backend.name == "first" and backends[0].load_error:  # type: ignore[attr-defined]
            raise backends[0].load_error
        return worker(job, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "run_build", run_build)
    return EngineProvider(store, list(backends))


def test_the_first_backend_that_can_build_does(chain: EngineProvider, source: FakeSource) -> None:
    offer = ask(chain, source)
    assert offer.plan is not None and offer.plan.backend.name == "first"


def test_what_cannot_build_gives_way(chain: EngineProvider, source: FakeSource) -> None:
    chain.backends[0].cannot_build = "no headers"  # type: ignore[attr-defined]
    offer = ask(chain, source)
    assert offer.plan is not None and offer.plan.backend.name == "second"


def test_what_fails_to_build_gives_way(chain: EngineProvider, source: FakeSource) -> None:
    chain.backends[0].load_error = BuildFailed("the linker crashed")  # type: ignore[attr-defined]
    offer = ask(chain, source)
    assert offer.plan is not None and offer.plan.backend.name == "second"


def test_the_better_engine_is_used_where_both_are_there(chain: EngineProvider, source: FakeSource) -> None:
    chain.backends[0].cannot_build = "no headers"  # type: ignore[attr-defined]
    ask(chain, source)
    chain.backends[0].cannot_build = None  # type: ignore[attr-defined]
    (plan, _) = chain.plans(source, CALL, MANUAL)
    build_engine(plan, chain.store, ignore_progress, CancelToken())
    offer = ask(chain, source)
    assert offer.plan is not None and offer.plan.backend.name == "first"


# ---------------------------------------------------------------------------------------- failing builds


@pytest.mark.parametrize("settings", [FIRST_USE, BACKGROUND], ids=lambda settings: settings.policy.value)
def test_a_failed_build_is_not_tried_again(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, settings: Settings
) -> None:
    worker.error = BuildFailed("g++ crashed")
    for _ in range(4):
        offer = ask(provider, source, settings)
        wait_until(lambda: not provider.queue.pending())
    assert offer.engine is None and "could not be built" in offer.reason and "g++ crashed" in offer.reason
    assert worker.builds == 1


def test_a_killed_build_is_tried_once_more(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    worker.error = BuildDied("killed from outside")
    for _ in range(4):
        assert ask(provider, source).engine is None
    assert worker.builds == 2


def test_asking_by_hand_tries_again(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    worker.error = BuildFailed("g++ crashed")
    with pytest.raises(BuildFailed, match=r"g\+\+ crashed"):
        provider.make(source, CALL, MANUAL, HostHooks())
    worker.error = None
    provider.make(source, CALL, MANUAL, HostHooks())
    assert worker.builds == 2


def test_a_full_disk_is_said_and_the_next_run_tries_again(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.error = StoreError("no space is left on the disk")
    offer = ask(provider, source)
    assert offer.engine is None and "no space is left" in offer.reason
    worker.error = None
    assert_serves(ask(provider, source), source)


def test_a_failed_build_keeps_no_model_alive(provider: EngineProvider, worker: FakeWorker) -> None:
    """An exception keeps the frames it went through, and they the model: gigabytes."""
    worker.error = BuildFailed("g++ crashed")
    source = FakeSource()
    with pytest.raises(BuildFailed):
        provider.make(source, CALL, MANUAL, HostHooks())
    ask(provider, source)
    gone = weakref.ref(source.model)
    del source
    gc.collect()
    assert gone() is None


# ----------------------------------------------------------------------------------------- while waiting


def test_progress_is_shown_while_waiting(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    shown: list[Progress] = []
    worker.gate.clear()
    threading.Timer(0.5, worker.gate.set).start()
    provider.offer(source, CALL, FIRST_USE, HostHooks(progress=shown.append))
    assert {"start", "load"} <= {update.phase for update in shown}
    assert shown[-1].message == "engine ready"


def test_an_interrupt_while_waiting_cancels_the_build(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.gate.clear()

    def check() -> None:
        if worker.started.is_set():
            tickets.extend(provider.queue.pending())
            raise Interrupted

    tickets: list = []
    with pytest.raises(Interrupted):
        provider.offer(source, CALL, FIRST_USE, HostHooks(check_interrupted=check, interruptions=(Interrupted,)))
    assert [ticket.state for ticket in tickets] == [TicketState.CANCELLED]
    assert provider.queue.pending() == [] and provider.store.list() == []
    worker.gate.set()
    assert_serves(ask(provider, source), source)


def test_an_interrupt_does_not_wait_for_somebody_elses_build(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.gate.clear()
    other = provider.queue.submit(provider.plans(source, CallShape.of(make_inputs(16)), FIRST_USE)[0])
    assert worker.started.wait(30)

    def check() -> None:
        raise Interrupted

    def wait() -> None:
        with pytest.raises(Interrupted):
            provider.offer(source, CALL, FIRST_USE, hooks)
        interrupted.set()

    hooks = HostHooks(check_interrupted=check, interruptions=(Interrupted,))
    interrupted = threading.Event()
    threading.Thread(target=wait, daemon=True).start()
    assert interrupted.wait(5) and other.state is TicketState.RUNNING


def test_a_build_cancelled_by_hand_is_a_reason(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.gate.clear()
    threading.Timer(0.3, provider.queue.cancel_all, ("stopped in the sidebar",)).start()
    offer = ask(provider, source)
    assert offer.engine is None and "stopped in the sidebar" in offer.reason
    with pytest.raises(BuildCancelled):
        threading.Timer(0.3, provider.queue.cancel_all, ("stopped in the sidebar",)).start()
        provider.make(source, CALL, MANUAL, HostHooks())


def test_a_run_that_was_started_for_its_build_ends_with_it(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.gate.clear()
    threading.Timer(0.3, provider.queue.cancel_all, ("stopped in the sidebar",)).start()
    with pytest.raises(Interrupted, match="stopped in the sidebar"):
        provider.offer(source, CALL, FIRST_USE, HostHooks(interruptions=(Interrupted,), by_hand=True))
    assert provider.queue.pending() == [] and provider.store.list() == []


def test_earlier_failures_do_not_count_for_who_asks_by_hand(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.error = BuildFailed("no compiler")
    assert "no compiler" in ask(provider, source).reason
    worker.error = None
    assert "no compiler" in ask(provider, source).reason and worker.builds == 1
    wanted: list[str] = []
    offer = provider.offer(source, CALL, FIRST_USE, HostHooks(by_hand=True, wants=wanted.append))
    assert offer.engine is not None and offer.plan is not None
    assert wanted == [offer.plan.key.digest] and worker.builds == 2


# ------------------------------------------------------------------------------------- whatever goes wrong


ERRORS = [IncompatibleEngine("another libstdc++"), RuntimeError("dlopen failed"), OSError("gone"), KeyError("nodes")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_engine_that_cannot_be_loaded_is_a_reason(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, error: Exception
) -> None:
    backend.load_error = error
    offer = ask(provider, source)
    assert offer.engine is None and str(error) in offer.reason
    backend.load_error = None
    assert_serves(ask(provider, source), source)


@pytest.mark.parametrize(
    "error",
    [UnsupportedModel("the weights are offloaded"), RuntimeError("?")],
    ids=lambda error: type(error).__name__,
)
def test_weights_that_cannot_be_had_are_a_reason(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, error: Exception
) -> None:
    source.unavailable = error
    offer = ask(provider, source)
    assert offer.engine is None and str(error) in offer.reason
    source.unavailable = None
    assert_serves(ask(provider, source), source)
    assert len(backend.engines) == 1, "the engine went back to the pool"


@pytest.mark.parametrize("when", ["bind", "reference"])
def test_running_out_of_memory_before_the_first_call_is_a_reason(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as small:
        small.setattr(source, when, fail)
        offer = ask(provider, source)
    assert offer.engine is None and "ran out of GPU memory" in offer.reason
    assert "report" not in offer.reason, "no bug of ours"
    assert all(engine.closed for engine in backend.engines), "so that the plain model has room"
    assert_serves(ask(provider, source), source)


def test_build_engine_says_that_memory_ran_out(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.unavailable = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(UnsupportedModel, match="^The engine ran out of GPU memory"):
        provider.make(source, CALL, FIRST_USE, HostHooks())


def test_room_is_made_for_what_the_engine_held_when_it_was_verified(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    hooks = HostHooks(free_device_memory=lambda device, wanted: asked.append(wanted))
    monkeypatch.setattr(backend, "device_bytes", 1000)
    provider.make(source, CALL, FIRST_USE, hooks)
    assert asked == [], "nobody knew"
    (entry,) = provider.store.list()
    assert [known.device_bytes for known in entry.manifest.verifications.values()] == [1000]
    return_it(provider, provider.offer(source, CALL, MANUAL, hooks))
    assert asked == [], "it is loaded"
    later = restarted(provider)
    return_it(later, later.offer(source, CALL, MANUAL, hooks))
    assert asked == [1000]


def test_a_pending_build_says_how_long_it_will_take(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    worker.seconds = 120.0
    provider.make(source, CALL, FIRST_USE, HostHooks())
    larger = CallShape.of(make_inputs(16))
    worker.gate.clear()
    first = provider.offer(source, larger, BACKGROUND, HostHooks()).reason
    assert first.endswith("is being built in the background, about 2 min by earlier builds on this machine")
    (ticket,) = provider.queue.pending()
    assert ticket.estimate == 120.0
    ticket.seconds = 80.0
    assert provider.offer(source, larger, BACKGROUND, HostHooks()).reason.endswith("on this machine, 40 s left")


def test_a_verified_engine_is_compared_with_the_model_once_a_process(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    provider.make(source, CALL, MANUAL, HostHooks())
    references = source.reference_calls
    later = restarted(provider)
    for _ in range(3):
        offer = ask(later, source)
        assert_serves(offer, source)
        return_it(later, offer)
    assert backend.engines[-1].calls == 1 + 3, "one call to compare, one for each picture"
    assert source.reference_calls == references, "without the plain model in fp32"


def test_a_model_that_computes_something_else_in_this_process(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights and its files are the same: an extension has changed it."""
    provider.make(source, CALL, MANUAL, HostHooks())
    later, eager = restarted(provider), source.eager
    with monkeypatch.context() as changed:
        changed.setattr(source, "eager", lambda inputs: {"out": 1.05 * eager(inputs)["out"]})
        for _ in range(2):
            offer = ask(later, source)
            assert offer.engine is None and "was right when it was built, but differs" in offer.reason
    assert_serves(ask(restarted(provider), source), source)


def test_a_plain_model_that_overflows_says_nothing_about_the_engine(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.make(source, CALL, MANUAL, HostHooks())
    with monkeypatch.context() as overflowing:
        overflowing.setattr(source, "eager", lambda inputs: {"out": inputs["x"] * float("inf")})
        assert ask(restarted(provider), source).engine is not None


def test_an_interrupt_in_the_check_is_no_reason(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eager(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "eager", eager)
    with pytest.raises(KeyboardInterrupt):
        ask(provider, source)


def test_a_corrupt_engine_is_a_reason_and_built_again(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    _, entry = build_only(provider, source)
    entry.path("engine.txt").write_text("lulu")
    offer = ask(provider, source)
    assert offer.engine is None and "has another content" in offer.reason
    assert_serves(ask(provider, source), source)
    assert worker.builds == 2


def test_an_engine_removed_as_it_is_loaded_is_a_reason(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, entry = build_only(provider, source)
    monkeypatch.setattr(provider.store, "lookup", lambda _: entry)
    EngineStore(provider.store.root).delete(entry.digest)
    offer = ask(provider, source)
    assert offer.engine is None and "removed from the store" in offer.reason


# ------------------------------------------------------------------------------------------- verification


def test_an_engine_is_checked_once_per_weights(provider: EngineProvider, source: FakeSource) -> None:
    for _ in range(3):
        return_it(provider, ask(provider, source))
    assert source.reference_calls == 2  # one check, two inputs


def test_a_check_is_remembered_on_disk(provider: EngineProvider, source: FakeSource) -> None:
    ask(provider, source)
    again = FakeSource(source.model)
    assert_serves(ask(restarted(provider), again), again)
    assert again.reference_calls == 0
    (entry,) = provider.store.list()
    assert entry.manifest.verifications[source.weights_digest()].relative_error == 0


def test_other_weights_are_checked_too(provider: EngineProvider, source: FakeSource) -> None:
    return_it(provider, ask(provider, source))
    other = FakeSource(make_model(5))
    return_it(provider, ask(provider, other))
    assert other.reference_calls == 2
    return_it(provider, ask(provider, source))
    assert source.reference_calls == 2
    (entry,) = provider.store.list()
    assert set(entry.manifest.verifications) == {source.weights_digest(), other.weights_digest()}


def test_what_another_process_checked_is_not_checked_again(provider: EngineProvider, source: FakeSource) -> None:
    """Also where this process has had the engine loaded since before."""
    return_it(provider, ask(provider, FakeSource(make_model(5))))
    return_it(provider, ask(restarted(provider), FakeSource(source.model)))
    return_it(provider, ask(provider, source))
    assert source.reference_calls == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [(1e-2, "differs from the model"), (float("nan"), "computes NaN or Inf"), (float("inf"), "computes NaN or Inf")],
)
def test_a_wrong_engine_never_serves(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, error: float, words: str
) -> None:
    backend.error = error
    first, second = ask(provider, source), ask(provider, source)
    assert first.engine is None and second.engine is None
    assert words in first.reason and second.reason == first.reason
    assert len(backend.engines) == 1 and backend.engines[0].calls <= 2, "checked once, then known to be wrong"
    (entry,) = provider.store.list()
    assert entry.manifest.verifications == {}


def test_an_engine_wrong_for_one_checkpoint_may_serve_another(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.error = 1e-2
    ask(provider, source)
    backend.error = 0.0
    other = FakeSource(make_model(5))
    assert_serves(ask(provider, other), other)
    assert ask(provider, source).engine is None


def test_a_wrong_engine_that_was_built_anew_gets_another_chance(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    """As its message asks for: delete it and build again."""
    backend.error = 1e-2
    ask(provider, source)
    (entry,) = provider.store.list()
    provider.store.delete(entry.digest, force=True)
    backend.error, backend.content = 0.0, "better"
    assert_serves(ask(provider, source), source)


def test_another_driver_asks_for_another_check(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, worker: FakeWorker
) -> None:
    ask(provider, source)
    backend.driver = "2.0"
    again = FakeSource(source.model)
    ask(restarted(provider), again)
    assert again.reference_calls == 2 and worker.builds == 1
    (entry,) = provider.store.list()
    assert entry.manifest.verifications[source.weights_digest()].driver == "2.0"


def test_a_driver_that_breaks_the_engine_is_noticed(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    ask(provider, source)
    backend.driver, backend.error = "2.0", 1e-2
    assert ask(restarted(provider), source).engine is None


def test_a_store_that_cannot_be_written_is_no_obstacle(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_only(provider, source)

    def refuse(*_: object) -> None:
        raise StoreError("the store is read-only")

    monkeypatch.setattr(provider.store, "record_verification", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            offer = ask(provider, source)
            assert_serves(offer, source)
            return_it(provider, offer)
    assert source.reference_calls == 2, "what cannot be written is remembered by this process"
    assert caplog.text.count("read-only") == 1


# -------------------------------------------------------------------------------- what ended a process

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork here")


def die(provider: EngineProvider, phase: str, graphs: bool) -> str:
    """Another process ends as it uses the only engine, whose digest is given."""
    (entry,) = provider.store.list()
    Doomed(provider.store.marks, entry.digest, phase, graphs, versions_now()).end()
    return entry.digest


def marks(provider: EngineProvider) -> list[str]:
    """The phases of which marks are there."""
    return sorted(path.name.split(".")[1] for path in provider.store.marks.glob("*.json"))


@pytest.fixture
def seen(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The marks that were there when an engine was loaded or called."""
    found: list[list[str]] = []

    def looking(method: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            found.append(marks(provider))
            return method(*args)

        return look

    monkeypatch.setattr(NullBackend, "load", looking(NullBackend.load))
    monkeypatch.setattr(NullEngine, "_run", looking(NullEngine._run))
    return found


def test_loading_and_the_first_call_are_watched_once_a_process(
    provider: EngineProvider, source: FakeSource, seen: list[list[str]]
) -> None:
    offer = ask(provider, source)
    assert_serves(offer, source)
    assert seen[:2] == [[LOAD], [USE]] and seen[2:] == [[]] * (len(seen) - 2) and len(seen) > 2
    return_it(provider, offer)
    provider.pool.clear()
    seen.clear()
    assert_serves(ask(provider, source), source)
    assert seen == [[]] * len(seen) and len(seen) > 1
    seen.clear()
    assert_serves(ask(restarted(provider), source), source)
    assert seen[:2] == [[LOAD], [USE]]


@needs_fork
def test_an_engine_that_ended_a_process_without_graphs_is_not_used(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    return_it(provider, ask(provider, source))
    digest = die(provider, USE, False)
    loaded = len(backend.engines)
    later = restarted(provider)
    reason = ask(later, source).reason
    assert "is not used: the program ended while it was used for the first time" in reason and "Try again" in reason
    assert len(backend.engines) == loaded
    later.try_again(digest)
    assert_serves(ask(later, source), source)


@needs_fork
def test_try_again_reaches_an_engine_in_use(provider: EngineProvider, source: FakeSource) -> None:
    return_it(provider, ask(provider, source))
    digest = die(provider, USE, True)
    later = restarted(provider)
    used, idle = ask(later, source), ask(later, source)
    assert used.engine is not None and idle.engine is not None and not used.engine.canary.allows_graphs
    return_it(later, idle)
    later.try_again(digest)
    assert idle.engine.engine.closed and not used.engine.engine.closed
    assert_serves(used, source)
    return_it(later, used)
    assert used.engine.engine.closed
    again = ask(later, source)
    assert again.engine is not None and again.engine.canary.allows_graphs


@needs_fork
def test_an_engine_that_is_built_anew_is_forgiven_and_watched(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, seen: list[list[str]]
) -> None:
    return_it(provider, ask(provider, source))
    for _ in range(2):
        digest = die(provider, USE, False)
    assert provider.delete(digest)
    backend.content = "better"
    seen.clear()
    assert_serves(ask(provider, source), source)
    assert seen[:2] == [[LOAD], [USE]]


# ---------------------------------------------------------------------------------------------- prepare


def test_a_prepared_engine_is_built_checked_and_back_in_the_pool(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    made = provider.make(source, CALL, MANUAL, HostHooks())
    plan, entry = made.plan, made.entry
    assert entry.digest == plan.key.digest and source.weights_digest() in entry.manifest.verifications
    assert [engine.weights for engine in backend.engines] == [{}]
    assert_serves(ask(provider, source, MANUAL), source)
    assert source.reference_calls == 2 and len(backend.engines) == 1


def test_preparing_a_wrong_engine_says_so(provider: EngineProvider, source: FakeSource, backend: NullBackend) -> None:
    backend.error = 1e-2
    with pytest.raises(IncompatibleEngine, match="differs from the model"):
        provider.make(source, CALL, MANUAL, HostHooks())


# ------------------------------------------------------------------------------------------------ threads


def test_runs_on_many_threads_are_counted(provider: EngineProvider) -> None:
    def run() -> None:
        for _ in range(2000):
            provider.run_began()
            provider.run_ended()

    _run_together([run] * 4)
    assert provider._is_idle()


def test_threads_that_ask_at_once_build_once_and_get_engines_of_their_own(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    offers: list[Offer] = []
    _run_together([lambda: offers.append(ask(provider, source))] * 3)
    engines = [offer.engine for offer in offers]
    assert None not in engines and len({id(engine) for engine in engines}) == 3
    assert worker.builds == 1


def _run_together(jobs: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_it_polls_quickly_enough_for_people() -> None:
    assert provider_module._WAIT_POLL_SECONDS <= 0.2


def test_nothing_is_written_before_the_first_build(tmp_path: Path) -> None:
    EngineProvider(EngineStore(tmp_path / "engines"), [NullBackend()])
    assert not (tmp_path / "engines").exists()


def test_room_is_made_for_a_build_that_somebody_waits_for(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, worker: FakeWorker
) -> None:
    asked: list[int] = []
    hooks = HostHooks(free_device_memory=lambda device, wanted: asked.append(wanted))
    backend.building = 5000
    provider.offer(source, CALL, BACKGROUND, hooks)
    wait_until(lambda: not provider.queue.pending())
    assert asked == [], "the run goes on, and needs its memory"
    provider.offer(source, CallShape.of(make_inputs(16)), FIRST_USE, hooks)
    provider.make(source, CallShape.of(make_inputs(24)), MANUAL, hooks)
    assert asked == [5000, 5000]
    worker.error = BuildFailed("g++ crashed")
    for _ in range(3):
        provider.offer(source, CallShape.of(make_inputs(32)), FIRST_USE, hooks)
    assert asked == [5000] * 3, "not for what is not tried again"
