"""Triton's launchers are compiled for kernels that are launched more than once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compile_backend.inductor.launchers import launchers_when_needed

GPU = torch.device("cuda", 0)


class Launcher:
    """As triton's: it takes a kernel's source and metadata, and a grid with arguments at each launch."""

    compiled: list[tuple[Any, ...]] = []
    launched: list[tuple[Any, ...]] = []

    def __init__(self, source: str, metadata: str) -> None:
        self.compiled.append((source, metadata))

    def __call__(self, *args: Any) -> None:
        self.launched.append(args)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    Launcher.compiled, Launcher.launched = [], []
    active = SimpleNamespace(launcher_cls=Launcher)
    runtime = ModuleType("triton.runtime")
    runtime.driver = SimpleNamespace(active=active)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    return active


def test_a_kernel_that_is_launched_once_needs_none(driver: SimpleNamespace) -> None:
    with launchers_when_needed(GPU):
        launchers = [driver.launcher_cls("source", metadata) for metadata in ("one", "other")]
        for launcher in launchers:
            launcher(1, 1, 1, "stream")
        assert not Launcher.compiled
        for grid in (2, 3):
            launchers[1](grid, 1, 1, "stream")
    assert Launcher.compiled == [("source", "other")]
    assert Launcher.launched == [(2, 1, 1, "stream"), (3, 1, 1, "stream")]
    assert driver.launcher_cls is Launcher


def test_a_cpu_and_a_triton_without_launchers_are_left_alone(driver: SimpleNamespace) -> None:
    with launchers_when_needed(torch.device("cpu")):
        assert driver.launcher_cls is Launcher
    del driver.launcher_cls
    with launchers_when_needed(GPU):
        assert not hasattr(driver, "launcher_cls")
