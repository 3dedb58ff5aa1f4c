"""Compiled engines: AOTInductor packages, or `torch.compile` with its cache saved where these cannot be linked."""

from .aot_inductor import AOTInductorBackend
from .torch_compile import TorchCompileBackend

__all__ = ["AOTInductorBackend", "TorchCompileBackend"]
