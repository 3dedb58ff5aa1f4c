"""Engines that contain the model's numbers."""

from __future__ import annotations

import gc
import logging
import shutil
import weakref
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.core.errors import BuildFailed, StoreError, UnsupportedModel
from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.core.protocols import BoundWeights
from slipstream.core.spec import ModelFingerprint, Precision
from slipstream.engine_cache import EngineStore
from slipstream.runtime.building import build as build_module
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks, Offer
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.fakes import (
    MANUAL,
    FakeArchitecture,
    FakeSource,
    FakeWorker,
    NullBackend,
    make_inputs,
    make_model,
    run_once,
    wait_until,
)

CALL = CallShape.of(make_inputs())
BAKED = Settings(policy=BuildPolicy.FIRST_USE, bake=True)
LORA_WORDS = "weights are baked in, and a LoRA changes them: switch bake off"


@pytest.fixture(autouse=True)
def _can_bake(backend: NullBackend) -> None:
    backend.can_bake = True


def ask(provider: EngineProvider, source: FakeSource, settings: Settings = BAKED) -> Offer:
    return run_once(provider, source, settings)


def test_the_engine_holds_the_models_numbers(
    provider: EngineProvider, source: FakeSource, backend: NullBackend
) -> None:
    offer = ask(provider, source)
    assert offer.plan is not None, offer.reason
    assert offer.plan.key.factors["spec"]["fingerprint"]["weights"] == source.weights_digest()
    inputs = make_inputs(seed=3)
    assert torch.allclose(backend.engines[0](**inputs)["out"], source.eager(inputs)["out"])


def test_other_numbers_are_another_engine(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    for model in (source, FakeSource(make_model(5)), FakeSource(source.model)):
        assert ask(provider, model).engine is not None
    assert worker.builds == 2


def test_without_bake_engines_are_shared(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    for model in (source, FakeSource(make_model(5))):
        assert ask(provider, model, replace(BAKED, bake=False)).engine is not None
    assert worker.builds == 1 and worker.jobs[0].weights is None


@pytest.mark.parametrize("is_built", [False, True])
def test_a_lora_gets_the_plain_model(
    provider: EngineProvider, source: FakeSource, worker: FakeWorker, is_built: bool
) -> None:
    if is_built:
        ask(provider, source)
    source.lora = 0.5
    offer = ask(provider, source)
    assert offer.engine is None and LORA_WORDS in offer.reason
    with pytest.raises(BuildFailed, match="switch bake off"):
        provider.make(source, CALL, replace(BAKED, policy=BuildPolicy.MANUAL), HostHooks())
    assert worker.builds == is_built
    source.lora = 0.0
    assert ask(provider, source).engine is not None


def test_the_background_builds_none(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    """The numbers are there only while the run is."""
    background = replace(BAKED, policy=BuildPolicy.BACKGROUND)
    offer = ask(provider, source, background)
    assert offer.engine is None and 'set build to "first use", or use Build Engine' in offer.reason
    assert provider.queue.pending() == [] and worker.builds == 0
    provider.make(source, CALL, background, HostHooks())
    assert ask(provider, source, background).engine is not None


def test_who_builds_by_hand_is_asked_to(provider: EngineProvider, source: FakeSource) -> None:
    assert "build it with the Build Engine node" in ask(provider, source, replace(MANUAL, bake=True)).reason


def test_a_backend_that_cannot_bake_says_so_once(
    provider: EngineProvider, source: FakeSource, backend: NullBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.can_bake = False
    source.lora = 0.5
    with caplog.at_level(logging.INFO, "slipstream"):
        for _ in range(2):
            offer = ask(provider, source)
            assert offer.plan is not None and not offer.plan.spec.backend.contains_weights
    assert caplog.text.count("bake is ignored: engines of null take the model's weights as they are") == 1


def test_no_model_is_kept_alive(provider: EngineProvider, worker: FakeWorker) -> None:
    source = FakeSource()
    assert ask(provider, source).engine is not None
    worker.expected = lambda operations: None  # what a real worker forgets
    gone = weakref.ref(source.model)
    del source
    wait_until(lambda: not gc.collect() and gone() is None)  # the queue's thread lets go a moment later


# ------------------------------------------------------------------------------------------ what is written


def baked_plan(provider: EngineProvider, source: FakeSource, precision: Precision = Precision.FP32) -> Any:
    (plan,) = provider.plans(source, CALL, replace(BAKED, precision=precision))
    assert plan.save_weights is not None
    return plan


@pytest.mark.parametrize("precision", list(Precision))
def test_the_file_has_the_numbers_in_the_engines_precision(
    provider: EngineProvider, source: FakeSource, tmp_path: Path, precision: Precision
) -> None:
    baked_plan(provider, source, precision).save_weights(path := tmp_path / "weights.safetensors")
    found, wanted = load_file(path), source.bind(precision).tensors
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in wanted.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_shared_and_transposed_weights_can_be_written(
    provider: EngineProvider, source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    weights = {"table": table, "tied": table, "turned": table.T, "row": table[1]}
    monkeypatch.setattr(source, "bind", lambda precision: BoundWeights(weights))
    baked_plan(provider, source).save_weights(path := tmp_path / "weights.safetensors")
    found = load_file(path)
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_weights_that_cannot_be_had_are_said(provider: EngineProvider, source: FakeSource, store: EngineStore) -> None:
    source.unavailable = UnsupportedModel("the weights are offloaded")
    offer = ask(provider, source)
    assert offer.engine is None and "the weights are offloaded" in offer.reason
    assert list((store.root / "tmp").iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_store_error(
    provider: EngineProvider, source: FakeSource, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="weights cannot be written"):
        baked_plan(provider, source).save_weights(tmp_path / "missing" / "weights.safetensors")


def test_room_on_disk_is_counted_with_the_weights(
    provider: EngineProvider, store: EngineStore, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(FakeArchitecture):
        @property
        def fingerprint(self) -> ModelFingerprint:
            return ModelFingerprint(self.digest, "Large", parameters=10**9)

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, 2 * 10**9))
    source = FakeSource(precision=Precision.FP16)
    source.architecture = Large()
    (plan,) = provider.plans(source, CALL, replace(BAKED, precision=Precision.FP16))
    with pytest.raises(StoreError, match="needs about 8141 MB"):
        build_engine(plan, store, ignore_progress, CancelToken())
    (unbaked,) = provider.plans(source, CALL, Settings(precision=Precision.FP16))
    monkeypatch.setattr(build_module, "run_build", lambda *_, **__: (_ for _ in ()).throw(BuildFailed("it began")))
    with pytest.raises(BuildFailed, match="it began"):
        build_engine(unbaked, store, ignore_progress, CancelToken())


def test_what_builds_keep_outlives_them(provider: EngineProvider, source: FakeSource, worker: FakeWorker) -> None:
    ask(provider, source)
    keep = worker.jobs[0].keep
    assert keep is not None and keep.is_dir()
    (keep / "timings.bin").write_text("kernels")
    store = provider.store
    store.clean()
    store.prune(limit_bytes=0)
    assert (keep / "timings.bin").read_text() == "kernels" and store.list() == []
    assert ask(provider, source).engine is not None
    assert worker.jobs[1].keep == keep
