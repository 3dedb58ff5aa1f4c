"""What a machine lacks, in words that say how to get it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slipstream.compile_backend import AOTInductorBackend, TorchCompileBackend
from slipstream.compile_backend.blocks.backend import BlockBackend
from slipstream.compile_backend.blocks.triton_backend import TritonBlockBackend
from slipstream.compile_backend.cpp import toolchain

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    toolchain.why_no_cuda_headers.cache_clear()
    yield
    toolchain.why_no_cuda_headers.cache_clear()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found; empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return folder


def install(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_no_compiler(programs: Path) -> None:
    reason = toolchain.why_no_cpp_compiler()
    assert reason is not None and "no C++ compiler was found" in reason and "install" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other compilers")
def test_the_systems_compiler(programs: Path) -> None:
    install(programs, "g++")
    assert toolchain.why_no_cpp_compiler() is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other compilers")
def test_a_compiler_that_torch_does_not_look_for(programs: Path) -> None:
    install(programs, "clang++")
    reason = toolchain.why_no_cpp_compiler()
    assert reason is not None and "g++" in reason and "CXX" in reason


@pytest.mark.parametrize("by", ["name", "path"])
def test_the_compiler_that_the_user_named(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    path = install(programs if by == "name" else tmp_path, "clang++-19")
    monkeypatch.setenv("CXX", path.name if by == "name" else str(path))
    assert toolchain.why_no_cpp_compiler() is None


@pytest.mark.parametrize("named", ["/nowhere/g++", "g++ -m64"])
def test_a_compiler_that_the_user_named_but_is_not_there(
    programs: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """torch would try it and no other."""
    install(programs, "g++")
    monkeypatch.setenv("CXX", named)
    reason = toolchain.why_no_cpp_compiler()
    assert reason is not None and named in reason and "CXX" in reason


@pytest.mark.skipif(sys.platform == "win32", reason="there triton brings a compiler along")
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_for_what_launches_kernels(programs: Path, name: str) -> None:
    reason = toolchain.why_no_c_compiler()
    assert reason is not None and "no C compiler was found" in reason and "install" in reason
    install(programs, name)
    assert toolchain.why_no_c_compiler() is None


@pytest.mark.skipif(sys.platform == "win32", reason="there triton brings a compiler along")
@pytest.mark.parametrize("backend", [AOTInductorBackend(), TorchCompileBackend()], ids=lambda backend: backend.name)
def test_a_c_compiler_that_is_not_there_is_named_before_a_build(
    programs: Path, monkeypatch: pytest.MonkeyPatch, backend: AOTInductorBackend
) -> None:
    """Triton would try it and no other, minutes later."""
    for program in ("gcc", "g++"):
        install(programs, program)
    for module in ("aot_inductor", "torch_compile"):
        monkeypatch.setattr(f"slipstream.compile_backend.{module}.why_no_triton", lambda: None)
    monkeypatch.setattr("slipstream.compile_backend.aot_inductor.why_no_cuda_headers", lambda: None)
    assert backend.why_cannot_build(CUDA) is None
    monkeypatch.setenv("CC", "tiny-model")
    assert "CC names 'tiny-model'" in (backend.why_cannot_build(CUDA) or "")
    assert backend.why_cannot_build(CPU) is None
    assert backend.why_unavailable(CUDA) is None


def test_no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_cuda_roots", lambda: [tmp_path])
    reason = toolchain.why_no_cuda_headers()
    assert reason is not None and "cuda.h" in reason and "CUDA_HOME" in reason


def test_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    monkeypatch.setattr(toolchain, "_cuda_roots", lambda: [tmp_path / "missing", tmp_path])
    assert toolchain.why_no_cuda_headers() is None


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = toolchain.why_no_triton()
    assert reason is not None and "pip install triton" in reason


@pytest.fixture
def on_windows(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the system is answered as Windows does."""
    monkeypatch.setattr(toolchain, "os", SimpleNamespace(name="nt", environ=os.environ))


@pytest.mark.usefixtures("on_windows")
def test_on_windows_torchs_compiler_is_cl(programs: Path) -> None:
    for name in ("g++", "clang++"):
        install(programs, name)
    reason = toolchain.why_no_cpp_compiler()
    assert reason is not None and "(cl)" in reason and "Visual Studio Build Tools" in reason and "apt" not in reason
    install(programs, "cl")
    assert toolchain.why_no_cpp_compiler() is None


@pytest.mark.usefixtures("on_windows")
def test_on_windows_blocks_take_triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is there, since triton brings its own along, and no toolkit."""
    monkeypatch.setattr(toolchain, "_cuda_roots", lambda: [])
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert TritonBlockBackend().why_cannot_build(CUDA) is None
    assert "(cl)" in (BlockBackend().why_cannot_build(CUDA) or "")


def test_on_windows_triton_has_a_package_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.spec_from_file_location("toolchain_on_windows", toolchain.__file__)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        found.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert module.why_no_triton().endswith("pip install triton-windows")


def test_triton_is_named_before_a_cpp_compiler_on_a_gpu(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With triton alone other engines are built there."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in (AOTInductorBackend().why_cannot_build(CUDA) or "")
    assert "no C++ compiler" in (AOTInductorBackend().why_cannot_build(CPU) or "")


@pytest.mark.parametrize(("version", "serves"), [("2.7.1+cu126", False), ("2.8.0", True), ("2.13.0+cpu", True)])
def test_a_torch_too_old_for_live_weights(version: str, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    reason = AOTInductorBackend().why_unavailable(CPU)
    assert (reason is None) is serves
    assert serves or (reason is not None and version in reason and "2.8 or newer" in reason)


def test_without_a_compiler_packages_still_load(programs: Path) -> None:
    backend = AOTInductorBackend()
    assert backend.why_unavailable(CPU) is None
    reason = backend.why_cannot_build(CPU)
    assert reason is not None and "no C++ compiler" in reason


def test_without_headers_only_packages_cannot_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The chain goes on with torch.compile."""
    monkeypatch.setattr(toolchain, "_cuda_roots", lambda: [tmp_path])
    for module in ("aot_inductor", "torch_compile"):
        monkeypatch.setattr(f"slipstream.compile_backend.{module}.why_no_triton", lambda: None)
        monkeypatch.setattr(f"slipstream.compile_backend.{module}.why_no_cpp_compiler", lambda: None)
        monkeypatch.setattr(f"slipstream.compile_backend.{module}.why_no_c_compiler", lambda: None)
    assert "cuda.h" in (AOTInductorBackend().why_cannot_build(CUDA) or "")
    assert AOTInductorBackend().why_unavailable(CUDA) is None
    assert TorchCompileBackend().why_cannot_build(CUDA) is None


@pytest.mark.parametrize("backend", [AOTInductorBackend(), TorchCompileBackend()], ids=lambda backend: backend.name)
def test_other_devices(backend: AOTInductorBackend) -> None:
    for kind in ("mps", "xpu"):
        assert f"not on {kind}" in (backend.why_unavailable(torch.device(kind)) or "")
        assert f"not on {kind}" in (backend.why_cannot_build(torch.device(kind)) or "")
