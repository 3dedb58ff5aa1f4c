"""`torch.compile` with its caches saved: for machines where ahead-of-time packages cannot be linked.

The artifact is the exported program and the compiler's cache. Loading traces the program again (seconds) and finds
every kernel in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BuildFailed, IncompatibleEngine
from ..core.progress import ProgressCallback
from ..core.protocols import Artifact, BuildJob, Engine, Tensors
from ..core.spec import EngineSpec, Optimize, Precision
from .compiling import CompilingBackend
from .cpp.toolchain import why_no_c_compiler, why_no_cpp_compiler, why_no_triton
from .engine import CompiledEngine
from .inductor.kernels import chosen_kernels
from .inductor.options import PROGRAM_DEVICE, fusion_options, of_compiler
from .layouts import TensorLayout
from .program import CONSTANTS, PROGRAM, SIGNATURE, ProgramSignature, export_program, save_program
from .rewrites.traced_module import assign, module_of, tensor_of

CACHE = "compiler_cache.bin"

_one_at_a_time = threading.Lock()
"""torch.export.load works on one thread at a time. torch 2.13 also counts what it finds compiled for all threads at
once, and what one of them traces keeps it from finding what another calls.
"""


class TorchCompileBackend(CompilingBackend):
    """Compiles in the worker process and carries the compiler's cache to the next start."""

    name = "torch.compile"

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        options = fusion_options(device, optimize)
        return {**options, PROGRAM_DEVICE: device.index} if device.index else options

    def why_unavailable(self, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"compiled modules run on CPU and CUDA, not on {device.type}"
        if not hasattr(torch.compiler, "load_cache_artifacts"):
            return f"torch {torch.__version__} cannot save its compiler's cache; torch 2.7 or newer can"
        return why_no_triton() if device.type == "cuda" else why_no_cpp_compiler()

    def why_cannot_build(self, device: torch.device) -> str | None:
        return self.why_unavailable(device) or (why_no_c_compiler() if device.type == "cuda" else None)

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        program, signature = export_program(job, progress)
        save_program(program, job.directory)
        # Compiled from the file, as `load` will do it: what `load` looks for in the cache is then there.
        module = _load_module(job.directory)
        compiled = _compiled(module, job.spec)
        with torch.no_grad(), chosen_kernels(job.spec, job.device):
            compiled(**_zeros_like(signature.inputs, job.device))
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            raise BuildFailed("torch.compile left nothing in its cache; please report this with your torch version")
        (job.directory / CACHE).write_bytes(saved[0])
        return Artifact(job.directory, (PROGRAM, SIGNATURE, CONSTANTS, CACHE), signature.details)

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> Engine:
        try:
            torch.compiler.load_cache_artifacts((artifact.directory / CACHE).read_bytes())
            module = _load_module(artifact.directory)
        except Exception as error:  # torch raises many kinds for a file that is not what it expects
            raise IncompatibleEngine(f"{PROGRAM} cannot be loaded on this machine: {error}") from error
        compiled = _compiled(module, spec)
        signature = ProgramSignature.read(artifact.directory)
        placeholders = {name: tensor_of(module, name) for name in signature.weights}

        def supply(weights: dict[str, torch.Tensor]) -> None:
            for name, tensor in weights.items():
                assign(module, name, tensor)

        def run(inputs: Tensors) -> tuple[torch.Tensor, ...]:
            # As when it was built: what was compiled then is found in the cache.
            with _one_at_a_time, chosen_kernels(spec, device):
                return tuple(compiled(**inputs))

        # Constants are part of the program itself here.
        return CompiledEngine(
            signature, spec.profile, outputs, device, run, supply, constants={}, drop=lambda: supply(placeholders)
        )


def _load_module(directory: Path) -> torch.nn.Module:
    with _one_at_a_time:
        module: torch.nn.Module = module_of(torch.export.load(directory / PROGRAM))
    return module


def _compiled(module: torch.nn.Module, spec: EngineSpec) -> Any:
    options: dict[str, Any] = {**of_compiler(spec)}
    return torch.compile(module, fullgraph=True, dynamic=False, options=options)


def _zeros_like(layouts: Mapping[str, TensorLayout], device: torch.device) -> Tensors:
    return {name: torch.zeros(layout.shape, dtype=layout.dtype, device=device) for name, layout in layouts.items()}
