"""Which TensorRT is taken, and what it says of itself."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.core.errors import BackendUnavailable
from slipstream.core.spec import Precision
from slipstream.tests.unit.trt_backend.fakes.fake_tensorrt import fake_tensorrt
from slipstream.tests.unit.trt_backend.support import library_of
from slipstream.trt_backend import library
from slipstream.trt_backend.library import FULL, RTX, Library, find_library
from slipstream.trt_backend.requirements import is_installed

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Machine:
    """One GPU, and the modules that are installed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.modules: dict[str, Any] = {}
        self.capability = (8, 9)
        patch.setattr(importlib.util, "find_spec", lambda name, package=None: name if name in self.modules else None)
        patch.setattr(importlib, "import_module", self._import)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: self.capability)

    def _import(self, name: str, package: str | None = None) -> Any:
        module = self.modules[name]
        if isinstance(module, Exception):
            raise module
        return module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    library._import.cache_clear()
    yield Machine(monkeypatch)
    library._import.cache_clear()


def both(machine: Machine) -> None:
    machine.modules["tensorrt_rtx_bindings"] = fake_tensorrt("rtx-1.7.1")
    machine.modules["tensorrt"] = fake_tensorrt("11.4.0")


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 9), RTX), ((12, 0), RTX), ((9, 0), FULL), ((10, 0), FULL), ((7, 0), FULL)]
)
def test_the_one_made_for_the_gpu(machine: Machine, capability: tuple[int, int], name: str) -> None:
    both(machine)
    machine.capability = capability
    assert find_library(CUDA).name == name


def test_on_the_cpu_the_one_that_builds(machine: Machine) -> None:
    both(machine)
    assert find_library(CPU).name == RTX


def test_a_broken_one_is_imported_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    both(machine)
    imports: list[str] = []

    def fail(name: str) -> object:
        imports.append(name)
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(library.importlib, "import_module", fail)
    machine.capability = (9, 0)
    for _ in range(5):
        with pytest.raises(BackendUnavailable, match="cannot be imported: libnvinfer"):
            find_library(CUDA)
    assert imports == ["tensorrt"]


