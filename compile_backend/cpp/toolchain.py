"""The tools that compiling needs, and messages that say which are missing."""

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


TRITON = ("triton", "triton-windows") if os.name == "nt" else ("triton",)
"""Packages that bring it, the usual one last."""


def why_no_packages() -> str | None:
    """Why this torch cannot load a package with the host's own weights; None when it can."""
    if TorchVersion(str(torch.__version__)) >= OLDEST_TORCH and hasattr(torch._C, "_aoti"):
        return None
    return f"torch {torch.__version__} cannot give compiled packages live weights; torch {OLDEST_TORCH} or newer can"


def why_no_cpp_compiler() -> str | None:
    """Why C++ code cannot be compiled here; None when it can."""
    usual = "cl" if os.name == "nt" else "clang++" if sys.platform == "darwin" else "g++"  # torch looks for no other
    return _why_no_compiler("C++", "CXX", os.environ.get("CXX") or None, usual)


def why_no_c_compiler() -> str | None:
    """Why triton cannot compile what launches its kernels; None when it can. On Windows it brings a compiler along."""
    return None if os.name == "nt" else _why_no_compiler("C", "CC", os.environ.get("CC"), "gcc", "clang")


def _why_no_compiler(language: str, variable: str, named: str | None, *usual: str) -> str | None:
    """Why no compiler of `language` was found; None where there is one.

    Args:
        variable: of the environment, which names the one compiler that is tried, if any.
        usual: those that are tried otherwise.
    """
    if any(map(shutil.which, usual if named is None else [named])):
        return None
    missing = f"no {language} compiler was found"
    if named is not None:
        return f"{missing}: {variable} names {named!r}, which is not a program; set it to a compiler, or unset it"
    return f"{missing} ({', '.join(usual)}); {_how_to_get_a_compiler()}, or set {variable} to another one"


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
        return f"triton is missing, which generates the GPU's kernels; install it with: pip install {TRITON[-1]}"
    return None
