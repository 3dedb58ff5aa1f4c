"""Compiles the capture library, once for each torch, in a process of its own. Engines work without it, only slower."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from ...compile_backend.cpp.runtime_library import compiler_with_shared_runtime
from ...compile_backend.cpp.toolchain import why_no_cpp_compiler
from ...core.errors import BackendUnavailable, SlipstreamError
from ...core.programs import FAILURES, run
from .library import SOURCE, library_file

log = logging.getLogger(__name__)

_LIBRARIES = ("c10", "c10_cuda")
_CPP20_SINCE = "2.14"
"""The first torch whose headers want C++20."""
_HEADER, _OF_COMPILER = "cuda_runtime_api.h", "crt/host_config.h"
"""CUDA's headers, and those for compilers, which CUDA 13's package has no longer."""
_TOOLKIT = "/usr/local/cuda"
"""Where it usually is."""
_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 600

_started: set[Path] = set()
_starting = threading.Lock()


def compile_in_background(folder: Path) -> None:
    """Have another process compile the library into `folder` where it is missing; asked for once in this process."""
    with _starting:
        if folder in _started or library_file(folder).is_file():
            return
        _started.add(folder)
    threading.Thread(target=_compile_elsewhere, args=(folder,), name="slipstream-capture", daemon=True).start()


def _compile_elsewhere(folder: Path) -> None:
    command = [sys.executable, str(_ROOT), "worker", "capture", str(folder)]
    try:
        done = run(command, _SECONDS)
    except FAILURES as error:
        log.info("Slipstream: engines run without CUDA graphs for now: %s", error)
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        log.info("Slipstream: engines run without CUDA graphs: %s", lines[-1] if lines else "no reason was given")


def compile_library(folder: Path) -> Path:
    """Compile the library for this process's torch into `folder`, unless it is there.

    Raises:
        SlipstreamError: it cannot be compiled here, with the reason.
        OSError: `folder` cannot be written.
    """
    file = library_file(folder)
    if file.is_file():
        return file
    if reason := why_not_here():
        raise BackendUnavailable(reason)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="capture-", dir=folder) as scratch:
        made = Path(scratch, file.name)
        command = _command(compiler_with_shared_runtime(Path(scratch)), made)
        done = run(command, _SECONDS)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-500:]]
            raise SlipstreamError(f"{SOURCE.name} cannot be compiled: {errors[0]}")
        os.replace(made, file)
    return file


def why_not_here() -> str | None:
    """Return why the library cannot be compiled on this machine; None where it can."""
    if sys.platform != "linux":
        return "CUDA graphs were tried on Linux alone so far"
    if reason := why_no_cpp_compiler():
        return reason
    found = _cuda_includes()
    for header in (_HEADER, _OF_COMPILER):
        if not any((folder / header).is_file() for folder in found):
            return f"the CUDA toolkit's headers ({header}) were not found; install the toolkit and set CUDA_HOME"
    return None


def _command(compiler: str, made: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    standard = "c++20" if TorchVersion(str(torch.__version__)) >= _CPP20_SINCE else "c++17"
    major, minor = map(int, str(torch.__version__).split(".")[:2])
    defined = [f"-DTORCH={100 * major + minor}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    includes = [f"-I{path}" for path in (*include_paths(), *_cuda_includes())]
    libraries = [*(f"-L{path}" for path in library_paths()), *(f"-l{name}" for name in _LIBRARIES)]
    flags = [f"-std={standard}", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *defined]
    return [compiler, *flags, *includes, str(SOURCE), "-o", str(made), *libraries]


def _cuda_includes() -> list[Path]:
    """The folders of CUDA's headers: the toolkit's, or those that come with torch's packages, and what these lack
    triton's."""
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), CUDA_HOME, str(Path(nvcc).parents[1]) if nvcc else None, _TOOLKIT]
    installed = Path(torch.__file__).parents[1]
    folders = [*(Path(home, "include") for home in homes if home), *installed.glob("nvidia/*/include")]
    found = next((folder for folder in folders if (folder / _HEADER).is_file()), None)
    if found is None:
        return []
    of_triton = installed / "triton" / "backends" / "nvidia" / "include"
    return [found] if (found / _OF_COMPILER).is_file() else [found, of_triton]
