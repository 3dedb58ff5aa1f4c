"""A package's library stays in the process, so it is loaded once for all engines that follow each other."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slipstream.compile_backend import packages
from slipstream.compile_backend.aot_inductor import PACKAGE
from slipstream.compile_backend.packages import Package, load_package
from slipstream.tests.unit.compile_backend.support import CPU, Built, assert_right, make_inputs, make_weights


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_waiting", packages._Waiting())


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that torch has loaded."""
    found: list[Path] = []
    load = packages._load
    monkeypatch.setattr(packages, "_load", lambda path, *rest: found.append(path) or load(path, *rest))
    return found


def package_of(packaged: Built) -> Path:
    return packaged.artifact.directory / PACKAGE


def mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count("/data/aotinductor/")


@pytest.mark.skipif(sys.platform != "linux", reason="no system to tell what is in memory")
def test_an_engine_that_comes_and_goes_costs_no_memory(packaged: Built) -> None:
    packaged.load().close()
    before = mapped()
    for _ in range(5):
        packaged.load().close()
    assert before and mapped() == before


def test_the_next_engine_has_its_own_weights(packaged: Built, loads: list[Path]) -> None:
    for seed in (1, 2, 1, 3):
        engine, weights, inputs = packaged.load(), make_weights(seed), make_inputs(seed)
        engine.update_weights(weights)
        assert_right(engine(**inputs), weights, inputs)
        engine.close()
    assert len(loads) == 1


def test_engines_at_once_have_a_package_each(packaged: Built, loads: list[Path]) -> None:
    engines = [packaged.load() for _ in range(3)]
    weights = [make_weights(seed) for seed in range(3)]
    for engine, own in zip(engines, weights, strict=True):
        engine.update_weights(own)
    inputs = make_inputs()
    for engine, own in zip(engines, weights, strict=True):
        assert_right(engine(**inputs), own, inputs)
    assert len(loads) == 3


def test_a_file_that_was_replaced_is_loaded(packaged: Built, loads: list[Path], tmp_path: Path) -> None:
    path = tmp_path / PACKAGE
    for _ in range(2):
        shutil.copy(package_of(packaged), path)  # with the time of now
        load_package(path, CPU)
        path.unlink()
    assert len(loads) == 2
    packaged.load().close()
    packaged.load().close()
    waiting = {Path(loaded.identity[0]) for loaded in packages._waiting._loaded}
    assert path not in waiting, "what no file belongs to is closed"


def test_so_many_wait_and_no_more(packaged: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_KEPT", 2)
    paths = [tmp_path / str(number) for number in range(4)]
    for path in paths:
        path.hardlink_to(package_of(packaged))
        load_package(path, CPU)
    load_package(paths[3], CPU)
    waiting = [loaded.identity[0] for loaded in packages._waiting._loaded]
    assert waiting == [str(path) for path in paths[1:3]]


def test_threads_never_share_a_package(monkeypatch: pytest.MonkeyPatch, packaged: Built) -> None:
    monkeypatch.setattr(packages, "_load", lambda path, *_: object())
    held: list[object] = []

    def use(_: int) -> None:
        package = load_package(package_of(packaged), CPU)
        loaded = package._loaded
        assert loaded not in held
        held.append(loaded)
        torch.zeros(10).sum()
        held.remove(loaded)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(use, range(400)))) == 400


def test_an_engine_that_is_computed_by_keeps_its_package(packaged: Built, loads: list[Path]) -> None:
    package: Package = load_package(package_of(packaged), CPU)
    run = package.run
    del package
    load_package(package_of(packaged), CPU)
    assert run and len(loads) == 2
