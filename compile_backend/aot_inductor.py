"""Ahead-of-time compiled packages (AOTInductor): nothing is compiled or traced when one is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BuildFailed
from ..core.progress import ProgressCallback
from ..core.protocols import Artifact, BuildJob, Engine, Tensors
from ..core.spec import EngineSpec, Optimize, Precision
from .compiling import CompilingBackend
from .cpp.headers import headers_with_the_cache
from .cpp.runtime_library import shared_cpp_runtime
from .cpp.toolchain import (
    why_no_c_compiler,
    why_no_cpp_compiler,
    why_no_cuda_headers,
    why_no_packages,
    why_no_triton,
)
from .cpp.vector_instructions import vector_instructions
from .engine import CompiledEngine
from .inductor.kernels import chosen_kernels
from .inductor.launchers import launched_by_torch
from .inductor.options import of_compiler, package_options
from .packages import load_package
from .program import CONSTANTS, SIGNATURE, ProgramSignature, export_program, load_constants

PACKAGE = "package.pt2"


class AOTInductorBackend(CompilingBackend):
    """Builds packages without weights: one serves every checkpoint of an architecture, and a LoRA needs no rebuild."""

    name = "aotinductor"

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return package_options(device, optimize)

    def why_unavailable(self, device: torch.device) -> str | None:
        """What is missing to *load* a package. See `why_cannot_build` for building."""
        if device.type not in ("cpu", "cuda"):
            return f"compiled packages run on CPU and CUDA, not on {device.type}"
        return why_no_packages()

    def why_cannot_build(self, device: torch.device) -> str | None:
        if reason := self.why_unavailable(device):
            return reason
        if device.type != "cuda":
            return why_no_cpp_compiler()
        # Triton first: with it alone, other backends build.
        return why_no_triton() or why_no_cpp_compiler() or why_no_c_compiler() or why_no_cuda_headers()

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        program, signature = export_program(job, progress)
        compile_package(job, program)
        _check_names(job.directory, job.device)
        return Artifact(job.directory, (PACKAGE, SIGNATURE, CONSTANTS), signature.details)

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> Engine:
        signature = ProgramSignature.read(artifact.directory)
        package = load_package(artifact.directory / PACKAGE, device)

        def run(inputs: Tensors) -> tuple[torch.Tensor, ...]:
            return tuple(package.run(list(inputs.values())))

        constants = load_constants(artifact.directory, device)
        own = sum(tensor.nbytes for tensor in constants.values())
        return CompiledEngine(signature, spec.profile, outputs, device, run, package.fill, constants, own)


def compile_package(job: BuildJob, program: torch.export.ExportedProgram) -> None:
    """Compile a program into the job's package.

    Raises:
        BuildFailed: this machine's C++ compiler cannot link one.
    """
    with (
        shared_cpp_runtime(job.directory),
        headers_with_the_cache(),
        vector_instructions(job.device, job.keep),
        chosen_kernels(job.spec, job.device),
        launched_by_torch(job.device),
    ):
        torch._inductor.aoti_compile_and_package(  # type: ignore[no-untyped-call,unused-ignore]
            program, package_path=str(job.directory / PACKAGE), inductor_configs=of_compiler(job.spec)
        )


def _check_names(directory: Path, device: torch.device) -> None:
    """A weight that the compiler wrote into the code could never be changed: refuse such a package."""
    signature = ProgramSignature.read(directory)
    wanted = {*signature.weights, *signature.constants}
    found = load_package(directory / PACKAGE, device).weight_names
    if missing := sorted(wanted - found):
        raise BuildFailed(
            f"The compiler left {len(missing)} of {len(wanted)} weights out of the package, such as {missing[0]}; "
            "please report this with your torch version"
        )
