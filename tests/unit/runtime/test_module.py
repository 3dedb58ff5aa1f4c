"""Sampling runs on an accelerated model: right pictures, by engine or by eager with a reason."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.dtypes import precision_of
from slipstream.core.errors import IncompatibleEngine, ShapeOutsideProfile
from slipstream.core.protocols import Tensors
from slipstream.core.spec import Precision, Role
from slipstream.engine_cache import EngineStore
from slipstream.runtime.loaded import device_memory
from slipstream.runtime.module import AcceleratedModule, ByBlocks, Run
from slipstream.runtime.planning.build_estimate import past_build
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings, ShapeChoice, parse_resolutions
from slipstream.runtime.settings.preferences import Preferences
from slipstream.tests.fakes import (
    BACKGROUND,
    CPU,
    FIRST_USE,
    MANUAL,
    FakeArchitecture,
    FakeSource,
    FakeWorker,
    NullBackend,
    make_inputs,
    make_model,
    wait_until,
)

INPUTS = make_inputs()


@pytest.fixture
def module(provider: EngineProvider) -> AcceleratedModule:
    return AcceleratedModule(provider, FIRST_USE)


def call(run: Run, source: FakeSource, inputs: Tensors = INPUTS, veto: str | None = None) -> torch.Tensor:
    return run(inputs, lambda: source.eager(inputs), veto)["out"]


def assert_right(found: torch.Tensor, source: FakeSource, inputs: Tensors = INPUTS, tolerance: float = 1e-5) -> None:
    wanted = source.eager(inputs)["out"]
    assert found.dtype == wanted.dtype
    assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)


def test_how_long_the_build_of_a_missing_engine_takes_is_known_beforehand(provider: EngineProvider) -> None:
    module, source = AcceleratedModule(provider, MANUAL), FakeSource()
    with module.run(source) as run:
        call(run, source)
    assert module.build_seconds is None, "nothing was built here before"
    (plan,) = provider.plans(source, CallShape.of(INPUTS), MANUAL)
    other = replace(past_build(plan, 0, 7.0), architecture="b" * 64, layers=0)
    assert provider.history.add(other) and provider.history.add(past_build(plan, 0, 70.0))
    with module.run(source) as run:
        call(run, source)
    assert module.build_seconds == 70


def counts(module: AcceleratedModule) -> tuple[int, int]:
    return module.status.engine_calls, module.status.eager_calls


def reasons(module: AcceleratedModule) -> list[str]:
    return list(module.status.to_json()["reasons"])


# -------------------------------------------------------------------------------------------------- runs


def test_a_run_goes_to_the_engine(module: AcceleratedModule, source: FakeSource) -> None:
    with module.run(source) as run:
        for seed in range(3):
            inputs = make_inputs(seed=seed)
            assert_right(call(run, source, inputs), source, inputs)
    assert counts(module) == (3, 0)
    (engine,) = module.status.to_json()["engines"]
    assert (engine["label"], engine["backend"], engine["relative_error"]) == ("Tiny 64×64 batch 2", "null", 0)


def test_each_shape_goes_to_an_engine_of_its_own(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    calls = [make_inputs(8), make_inputs(16), make_inputs(8, batch=1)]
    with module.run(source) as run:
        for inputs in [*calls, *calls]:
            assert_right(call(run, source, inputs), source, inputs)
    assert counts(module) == (6, 0) and len(backend.engines) == 3


@pytest.mark.parametrize(("host", "wanted"), [(Precision.FP32, Precision.FP16), (Precision.FP16, Precision.FP32)])
def test_outputs_come_in_the_hosts_dtype(provider: EngineProvider, host: Precision, wanted: Precision) -> None:
    source = FakeSource(precision=host)
    inputs = make_inputs(dtype=torch.float32 if host is Precision.FP32 else torch.float16)
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE, precision=wanted))
    with module.run(source) as run:
        assert_right(call(run, source, inputs), source, inputs, tolerance=1e-2)
    assert counts(module) == (1, 0)


def test_an_engine_is_swapped_in_only_between_runs(provider: EngineProvider, source: FakeSource) -> None:
    module = AcceleratedModule(provider, BACKGROUND)
    with module.run(source) as run:
        call(run, source)
        provider.queue.submit(provider.plans(source, _shape(), BACKGROUND)[0], urgent=True).wait(30)
        assert len(provider.store.list()) == 1
        call(run, source)
    assert counts(module) == (0, 2)
    with module.run(source) as run:
        assert_right(call(run, source), source)
    assert counts(module) == (1, 2)


def test_what_is_asked_without_a_call(provider: EngineProvider, source: FakeSource) -> None:
    """Whether an engine would answer, whether one is ordered for that, and whether an ordered one is on its way."""
    module, other = AcceleratedModule(provider, BACKGROUND), make_inputs(16)
    with module.run(source) as run:
        assert "no engine" in (run.why_not(INPUTS, may_build=False) or "") and not provider.queue.pending()
        assert not run.is_coming(INPUTS)
        assert "being built in the background" in (run.why_not(INPUTS) or "")
        assert run.is_coming(INPUTS) and not run.is_coming(other)
        (ticket,) = provider.queue.pending()
    assert ticket.wait(30)
    with module.run(source) as run:
        assert run.why_not(INPUTS, may_build=False) is None and not run.is_coming(INPUTS)
        assert_right(call(run, source), source)
        assert run.why_not(INPUTS) is None
    assert counts(module) == (1, 0)
    assert len(provider.pool._idle) == 1 and not provider.pool._used, "taken once, and given back"


def test_a_background_build_begins_when_the_run_is_over(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    module = AcceleratedModule(provider, BACKGROUND)
    with module.run(source) as run:
        call(run, source)
        assert not worker.started.wait(0.3)
    wait_until(lambda: provider.store.list())


def test_weights_are_taken_anew_for_each_run_and_given_back(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    with module.run(source) as run:
        before = call(run, source)
        call(run, source)
    (engine,) = backend.engines
    assert engine.weights == {} and engine.updates == 1
    source.model.scale += 1  # a LoRA
    with module.run(source) as run:
        assert_right(found := call(run, source), source)
    assert not torch.allclose(found, before)
    assert backend.engines == [engine] and engine.updates == 2 and engine.weights == {}


def test_a_run_that_fails_gives_everything_back(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    with pytest.raises(ZeroDivisionError), module.run(source) as run:
        call(run, source)
        raise ZeroDivisionError
    assert backend.engines[0].weights == {}
    assert module.provider._is_idle()


def test_a_run_ends_even_if_its_engine_cannot_be_given_back(
    module: AcceleratedModule, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the driver is gone")

    with pytest.raises(RuntimeError), module.run(source) as run:
        call(run, source)
        monkeypatch.setattr(module.provider.pool, "give_back", fail)
    assert module.provider._is_idle(), "background builds would never begin again"


def test_two_models_take_turns(module: AcceleratedModule, backend: NullBackend) -> None:
    for seed in (1, 2, 1):
        source = FakeSource(make_model(seed))
        with module.run(source) as run:
            assert_right(call(run, source), source)
    assert counts(module) == (3, 0) and len(backend.engines) == 1


# --------------------------------------------------------------------------------------------- fallbacks


def test_a_veto_goes_to_eager_for_that_call(module: AcceleratedModule, source: FakeSource) -> None:
    with module.run(source) as run:
        call(run, source, veto="a ControlNet is attached")
        call(run, source)
    assert counts(module) == (1, 1) and reasons(module) == ["a ControlNet is attached"]


def test_no_weights_are_read_for_a_call_that_no_engine_serves(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str:
        raise AssertionError("gigabytes are read before the first step")

    monkeypatch.setattr(source, "weights_digest", digest)
    module = AcceleratedModule(provider, MANUAL)
    with module.run(source) as run:
        run(INPUTS, lambda: source.eager(INPUTS), beside=lambda: source.eager(INPUTS))
    assert counts(module) == (0, 1)


def test_a_reason_is_logged_once(
    provider: EngineProvider, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    module = AcceleratedModule(provider, MANUAL)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with module.run(source) as run:
                call(run, source)
                call(run, source)
    assert counts(module) == (0, 4)
    assert caplog.text.count("runs your model without an engine") == 1


@pytest.mark.parametrize(
    "error",
    [
        ShapeOutsideProfile("x is on cuda:1"),
        IncompatibleEngine("no weights"),
        RuntimeError("run_func_ failed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_engine_that_fails_is_not_asked_again_in_that_run(
    module: AcceleratedModule,
    source: FakeSource,
    backend: NullBackend,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    with caplog.at_level(logging.WARNING), module.run(source) as run:
        assert_right(call(run, source), source)
        backend.call_error = error
        assert_right(call(run, source), source)
        backend.call_error = None
        assert_right(call(run, source), source)
    assert counts(module) == (1, 2)
    (reason,) = reasons(module)
    assert str(error) in reason
    assert caplog.text.count("runs your model without an engine") == 1
    assert all(engine.weights == {} for engine in backend.engines)
    with module.run(source) as run:
        call(run, source)
    assert counts(module) == (2, 2)


def test_one_shape_that_fails_leaves_the_others(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    with module.run(source) as run:
        backend.call_error = None
        call(run, source, make_inputs(16))
        call(run, source)
        backend.call_error = RuntimeError("run_func_ failed")
        call(run, source)
        backend.call_error = None
        call(run, source, make_inputs(16))
    assert counts(module) == (3, 1)


def test_an_interrupt_in_an_engine_reaches_the_host(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    with pytest.raises(KeyboardInterrupt), module.run(source) as run:
        call(run, source)
        backend.call_error = KeyboardInterrupt()
        call(run, source)
    assert backend.engines[0].weights == {} and module.provider._is_idle()


class Interrupted(Exception):
    """An older ComfyUI's is an ordinary exception."""


