"""What Build Engine builds and reports, without ComfyUI: one line an engine, whatever it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.building import build_engines as comfy_build
from slipstream.runtime.building import build as build_module
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider, HostHooks
from slipstream.runtime.settings.model_settings import Resolution, Settings, ShapeChoice, parse_resolutions
from slipstream.tests.fakes import FakeSource, FakeWorker, NullBackend, make_inputs


def fake_call(source: Any, resolution: Resolution, batch: int, tokens: int) -> CallShape:
    assert resolution.width == resolution.height
    return CallShape.of(make_inputs(resolution.height // 8, batch, tokens=tokens))


@pytest.fixture
def backend() -> NullBackend:
    return NullBackend()


@pytest.fixture
def report(backend: NullBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Build for resolutions; the lines of the report."""
    provider = EngineProvider(EngineStore(tmp_path / "engines"), [backend])
    monkeypatch.setattr(build_module, "run_build", FakeWorker([backend]))
    monkeypatch.setattr(comfy_build, "open_unet", lambda patcher, memo, for_blocks: FakeSource())
    monkeypatch.setattr(comfy_build, "unet_call", fake_call)
    monkeypatch.setattr(comfy_build, "waiting_hooks", HostHooks)

    def build(resolutions: str, shapes: ShapeChoice) -> list[str]:
        settings = Settings(resolutions=parse_resolutions(resolutions), shapes=shapes)
        module = AcceleratedModule(provider, settings, by_hand=True)
        return [str(made) for made in comfy_build.build_engines(module, None, 2, 77)]

    return build


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        (ShapeChoice.RANGE, "Tiny 64×64…128×128 batch 1…2"),
        (ShapeChoice.PROFILES, "Tiny 64×64, 96×96, 128×128 batch 1…2"),
    ],
)
def test_an_engine_for_several_sizes_is_one_line(
    report: Callable[..., list[str]], backend: NullBackend, shapes: ShapeChoice, sizes: str
) -> None:
    (line,) = report("64x64, 96x96, 128x128", shapes)
    assert line.startswith(f"{sizes}: null fp32, built in ") and line.endswith("ready")
    assert len(backend.engines) == 1


def test_an_engine_for_each_size_is_a_line_for_each(report: Callable[..., list[str]], backend: NullBackend) -> None:
    lines = report("64x64, 128x128, 64x64", ShapeChoice.EACH)
    assert [line.split(":")[0] for line in lines] == ["Tiny 64×64 batch 2", "Tiny 128×128 batch 2"]
    assert len(backend.engines) == 2


@pytest.mark.parametrize("shapes", [ShapeChoice.RANGE, ShapeChoice.PROFILES])
def test_a_backend_that_makes_one_engine_a_size_is_told_by_its_lines(
    report: Callable[..., list[str]], backend: NullBackend, monkeypatch: pytest.MonkeyPatch, shapes: ShapeChoice
) -> None:
    monkeypatch.setattr(backend, "why_unsupported", lambda spec: None if spec.is_static else "one size only")
    lines = report("64x64, 128x128", shapes)
    assert [line.split(":")[0] for line in lines] == ["Tiny 64×64 batch 2", "Tiny 128×128 batch 2"]
