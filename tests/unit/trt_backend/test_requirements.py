"""Which TensorRT a machine is told to install, and by which command."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from slipstream.trt_backend import TensorRTBackend, backend
from slipstream.trt_backend.requirements import advice, how_to_add, how_to_install, missing_packages, runs_rtx

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PYTHON = "/opt/comfy ui/bin/python"
EXPORT = ["onnx", "onnxscript", "onnx-graphsurgeon"]
RTX_4090 = {"cuda": "12.8", "capability": (8, 9), "driver": "550.54.14"}
RTX_5090 = {"cuda": "13.0", "capability": (12, 0), "driver": "581.29"}
T4 = {"cuda": "12.6", "capability": (7, 5), "driver": "535.183.01"}
H200 = {"cuda": "13.0", "capability": (9, 0), "driver": "580.82.07"}
B200 = {"cuda": "12.8", "capability": (10, 0), "driver": "570.86.15"}
GTX_1080 = {"cuda": "12.8", "capability": (6, 1), "driver": "550.54.14"}


def told(machine: dict[str, Any], python: str = PYTHON, platform: str = "linux") -> str:
    return how_to_install(python, platform, **{"cuda": None, "capability": None, "driver": None, **machine})


def command_in(text: str) -> str:
    (command,) = re.findall(r"`(.+?)`", text)
    return str(command)


def packages_in(text: str) -> list[str]:
    """Checks what surrounds them; returns what pip is told to install."""
    words = shlex.split(command_in(text))
    assert words[:4] == [PYTHON, "-m", "pip", "install"]
    return words[4:]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((6, 1), False),
        ((7, 0), False),
        ((7, 5), True),
        ((8, 0), True),
        ((8, 6), True),
        ((8, 7), False),
        ((8, 9), True),
        ((9, 0), False),
        ((10, 0), False),
        ((10, 3), False),
        ((11, 0), False),
        ((12, 0), True),
        ((12, 1), True),
    ],
)
def test_where_tensorrt_for_rtx_runs(capability: tuple[int, int], runs: bool) -> None:
    assert runs_rtx(capability) is runs


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        (RTX_4090, ["tensorrt-rtx-cu12-bindings", "tensorrt-rtx-cu12-libs"]),
        (RTX_5090, ["tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"]),
        (T4, ["tensorrt-rtx-cu12-bindings", "tensorrt-rtx-cu12-libs"]),
        (H200, ["tensorrt-cu13"]),
        (B200, ["tensorrt-cu12"]),
    ],
    ids=["RTX 4090", "RTX 5090", "T4", "H200", "B200"],
)
def test_the_command_fits_gpu_and_cuda(machine: dict[str, Any], names: list[str]) -> None:
    packages = [Requirement(word) for word in packages_in(told(machine))]
    assert [package.name for package in packages] == [*names, *EXPORT]
    for package in packages[: len(names)]:
        rtx = "rtx" in package.name
        assert all(version in package.specifier for version in (["1.7.1.116"] if rtx else ["10.16.1", "11.4.0"]))
        assert not any(version in package.specifier for version in (["1.4.0", "2.0"] if rtx else ["9.3.0", "12.0"]))


def test_a_gpu_of_a_data_centre_is_told_where_the_libraries_come_from() -> None:
    assert "fetches its libraries from NVIDIA" in told(H200)
    assert "fetches" not in told(RTX_5090)


@pytest.mark.parametrize(
    ("python", "begins"),
    [
        (r"C:\ComfyUI\python_embeded\python.exe", r"C:\ComfyUI\python_embeded\python.exe -m pip install "),
        (r"C:\My AI\python.exe", r'"C:\My AI\python.exe" -m pip install '),
        (r"C:\R&D\python.exe", r'"C:\R&D\python.exe" -m pip install '),
    ],
)
def test_windows_quotes_in_its_own_way(python: str, begins: str) -> None:
    """Its command prompt knows no single quotes, and would write a file named after the version."""
    command = command_in(told(RTX_5090, python, "win32"))
    assert command.startswith(begins)
    assert '"tensorrt-rtx-cu13-bindings>=1.5,<2"' in command and "'" not in command
    assert command.endswith(" ".join(EXPORT))


@pytest.mark.parametrize(
    ("machine", "oldest"),
    [(RTX_4090, 525), (RTX_5090, 580), (H200, 580), (B200, 535)],
    ids=["RTX 4090", "RTX 5090", "H200", "B200"],
)
def test_a_driver_that_is_too_old(machine: dict[str, Any], oldest: int) -> None:
    needs = f"NVIDIA driver {oldest} or newer"
    for driver in (f"{oldest - 1}.99.01", "470.1"):
        text = told({**machine, "driver": driver})
        assert needs in text and f"this machine has {driver}: update the driver first" in text
        assert "pip install" in text, "what comes after the update"
    for new_enough in (f"{oldest}.12", "999.1", None):
        text = told({**machine, "driver": new_enough})
        assert needs in text and "update" not in text


@pytest.mark.parametrize(
    ("machine", "platform", "why"),
    [
        (GTX_1080, "linux", "7.5 or newer.*this one has 6.1"),
        ({"cuda": "hip 6.4.43482", "capability": (9, 4)}, "linux", r"AMD's \(hip 6\.4\.43482\)"),
        ({}, "darwin", "macOS"),
        ({}, "linux", "built without CUDA.*install torch for CUDA"),
        ({}, "win32", "built without CUDA"),
        ({"cuda": "13.0"}, "linux", r"runs on none here.*driver \(580 or newer for CUDA 13\)"),
        ({**RTX_4090, "cuda": "11.8"}, "linux", "for CUDA 12 and 13.*built for CUDA 11.8"),
        ({**H200, "cuda": "14.0"}, "linux", "for CUDA 12 and 13.*built for CUDA 14.0"),
    ],
    ids=["GTX 1080", "AMD", "macOS", "CPU", "CPU on Windows", "no GPU", "old CUDA", "new CUDA"],
)
def test_where_tensorrt_cannot_run(machine: dict[str, Any], platform: str, why: str) -> None:
    text = told(machine, platform=platform)
    assert re.search(why, text)
    assert "pip install" not in text and "backend" not in text, "whoever asked knows what is chosen"


# --------------------------------------------------------------------------------------------- this machine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a Linux machine with an H200 and torch for CUDA 13."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr("slipstream.core.environment.driver_version", lambda: "570.1")
    return monkeypatch


def test_advice_looks_at_this_machine(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(sys, "executable", PYTHON)
    assert advice(CUDA) == told({**H200, "driver": "570.1"})


def test_advice_for_a_model_on_the_cpu(gpu: pytest.MonkeyPatch) -> None:
    assert "the model runs on none here" in advice(CPU)


def test_advice_on_amd(gpu: pytest.MonkeyPatch) -> None:
    """Its GPUs are "cuda" devices, with a capability that means something else."""
    gpu.setattr(torch.version, "cuda", None)
    gpu.setattr(torch.version, "hip", "6.4")
    assert "AMD's (hip 6.4)" in advice(CUDA)


def test_advice_where_the_gpu_cannot_be_used(gpu: pytest.MonkeyPatch) -> None:
    """As with a driver too old for torch, which then knows no capability."""

    def fails(device: object = None) -> tuple[int, int]:
        raise RuntimeError("no driver")

    gpu.setattr(torch.cuda, "is_available", lambda: False)
    gpu.setattr(torch.cuda, "get_device_capability", fails)
    assert "check its driver (580 or newer" in advice(CUDA)


@pytest.mark.parametrize("missing", [["onnxscript"], ["onnx", "onnx_graphsurgeon"]], ids=["one", "two"])
def test_where_tensorrt_is_there_only_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(backend, "find_library", lambda device: None)
    monkeypatch.setattr(backend, "missing_packages", lambda: missing)
    for device in (CUDA, CPU):
        reason = TensorRTBackend().why_cannot_build(device) or ""
        assert reason.startswith(f"{', '.join(missing)} not installed")
        assert packages_in(reason) == [name.replace("_", "-") for name in missing]


def test_windows_quotes_the_python_that_gets_packages() -> None:
    told = how_to_add(["onnx"], r"C:\My AI\python.exe", "win32")
    assert command_in(told) == r'"C:\My AI\python.exe" -m pip install onnx'


def test_packages_are_looked_for_but_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["onnx", "onnxscript", "onnx_graphsurgeon"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert missing_packages() == []
    assert not set(names) & set(sys.modules)
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as Python marks what cannot be imported
    monkeypatch.setitem(sys.modules, "onnx_graphsurgeon", None)
    assert missing_packages() == ["onnxscript", "onnx_graphsurgeon"]
