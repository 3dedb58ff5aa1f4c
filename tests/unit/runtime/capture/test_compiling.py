"""Where the capture library's headers come from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from slipstream.runtime.capture import compiling

API, FOR_COMPILERS = "cuda_runtime_api.h", "crt/host_config.h"
PACKAGE, TRITONS, TOOLKIT = "nvidia/cu13/include", "triton/backends/nvidia/include", "toolkit/include"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch and its packages lie, on a machine without a toolkit."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(compiling, "_TOOLKIT", str(tmp_path / "nowhere"))
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiling, "why_no_cpp_compiler", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    return tmp_path


def put(folder: Path, *headers: str) -> None:
    for header in headers:
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).touch()


def test_a_toolkit_is_enough_by_itself(installed: Path) -> None:
    put(installed / PACKAGE, API)
    put(installed / TRITONS, API, FOR_COMPILERS)
    put(installed / TOOLKIT, API, FOR_COMPILERS)
    assert compiling._cuda_includes() == [installed / TOOLKIT] and compiling.why_not_here() is None


def test_what_torchs_packages_lack_is_tritons_and_comes_behind_them(installed: Path) -> None:
    put(installed / PACKAGE, API)
    put(installed / TRITONS, API, FOR_COMPILERS)
    assert compiling._cuda_includes() == [installed / PACKAGE, installed / TRITONS]
    assert compiling.why_not_here() is None
    put(installed / PACKAGE, FOR_COMPILERS)
    assert compiling._cuda_includes() == [installed / PACKAGE], "of one version"


@pytest.mark.parametrize("has_package", [False, True])
def test_what_is_missing_is_named(has_package: bool, installed: Path) -> None:
    if has_package:
        put(installed / PACKAGE, API)
    else:  # of another version than torch's
        put(installed / TRITONS, API, FOR_COMPILERS)
    reason = compiling.why_not_here()
    assert reason is not None and f"({FOR_COMPILERS if has_package else API})" in reason
