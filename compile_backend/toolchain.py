"""What a machine needs to compile, and in plain words what is missing."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

OLDEST_TORCH = "2.8"
"""The first torch whose AOTInductor packages take the host's own tensors as weights."""


def why_no_packages() -> str | None:
    """Why this torch cannot load a package with the host's own weights; None when it can."""
    if TorchVersion(str(torch.__version__)) >= OLDEST_TORCH and hasattr(torch._C, "_aoti"):
        return None
    return f"torch {torch.__version__} cannot give compiled packages live weights; torch {OLDEST_TORCH} or newer can"


def why_no_cpp_compiler() -> str | None:
    """Why C++ code cannot be compiled here; None when it can."""
    named = os.environ.get("CXX")
    usual = "cl" if os.name == "nt" else "clang++" if sys.platform == "darwin" else "g++"
    if shutil.which(named or usual):  # torch looks for no other
        return None
    if named:
        return f"no C++ compiler was found: {_no_program('CXX', named)}"
    return f"no C++ compiler was found ({usual}); {_how_to_get_a_compiler()}, or set CXX to another one"


def why_no_c_compiler() -> str | None:
    """Why triton cannot compile what launches its kernels; None when it can. On Windows it brings a compiler along."""
    named = os.environ.get("CC")
    tried = ["gcc", "clang"] if named is None else [named]  # triton looks for no other
    if os.name == "nt" or any(map(shutil.which, tried)):
        return None
    if named is not None:
        return f"no C compiler was found: {_no_program('CC', named)}"
    return f"no C compiler was found (gcc, clang); {_how_to_get_a_compiler()}, or set CC to another one"


def _no_program(variable: str, named: str) -> str:
    return f"{variable} names {named!r}, which is no program; set it to a compiler, or unset it"


def _how_to_get_a_compiler() -> str:
    if os.name == "nt":
        return "install Visual Studio Build Tools with 'Desktop development with C++' and start ComfyUI from its prompt"
    if sys.platform == "darwin":
        return "run: xcode-select --install"
    return "install one, on Debian or Ubuntu: sudo apt install g++"


@functools.lru_cache(maxsize=1)
def why_no_cuda_headers() -> str | None:
    """Why GPU packages cannot be linked here; None when the CUDA toolkit's headers and driver stub are found."""
    if any((root / "include" / "cuda.h").is_file() for root in _cuda_roots()):
        return None
    return "the CUDA toolkit's headers (cuda.h) were not found; install the toolkit and set CUDA_HOME to its folder"


def _cuda_roots() -> list[Path]:
    from torch.utils.cpp_extension import CUDA_HOME

    found = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), CUDA_HOME, "/usr/local/cuda"]
    return [Path(root) for root in found if root]


def why_no_triton() -> str | None:
    """Why GPU kernels cannot be generated; None when triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        package = "triton-windows" if os.name == "nt" else "triton"
        return f"triton is missing, which generates the GPU's kernels; install it with: pip install {package}"
    return None