def test_a_hosts_own_interrupt_in_an_engine_reaches_it(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    hooks = HostHooks(interruptions=(Interrupted,))
    with pytest.raises(Interrupted), module.run(source, hooks) as run:
        call(run, source)
        backend.call_error = Interrupted()
        call(run, source)
    assert counts(module) == (1, 0) and not backend.engines[0].closed


# ------------------------------------------------------------------------------- engines of several sizes


@pytest.fixture(params=[ShapeChoice.RANGE, ShapeChoice.PROFILES])
def several(provider: EngineProvider, request: pytest.FixtureRequest) -> AcceleratedModule:
    """For 64×64 and 128×128."""
    sizes = parse_resolutions("64x64, 128x128")
    chosen = Settings(policy=BuildPolicy.FIRST_USE, resolutions=sizes, shapes=request.param)
    return AcceleratedModule(provider, chosen)


def test_calls_of_several_shapes_share_one_engine(
    several: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    calls = [make_inputs(8, tokens=77), make_inputs(16, tokens=77), make_inputs(8, 1, tokens=154)]
    for _ in range(2):
        with several.run(source) as run:
            for inputs in [*calls, *calls]:
                assert_right(call(run, source, inputs), source, inputs)
    assert counts(several) == (12, 0) and len(backend.engines) == 1
    assert backend.engines[0].weights == {} and backend.engines[0].updates == 2


@pytest.mark.parametrize(("batch", "parts"), [(1, [1]), (2, [2]), (3, [2, 1]), (4, [2, 2]), (7, [2, 2, 2, 1])])
def test_a_batch_above_the_largest_runs_in_even_parts(
    several: AcceleratedModule, source: FakeSource, backend: NullBackend, batch: int, parts: list[int]
) -> None:
    inputs = make_inputs(8, batch, tokens=77)
    with several.run(source) as run:
        call(run, source, make_inputs(8, tokens=77))  # builds, loads and checks
        (engine,) = backend.engines
        engine.batches.clear()
        assert_right(call(run, source, inputs), source, inputs)
    assert engine.batches == parts
    assert counts(several) == (1 + len(parts), 0), "each part is an engine call"


def test_five_in_parts_of_at_most_four_are_three_and_two(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    sizes = parse_resolutions("64x64")
    chosen = Settings(policy=BuildPolicy.FIRST_USE, resolutions=sizes, shapes=ShapeChoice.RANGE, max_batch=4)
    inputs = make_inputs(8, 5, tokens=77)
    with AcceleratedModule(provider, chosen).run(source) as run:
        assert_right(call(run, source, inputs), source, inputs)
    assert backend.engines[0].batches[-2:] == [3, 2]


def test_a_static_engine_computes_any_batch_at_once(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    inputs = make_inputs(8, 7, tokens=77)
    with module.run(source) as run:
        assert_right(call(run, source, inputs), source, inputs)
    assert set(backend.engines[0].batches) == {7} and counts(module) == (1, 0)


def test_a_shared_engine_that_fails_is_not_asked_for_any_shape(
    several: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    small, large = make_inputs(8, tokens=77), make_inputs(16, tokens=77)
    with several.run(source) as run:
        call(run, source, small)
        call(run, source, large)
        backend.call_error = RuntimeError("enqueue failed")
        assert_right(call(run, source, small), source, small)
        backend.call_error = None
        assert_right(call(run, source, large), source, large)
    assert counts(several) == (2, 2) and backend.engines[0].weights == {}
    with several.run(source) as run:
        assert_right(call(run, source, large), source, large)
    assert counts(several) == (3, 2) and len(backend.engines) == 1


# ------------------------------------------------------------------------------------------ out of memory


@pytest.fixture
def ooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch's count of failed allocations on the device; the last number is the present one."""
    numbers = [0]
    monkeypatch.setattr(device_memory, "_times_out_of_memory", lambda _: numbers[-1])
    return numbers


def test_an_engine_that_runs_out_of_memory_makes_room_for_the_plain_model(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    dropped: list[torch.device] = []
    with module.run(source, HostHooks(drop_copies=dropped.append)) as run:
        call(run, source)
        (engine,) = backend.engines
        engine.device_bytes = 1288490189
        backend.call_error = torch.OutOfMemoryError("CUDA out of memory")
        assert_right(call(run, source), source)
        assert engine.closed and module.provider.pool.device_bytes(CPU) == 0 and dropped == [CPU]
        backend.call_error = None
        assert_right(call(run, source), source)
    assert counts(module) == (1, 2)
    (reason,) = reasons(module)
    assert "ran out of GPU memory (it needs about 1.2 GB beside the model)" in reason and "Make smaller" in reason
    with module.run(source) as run:
        assert_right(call(run, source), source)
    assert counts(module) == (2, 2), "the next run tries again"


def test_a_package_that_runs_out_of_memory_says_so_in_torchs_count_only(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend, ooms: list[int]
) -> None:
    ooms.append(3)  # somebody else's, earlier
    with module.run(source) as run:
        call(run, source)
        (engine,) = backend.engines

        def fail(tensors: Tensors) -> Tensors:
            ooms.append(4)
            raise RuntimeError("run_func_ failed")

        engine._run = fail
        assert_right(call(run, source), source)
    (reason,) = reasons(module)
    assert "ran out of GPU memory" in reason and engine.closed


@pytest.mark.parametrize(("free", "is_short"), [(2**29, True), (2**33, False)])
def test_where_nobody_counts_little_free_memory_tells(
    module: AcceleratedModule,
    source: FakeSource,
    backend: NullBackend,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    is_short: bool,
) -> None:
    with module.run(source) as run:
        call(run, source)
        monkeypatch.setattr(device_memory, "_counts_nothing", lambda _: True)
        monkeypatch.setattr(device_memory, "free_bytes", lambda _: free)
        backend.call_error = RuntimeError("run_func_ failed")
        call(run, source)
    (reason,) = reasons(module)
    assert ("ran out of GPU memory" in reason) is backend.engines[0].closed is is_short


def test_other_failures_do_not_close_the_engine(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend, ooms: list[int]
) -> None:
    ooms.append(3)
    with module.run(source) as run:
        call(run, source)
        backend.call_error = RuntimeError("run_func_ failed")
        call(run, source)
    (reason,) = reasons(module)
    assert "run_func_ failed" in reason and not backend.engines[0].closed


def fail_twice(module: AcceleratedModule, source: FakeSource, backend: NullBackend) -> None:
    for _ in range(2):
        with module.run(source) as run:
            call(run, source)
            backend.call_error = torch.OutOfMemoryError("CUDA out of memory")
            call(run, source)
        backend.call_error = None


def test_after_two_attempts_the_engine_is_left_alone(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    fail_twice(module, source, backend)
    loaded = len(backend.engines)
    with module.run(source) as run:
        assert_right(call(run, source), source)
    assert counts(module) == (2, 3) and len(backend.engines) == loaded
    assert "After 2 attempts it is left alone" in reasons(module)[-1]
    assert "Build Engine" in reasons(module)[-1]


def test_engines_that_wait_give_their_memory_to_a_model_that_has_too_little(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    vae, provider, shape = FakeSource(), module.provider, CallShape.of(INPUTS)
    vae.architecture = FakeArchitecture(role=Role.VAE_DECODE)
    other = AcceleratedModule(provider, FIRST_USE)
    with other.run(vae) as run:
        call(run, vae)
    assert provider.forecast(vae, shape, FIRST_USE) is not None
    fail_twice(module, source, backend)
    with other.run(vae) as run:
        call(run, vae)
    assert counts(other) == (1, 1) and "GPU memory did not suffice" in reasons(other)[0]
    assert provider.forecast(vae, shape, FIRST_USE) is None, "the plain VAE needs more"

    waiting = FakeSource()
    waiting.architecture = FakeArchitecture("b" * 64)
    with AcceleratedModule(provider, FIRST_USE).run(waiting) as run:
        call(run, waiting)
    backend.engines[-1].device_bytes = 1000
    with other.run(vae) as run:
        call(run, vae)
    assert not backend.engines[-1].closed, "each picture of a small model would load it anew"
    with module.run(source) as run:
        call(run, source)
    assert backend.engines[-1].closed


def test_a_vae_that_has_too_little_memory_does_not_speak_for_others(
    module: AcceleratedModule, backend: NullBackend
) -> None:
    decoder, encoder = FakeSource(), FakeSource()
    decoder.architecture = FakeArchitecture("d" * 64, Role.VAE_DECODE)
    encoder.architecture = FakeArchitecture("e" * 64, Role.VAE_ENCODE)
    fail_twice(module, decoder, backend)
    other = AcceleratedModule(module.provider, FIRST_USE)
    with other.run(encoder) as run:
        call(run, encoder)
    assert counts(other) == (1, 0), reasons(other)


def test_more_free_memory_is_worth_another_attempt(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2**30]
    monkeypatch.setattr(device_memory, "free_bytes", lambda _: free[-1])
    fail_twice(module, source, backend)
    free.append(2**30 + 2**27)
    with module.run(source) as run:
        call(run, source)
    assert counts(module) == (2, 3)
    free.append(2**31)
    with module.run(source) as run:
        call(run, source)
    assert counts(module) == (3, 3)


def test_what_a_host_streams_is_no_free_memory(
    source: FakeSource,
    backend: NullBackend,
    worker: FakeWorker,
    store: EngineStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ComfyUI fills free memory with pages of weights and gives them back as they are needed: it counts both."""
    free = [2**30]
    monkeypatch.setattr(device_memory, "free_bytes", lambda _: free[-1])
    module = AcceleratedModule(EngineProvider(store, [backend], free_bytes=lambda _: 2**31), FIRST_USE)
    fail_twice(module, source, backend)
    free.append(2**33)
    with module.run(source) as run:
        call(run, source)
    assert counts(module) == (2, 3)


def test_build_engine_is_another_attempt(module: AcceleratedModule, source: FakeSource, backend: NullBackend) -> None:
    fail_twice(module, source, backend)
    module.provider.make(source, _shape(), FIRST_USE, HostHooks())
    with module.run(source) as run:
        call(run, source)
    assert counts(module) == (3, 2)


def test_memory_taken_by_the_first_call_is_told(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    with module.run(source) as run:
        call(run, source)
    told: list[int] = []
    module.provider.pool.on_change = lambda device: told.append(module.provider.pool.device_bytes(device))
    (engine,) = backend.engines
    with module.run(source) as run:
        run.offer_for(_shape())
        engine.device_bytes = 9  # a graph is captured
        call(run, source)
        assert told[-1] == 9
        seen = len(told)
        call(run, source)
        assert len(told) == seen


@pytest.mark.parametrize("during", ["before", "in the middle of a run"])
def test_a_model_in_fp64_goes_to_eager(module: AcceleratedModule, during: str) -> None:
    class Widened(FakeSource):
        """Engines have no dtype for its numbers once `model` is in fp64."""

        @property  # type: ignore[override]
        def precision(self) -> Precision:
            return precision_of(next(self.model.parameters()).dtype)

        @precision.setter
        def precision(self, _: Precision) -> None: ...

    source, wide = Widened(), {name: tensor.double() for name, tensor in INPUTS.items()}
    eager = {"out": torch.full((2, 4, 8, 8), 7.0, dtype=torch.float64)}
    with module.run(source) as run:
        if during != "before":
            assert_right(call(run, source), source)
        source.model.double()
        assert run(wide, lambda: eager) is eager
    assert module.status.eager_calls == 1
    (reason,) = reasons(module)
    assert reason == "The model computes in float64; engines compute in fp32, fp16 or bf16"


def test_what_eager_raises_reaches_the_host(module: AcceleratedModule, source: FakeSource) -> None:
    def eager() -> Tensors:
        raise ValueError("the host's own")

    with pytest.raises(ValueError, match="the host's own"), module.run(source) as run:
        run(INPUTS, eager, veto="a hook")


# ------------------------------------------------------------------------------------- nested, concurrent


def test_a_run_within_a_run_has_an_engine_of_its_own(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    inner_source = FakeSource(make_model(5))
    with module.run(source) as outer:
        assert_right(call(outer, source), source)
        with module.run(inner_source) as inner:
            assert_right(call(inner, inner_source), inner_source)
            assert_right(call(outer, source), source)
        assert_right(call(outer, source), source)
        assert not module.provider._is_idle()
    assert counts(module) == (4, 0) and len(backend.engines) == 2
    assert module.provider._is_idle()


def test_runs_on_two_threads_do_not_disturb_each_other(
    module: AcceleratedModule, source: FakeSource, backend: NullBackend
) -> None:
    problems: list[BaseException] = []
    both = threading.Barrier(2, timeout=30)

    def sample(seed: int) -> None:
        own = FakeSource(make_model(seed))
        try:
            with module.run(own) as run:
                both.wait()
                for step in range(50):
                    inputs = make_inputs(seed=step)
                    assert_right(call(run, own, inputs), own, inputs)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert counts(module) == (100, 0) and len(backend.engines) == 2
    assert module.provider._is_idle()


def test_it_holds_no_tensors_between_runs(module: AcceleratedModule, source: FakeSource, tmp_path: Path) -> None:
    with module.run(source) as run:
        call(run, source)
    assert run._offers == {}


def _shape():  # noqa: ANN202
    from slipstream.runtime.planning.plan import CallShape

    return CallShape.of(INPUTS)


# ---------------------------------------------------------------------------------------------- preferences


def test_what_the_user_prefers_meanwhile_is_for_the_next_run(
    store: EngineStore, backend: NullBackend, worker: FakeWorker, source: FakeSource
) -> None:
    preferred = [Preferences()]
    module = AcceleratedModule(EngineProvider(store, [backend], preferences=lambda: preferred[0]), FIRST_USE)
    with module.run(source) as run:
        call(run, source)
        preferred[0] = Preferences(precision=Precision.FP16)
        call(run, source, make_inputs(16))
    assert {entry.manifest.precision for entry in store.list()} == {"fp32"}
    assert module.asked.precision is None and module.settings.precision is Precision.FP16
    with module.run(source) as run:
        call(run, source)
    assert {entry.manifest.precision for entry in store.list()} == {"fp32", "fp16"}
    assert module.asked.precision is Precision.FP16 and module.host_precision is Precision.FP32


def test_a_part_of_a_run_has_the_settings_of_the_whole(module: AcceleratedModule, source: FakeSource) -> None:
    with module.run(source, settings=MANUAL) as run:
        call(run, source)
    assert counts(module) == (0, 1) and module.asked == MANUAL


def test_why_no_block_runs_on_an_engine_is_told_once(
    provider: EngineProvider, caplog: pytest.LogCaptureFixture
) -> None:
    module, source = AcceleratedModule(provider, MANUAL), FakeSource()
    for _ in range(2):
        with module.run(source) as run:
            run.by_blocks = lambda: "its engine is being built"
            assert_right(call(run, source), source)
    (reason,) = module.status.to_json()["reasons"]
    assert reason.startswith("no engine for") and reason.endswith(
        "none of its blocks runs on one: its engine is being built"
    )
    assert module.status.standing.reason == reason
    assert module.status.eager_calls == 2
    assert [
        record.getMessage() for record in caplog.records if "your model without an engine" in record.getMessage()
    ] == [f"Slipstream runs your model without an engine: {reason}"]


@pytest.mark.parametrize("veto", [None, "another node patches the model"])
def test_an_engine_that_gave_way_to_blocks_serves_where_none_of_them_has_an_engine(
    provider: EngineProvider, source: FakeSource, monkeypatch: pytest.MonkeyPatch, veto: str | None
) -> None:
    monkeypatch.setattr(provider, "_why_blocks_instead", lambda entry: "engines of blocks are faster")
    module = AcceleratedModule(provider, FIRST_USE)
    with module.run(source) as run:
        run.by_blocks = lambda: ByBlocks("4 of 4 calls of blocks on engines", None)
        assert_right(call(run, source), source)
        assert module.status.block_calls == 1
        run.by_blocks = lambda: "its weights are cast at each call"
        assert_right(run(INPUTS, lambda: source.eager(INPUTS), veto)["out"], source)
        for _ in range(2):
            assert_right(call(run, source), source)
    # Why a call that no engine of the whole may answer has none of blocks says nothing of others.
    assert module.status.engine_calls == (2 if veto is None else 1)
    with module.run(source) as run:
        run.by_blocks = lambda: ByBlocks("4 of 4 calls of blocks on engines", None)
        assert_right(call(run, source), source)
    assert module.status.block_calls == 2, "the next run asks again"


def test_a_run_that_wants_none_of_the_whole_model_asks_for_none(provider: EngineProvider, source: FakeSource) -> None:
    module = AcceleratedModule(provider, FIRST_USE)
    with module.run(source) as run:
        run.why_not_whole = "it has engines of blocks alone"
        run.by_blocks = lambda: ByBlocks("4 of 4 calls of blocks on engines", None)
        assert_right(run(INPUTS, lambda: source.eager(INPUTS), beside=lambda: source.eager(INPUTS))["out"], source)
    assert (module.status.engine_calls, module.status.block_calls) == (0, 1)
    assert module.status.standing.reason == "it has engines of blocks alone" and not provider.store.digests()


def test_a_model_whose_blocks_run_on_engines_is_not_called_plain(
    provider: EngineProvider, caplog: pytest.LogCaptureFixture
) -> None:
    module, source = AcceleratedModule(provider, MANUAL), FakeSource()
    with module.run(source) as run:
        run.by_blocks = lambda: ByBlocks("3 of 4 calls of blocks on engines", None)
        for _ in range(3):
            assert_right(call(run, source), source)
    assert (module.status.block_calls, module.status.eager_calls) == (3, 0)
    assert not [record for record in caplog.records if "your model without an engine" in record.getMessage()]