def test_something_that_stands_in_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extensions put such modules there; looking for them must not raise."""
    stub = ModuleType("tensorrt")
    stub.__spec__ = None
    monkeypatch.setitem(sys.modules, "tensorrt", stub)
    assert not is_installed("tensorrt")


def test_rtx_by_its_other_name(machine: Machine) -> None:
    machine.modules["tensorrt_rtx"] = fake_tensorrt("rtx-1.7.1")
    assert find_library(CUDA).version == "1.7.1"


def test_the_full_one_where_rtx_is_missing_or_broken(machine: Machine) -> None:
    both(machine)
    del machine.modules["tensorrt_rtx_bindings"]
    assert find_library(CUDA).name == FULL
    machine.modules["tensorrt_rtx_bindings"] = ImportError("libcudart.so.13: cannot open shared object file")
    library._import.cache_clear()
    assert find_library(CUDA).name == FULL


def test_nothing_installed(machine: Machine) -> None:
    with pytest.raises(BackendUnavailable, match="^TensorRT is not installed$"):
        find_library(CUDA)


def test_rtx_alone_does_not_serve_a_data_center_gpu(machine: Machine) -> None:
    machine.modules["tensorrt_rtx_bindings"] = fake_tensorrt("rtx-1.7.1")
    machine.capability = (9, 0)
    with pytest.raises(BackendUnavailable, match="not installed"):
        find_library(CUDA)


def test_an_installation_that_cannot_be_imported(machine: Machine) -> None:
    machine.modules["tensorrt"] = ImportError("libnvinfer.so.11: cannot open shared object file")
    with pytest.raises(BackendUnavailable, match=r"tensorrt is installed but cannot be imported: libnvinfer\.so\.11"):
        find_library(CUDA)


@pytest.mark.parametrize("version", ["9.3.0.post12", "8.5.3", "7.2.1"])
def test_versions_that_are_not_known(machine: Machine, version: str) -> None:
    machine.modules["tensorrt"] = trt = fake_tensorrt("8.6.1")
    trt.__version__ = version
    with pytest.raises(BackendUnavailable, match=f"TensorRT {version} is not supported; 10 and 11 are"):
        find_library(CUDA)


@pytest.mark.parametrize(
    ("release", "opset"), [("8.6.1", 17), ("10.0.1", 18), ("10.16.1", 23), ("11.4.0", 23), ("rtx-1.7.1", 23)]
)
def test_opsets(release: str, opset: int) -> None:
    assert library_of(release)[0].opset == opset


def test_only_tensorrt_8_has_no_engines_for_a_range(release: str) -> None:
    assert (library_of(release)[0].why_no_range is not None) == (release == "8.6.1")


def test_the_opset_by_version() -> None:
    trt = fake_tensorrt("10.16.1")
    trt.__version__ = "10.9.0.34"
    assert Library(FULL, trt).opset == 21


def test_bf16(release: str) -> None:
    found = library_of(release)[0]
    assert found.why_not_precision(Precision.FP16) is None
    if release == "8.6.1":
        wanted = "TensorRT 8.6.1 has no bf16; use fp16, or TensorRT 10 or newer"
        assert found.why_not_precision(Precision.BF16) == wanted
    else:
        assert found.why_not_precision(Precision.BF16) is None


def test_stripped_plans_need_weights_that_are_named(release: str) -> None:
    assert library_of(release)[0].can_strip == (release not in ("8.6.1", "10.0.1"))


def test_a_tensorrt_that_does_not_start(release: str) -> None:
    found, trt = library_of(release)
    trt.script.start_error = "CUDA initialization failure with error: 35"
    with pytest.raises(BackendUnavailable, match=r"does not start: .*nullptr.*CUDA initialization failure"):
        found.new_builder()


def test_plans_are_not_loaded_without_a_gpu(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real runtime would crash the process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="NVIDIA GPUs only, and there is none"):
        library_of(release)[0].load(b"")


@pytest.mark.parametrize("plan", [b"", b"no plan", b"ftrt\x10\x00\x00\x00{}"])
def test_a_damaged_plan(release: str, plan: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found, _ = library_of(release)
    engine, _ = found.load(plan)
    assert engine is None
    assert re.search("Magic tag does not match|damaged|was made by", found.log.said())


def test_dtypes(release: str) -> None:
    found, trt = library_of(release)
    assert found.torch_dtype(trt.DataType.HALF) == torch.float16
    assert found.torch_dtype(trt.DataType.FLOAT) == torch.float32
    assert found.torch_dtype(trt.DataType.FP8) == torch.float8_e4m3fn
    with pytest.raises(KeyError):
        found.torch_dtype(trt.DataType.UINT8)


def test_only_the_last_errors_are_told() -> None:
    found, trt = library_of("11.4.0")
    assert found.log.said() == "it gave no reason"
    severity = trt.ILogger.Severity
    for number in range(100):
        found.log.listener.log(severity.ERROR, f"error {number}")
        found.log.listener.log(severity.INFO, "nothing of interest")
    assert found.log.said() == "error 97 | error 98 | error 99"
    assert len(found.log.errors) < 100


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("Cuda Runtime (out of memory)", True),
        ("Requested amount of GPU memory (8589934592 bytes) could not be allocated: OutOfMemory", True),
        ("(cudaError 2: out of memory)", True),
        ("(cudaError 35: CUDA driver version is insufficient)", False),
        ("Could not find any implementation for node Conv_0", False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(message: str, short: bool) -> None:
    found, trt = library_of("11.4.0")
    found.log.listener.log(trt.ILogger.Severity.ERROR, message)
    assert found.log.ran_out_of_memory == short
