"""A model whose numbers are too large for fp16 gets engines in bf16."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from slipstream.core.errors import NotFinite
from slipstream.core.protocols import Tensors
from slipstream.core.spec import Precision, Quantised
from slipstream.engine_cache import EngineStore
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks, Offer
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.fakes import (
    BACKGROUND,
    FIRST_USE,
    MANUAL,
    FakeSource,
    FakeWorker,
    NullBackend,
    ask,
    build_only,
    make_inputs,
    make_model,
    wait_until,
)

CALL = CallShape.of(make_inputs(dtype=torch.float16))
LARGER = CallShape.of(make_inputs(16, dtype=torch.float16))
FP16 = Settings(policy=BuildPolicy.FIRST_USE, precision=Precision.FP16)


@pytest.fixture
def source() -> FakeSource:
    return FakeSource(precision=Precision.FP16)


@pytest.fixture(autouse=True)
def _fp16_overflows(backend: NullBackend) -> None:
    backend.overflows = {Precision.FP16}


def restarted(provider: EngineProvider) -> EngineProvider:
    return EngineProvider(EngineStore(provider.store.root), provider.backends)


def assert_bf16_serves(offer: Offer) -> None:
    assert offer.engine is not None and offer.plan is not None, offer.reason
    assert offer.plan.spec.precision is Precision.BF16
    inputs = make_inputs(dtype=torch.bfloat16)
    assert offer.engine.engine(**inputs)["out"].isfinite().all()


def built(worker: FakeWorker) -> list[str]:
    return [job.spec.precision.value for job in worker.jobs]


def test_the_same_offer_answers_in_bf16(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        offer = ask(provider, source)
    assert_bf16_serves(offer)
    assert built(worker) == ["fp16", "bf16"]
    assert caplog.text.count("fp16 overflows in Tiny") == 1


def test_the_record_of_the_engine_says_why_it_is_bf16(provider: EngineProvider, source: FakeSource) -> None:
    offer = ask(provider, source)
    assert offer.engine is not None
    (known,) = offer.engine.entry.manifest.verifications.values()
    assert known.note.endswith("fp16 overflows in this model; built in bf16") and math.isfinite(known.relative_error)


def test_fp16_is_not_tried_again(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    """Neither for another size, nor in the next process, where the refused engine may have been pruned."""
    ask(provider, source)
    assert_bf16_offered(ask(provider, source, call=LARGER))
    later = restarted(provider)
    for entry in later.store.list():
        later.store.delete(entry.digest, force=True)
    assert_bf16_offered(ask(later, source))
    assert built(worker) == ["fp16", "bf16", "bf16", "bf16"]


def assert_bf16_offered(offer: Offer) -> None:
    assert offer.engine is not None and offer.plan is not None, offer.reason
    assert offer.plan.spec.precision is Precision.BF16


def test_other_weights_of_the_architecture_are_given_their_own_chance(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    ask(provider, source)
    backend.overflows = set()
    other = ask(provider, FakeSource(make_model(5), Precision.FP16))
    assert other.plan is not None and other.plan.spec.precision is Precision.FP16


def test_in_the_background_bf16_is_built_while_the_plain_model_works(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    build_only(provider, source)
    offer = ask(provider, source, BACKGROUND)
    assert offer.engine is None and "built in the background" in offer.reason
    wait_until(lambda: not provider.queue.pending())
    assert_bf16_serves(ask(provider, source, BACKGROUND))
    assert built(worker) == ["fp16", "bf16"]


def test_build_engine_prepares_bf16(provider: EngineProvider, source: FakeSource) -> None:
    made = provider.make(source, CALL, MANUAL, HostHooks())
    plan, entry = made.plan, made.entry
    assert plan.spec.precision is Precision.BF16 and entry.digest == plan.key.digest


def test_who_asked_for_fp16_is_told_what_to_choose(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    for _ in range(2):
        offer = ask(provider, source, FP16)
        assert offer.engine is None and "set precision to bf16, or to auto" in offer.reason
    with pytest.raises(NotFinite, match="set precision to bf16"):
        provider.make(source, CALL, FP16, HostHooks())
    assert built(worker) == ["fp16"]


def test_where_bf16_is_unsupported_the_plain_model_is_used(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_unsupported(spec: object) -> str | None:
        return "this GPU has no bf16" if spec.precision is Precision.BF16 else None  # type: ignore[attr-defined]

    monkeypatch.setattr(backend, "why_unsupported", why_unsupported)
    for _ in range(2):
        offer = ask(provider, source)
        assert offer.engine is None and "this GPU has no bf16" in offer.reason


def test_bf16_that_is_not_finite_either_ends_in_a_reason(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, worker: FakeWorker
) -> None:
    backend.overflows = {Precision.FP16, Precision.BF16}
    for _ in range(3):
        offer = ask(provider, source)
        assert offer.engine is None and "computes NaN or Inf" in offer.reason
    assert built(worker) == ["fp16", "bf16"]


@pytest.mark.parametrize("verified_before", [False, True])
def test_a_plain_model_that_overflows_too_does_not_hide_it(
    provider: EngineProvider,
    source: FakeSource,
    backend: NullBackend,
    monkeypatch: pytest.MonkeyPatch,
    verified_before: bool,
) -> None:
    """A black picture of the plain model becomes a right one."""
    if verified_before:
        backend.overflows = set()
        provider.make(source, CALL, FIRST_USE, HostHooks())
        backend.overflows = {Precision.FP16}
    monkeypatch.setattr(source, "eager", lambda inputs: {"out": inputs["x"] * float("nan")})
    assert_bf16_serves(ask(restarted(provider), source))


def test_an_overflow_by_a_lora_is_forgotten_with_the_process(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    source.lora = 0.5
    assert_bf16_serves(ask(provider, source))
    source.lora, backend.overflows = 0.0, set()
    offer = ask(restarted(provider), source)
    assert offer.plan is not None and offer.plan.spec.precision is Precision.FP16


def test_the_refused_engine_is_out_of_the_way(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.copies_weights = True
    assert_bf16_serves(ask(provider, source))
    assert [engine.closed for engine in backend.engines] == [True, False]


FP8 = Settings(policy=BuildPolicy.FIRST_USE, precision=Quantised.FP8)


def test_a_model_that_overflows_is_quantised_beside_bf16(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    ask(provider, source)
    offer = ask(provider, source, FP8)
    assert_bf16_serves(offer)
    assert offer.plan is not None and offer.plan.spec.quantised is Quantised.FP8
    assert [job.spec.precision_name for job in worker.jobs] == ["fp16", "bf16", "fp8"]


def test_an_overflow_of_a_quantised_engine_does_not_blame_fp16(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, worker: FakeWorker
) -> None:
    for _ in range(2):
        offer = ask(provider, source, FP8)
        assert offer.engine is None and "set precision to auto" in offer.reason
    backend.overflows = set()
    other = ask(provider, source)
    assert other.plan is not None and other.plan.spec.precision_name == "fp16"


# ----------------------------------------------------------------------------- found out by a picture itself

SMALL = make_inputs(dtype=torch.float16)
LARGE = {**SMALL, "x": SMALL["x"] * 1000}
OTHER_SIZE = make_inputs(16, dtype=torch.float16)


@pytest.fixture
def _only_large_ones_do(backend: NullBackend) -> None:
    """Verification finds nothing."""
    backend.overflows_above = 100.0


def compute(module: AcceleratedModule, source: FakeSource, *calls: Tensors) -> list[torch.Tensor]:
    """A run that looks at its results."""
    with module.run(source, finite_only=True) as run:
        return [run(inputs, lambda inputs=inputs: source.eager(inputs))["out"] for inputs in calls]  # type: ignore[misc]


def assert_right(found: torch.Tensor, source: FakeSource, inputs: Tensors) -> None:
    wanted = source.eager(inputs)["out"]
    assert found.dtype == wanted.dtype and torch.allclose(
        found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max())
    )


@pytest.mark.usefixtures("_only_large_ones_do")
def test_a_picture_that_overflows_is_computed_in_bf16(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    module = AcceleratedModule(provider, FIRST_USE)
    calls = [SMALL, OTHER_SIZE, LARGE, SMALL, OTHER_SIZE]
    for found, inputs in zip(compute(module, source, *calls), calls, strict=True):
        assert_right(found, source, inputs)
    assert (module.status.engine_calls, module.status.eager_calls) == (5, 0)
    assert built(worker) == ["fp16", "fp16", "bf16", "bf16"]
    assert caplog.text.count("fp16 overflows in Tiny") == 1
    assert not provider.pool._used
    compute(AcceleratedModule(restarted(provider), FIRST_USE), source, LARGE)
    assert built(worker) == ["fp16", "fp16", "bf16", "bf16"]


@pytest.mark.usefixtures("_only_large_ones_do")
def test_a_picture_that_overflows_is_the_plain_models_while_bf16_is_built(
    provider: EngineProvider, source: FakeSource
) -> None:
    build_only(provider, source)
    module = AcceleratedModule(provider, BACKGROUND)
    assert_right(compute(module, source, LARGE)[0], source, LARGE)
    assert (module.status.engine_calls, module.status.eager_calls) == (0, 1)
    assert "computed NaN or Inf in fp16" in module.status.to_json()["now"]
    wait_until(lambda: not provider.queue.pending())
    assert_right(compute(module, source, LARGE)[0], source, LARGE)
    assert module.status.engine_calls == 1


@pytest.mark.usefixtures("_only_large_ones_do")
def test_who_chose_fp16_gets_the_plain_model_and_advice(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    module = AcceleratedModule(provider, FP16)
    for found, inputs in zip(compute(module, source, SMALL, LARGE, SMALL), (SMALL, LARGE, SMALL), strict=True):
        assert_right(found, source, inputs)
    assert (module.status.engine_calls, module.status.eager_calls) == (1, 2)
    first, second = module.status.to_json()["reasons"]
    assert "computed NaN or Inf in fp16, and your model took over" in first and "set precision to bf16" in first
    assert "Tiny overflows in fp16" in second and "set precision to bf16" in second
    later = AcceleratedModule(restarted(provider), FP16)
    compute(later, source, SMALL)
    assert later.status.engine_calls == 0 and built(worker) == ["fp16"] and not provider.pool._used


@pytest.mark.usefixtures("_only_large_ones_do")
def test_numbers_that_were_none_before_blame_nobody(provider: EngineProvider, source: FakeSource) -> None:
    module = AcceleratedModule(provider, FIRST_USE)
    broken = {**SMALL, "x": SMALL["x"] * float("nan")}
    assert compute(module, source, broken)[0].isnan().all()
    compute(module, source, SMALL)
    assert module.status.engine_calls == 2
    assert [use["precision"] for use in module.status.to_json()["engines"]] == ["fp16"]


@pytest.mark.usefixtures("_only_large_ones_do")
def test_another_precision_that_overflows_is_left_for_the_rest_of_the_run(
    provider: EngineProvider, backend: NullBackend, worker: FakeWorker
) -> None:
    backend.overflows = {Precision.FP32}
    source, large = FakeSource(), {name: tensor.float() for name, tensor in LARGE.items()}
    small = {name: tensor.float() for name, tensor in SMALL.items()}
    module = AcceleratedModule(provider, FIRST_USE)
    for found, inputs in zip(compute(module, source, large, small), (large, small), strict=True):
        assert torch.equal(found, source.eager(inputs)["out"])
    assert (module.status.engine_calls, module.status.eager_calls) == (0, 2)
    assert "set precision" not in module.status.to_json()["now"]
    compute(module, source, small)
    assert module.status.engine_calls == 1 and built(worker) == ["fp32"] and not provider.pool._used


@pytest.mark.usefixtures("_only_large_ones_do")
def test_a_quantised_engine_that_overflows_is_left_for_the_rest_of_the_run(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker
) -> None:
    module = AcceleratedModule(provider, FP8)
    for found, inputs in zip(compute(module, source, LARGE, SMALL), (LARGE, SMALL), strict=True):
        assert_right(found, source, inputs)
    assert (module.status.engine_calls, module.status.eager_calls) == (0, 2)
    assert "computed NaN or Inf in fp8" in module.status.to_json()["now"]
    assert [job.spec.precision_name for job in worker.jobs] == ["fp8"] and not provider.pool._used


def test_a_run_that_does_not_ask_for_it_waits_for_no_result(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    backend.overflows_above = 100.0
    module = AcceleratedModule(provider, FIRST_USE)
    with module.run(source) as run:
        assert run(LARGE, lambda: source.eager(LARGE))["out"].isinf().any()
    assert module.status.engine_calls == 1
