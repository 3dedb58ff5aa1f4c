"""What engines will take, before their model is loaded."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream.core.errors import BackendUnavailable
from slipstream.core.spec import Precision, Quantised, Role
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.requests.build_needs import Needs, foresee, say_needs
from slipstream.runtime.requests.build_requests import Wanted
from slipstream.runtime.settings.model_settings import Settings
from slipstream.tests.fakes import CPU, FakeSource, NullBackend, run_once


def wanted(**choices: object) -> Wanted:
    return Wanted("tiny", Role.UNET, Settings.of_text(**{"resolutions": "512x512, 768x512", **choices}), 2, 77)


def test_before_anything_was_built(provider: EngineProvider) -> None:
    needs = foresee(provider, CPU, wanted(), 1_000_000)
    assert (needs.backend, needs.engines, needs.weights_bytes) == ("null", 2, 4_000_000)
    assert needs.disk_bytes == 512 * 2**20 and needs.kept_bytes is None and needs.seconds is None
    assert "not known before the first such build" in say_needs(needs)[-1]


def test_by_earlier_engines(provider: EngineProvider, backend: NullBackend, source: FakeSource) -> None:
    backend.device_bytes = 3 * 2**20
    run_once(provider, source)
    (entry,) = provider.store.list()
    needs = foresee(provider, CPU, wanted(), None)
    assert needs.kept_bytes == 2 * entry.bytes and needs.engine_bytes == 3 * 2**20
    assert needs.seconds == 12 and needs.weights_bytes is None and needs.build_bytes is None


def test_builds_of_other_parts_and_of_blocks_say_nothing_of_a_models(
    provider: EngineProvider, source: FakeSource
) -> None:
    run_once(provider, source)
    (made,) = provider.history.builds()
    for _ in range(14):
        provider.history.add(dataclasses.replace(made, role=Role.BLOCK.value, seconds=20.0))
    assert foresee(provider, CPU, wanted(), None).seconds == 12
    assert foresee(provider, CPU, dataclasses.replace(wanted(), role=Role.VAE_DECODE), None).seconds is None


def test_weights_that_are_baked_in(provider: EngineProvider, backend: NullBackend) -> None:
    backend.can_bake, backend.building = True, 7
    needs = foresee(provider, CPU, wanted(bake=True), 1_000_000)
    assert needs.kept_bytes == 8_000_000 and needs.disk_bytes == 512 * 2**20 + 16_000_000 and needs.build_bytes == 7


def test_a_backend_hears_what_is_to_be_quantised(
    provider: EngineProvider, backend: NullBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Precision, Quantised | None]] = []
    monkeypatch.setattr(backend, "build_bytes", lambda spec: asked.append((spec.precision, spec.quantised)) or 0)
    order = wanted(precision="fp8")
    for each in (order, dataclasses.replace(order, role=Role.VAE_DECODE)):
        assert foresee(provider, CPU, each, 1_000_000).weights_bytes == 4_000_000
    assert asked == [(Precision.FP32, Quantised.FP8), (Precision.FP32, None)]


def test_one_engine_for_all(provider: EngineProvider, backend: NullBackend) -> None:
    choices = {"engines": "one for a range"}
    assert foresee(provider, CPU, wanted(**choices), 8).engines == 1
    backend.unsupported = "static shapes only"
    assert foresee(provider, CPU, wanted(**choices), 8).engines == 2


@pytest.mark.parametrize("role", [Role.VAE_DECODE, Role.VAE_ENCODE])
def test_halves_of_a_vae(provider: EngineProvider, role: Role) -> None:
    assert foresee(provider, CPU, dataclasses.replace(wanted(), role=role), 8).engines == 2


def test_where_nothing_builds(provider: EngineProvider, backend: NullBackend) -> None:
    backend.unavailable = "no compiler"
    with pytest.raises(BackendUnavailable, match="no compiler"):
        foresee(provider, CPU, wanted(), 8)


def test_what_there_is_too_little_of(provider: EngineProvider) -> None:
    needs: Needs = dataclasses.replace(foresee(provider, CPU, wanted(), 2**20), free_disk=2**40)
    assert not needs.shortage
    assert dataclasses.replace(needs, free_disk=2**20).shortage == "disk: 512.0 MB are needed, 1.0 MB are free"
    assert "GPU memory: 4.0 MB are needed" in dataclasses.replace(needs, free_device=2**20).shortage
