"""Compiled torch modules: AOTInductor packages, else `torch.compile` with its caches saved."""

from .aot_inductor import AOTInductorBackend
from .torch_compile import TorchCompileBackend

__all__ = ["AOTInductorBackend", "TorchCompileBackend"]
