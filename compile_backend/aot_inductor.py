"""Ahead-of-time compiled packages (AOTInductor): nothing is compiled or traced when one is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BuildFailed, IncompatibleEngine
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
from .inductor.options import of_compiler, package_options
from .program import CONSTANTS, SIGNATURE, ProgramSignature, export_program, load_constants
from .unpacked import marked

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
        reason = self.why_unavailable(device) or why_no_cpp_compiler()
        if reason is None and device.type == "cuda":
            reason = why_no_triton() or why_no_c_compiler() or why_no_cuda_headers()
        return reason

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        program, signature = export_program(job, progress)
        with (
            shared_cpp_runtime(job.directory),
            headers_with_the_cache(),
            vector_instructions(job.device, job.keep),
            chosen_kernels(job.spec, job.device),
        ):
            torch._inductor.aoti_compile_and_package(  # type: ignore[no-untyped-call,unused-ignore]
                program, package_path=str(job.directory / PACKAGE), inductor_configs=of_compiler(job.spec)
            )
        _check_names(job.directory, job.device)
        return Artifact(job.directory, (PACKAGE, SIGNATURE, CONSTANTS), signature.details)

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> Engine:
        signature = ProgramSignature.read(artifact.directory)
        package = load_package(artifact.directory / PACKAGE, device)
        slots = _Slots(package)

        def run(inputs: Tensors) -> tuple[torch.Tensor, ...]:
            return tuple(package.boxed_run(list(inputs.values())))

        constants = load_constants(artifact.directory, device)
        own = sum(tensor.nbytes for tensor in constants.values())
        return CompiledEngine(signature, spec.profile, outputs, device, run, slots.fill, constants, own)


class _Slots:
    """The tensors from which a loaded package reads its weights.

    torch never frees a tensor that was given to a package, even when both are gone. So a package is given one tensor a
    weight for good, and an update only points these tensors at other storage, which they do not own.
    """

    def __init__(self, package: Any) -> None:
        self._package = package
        self._slots: dict[str, torch.Tensor] = {}
        self._addresses: list[int] = []

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Let the package compute with `weights`, which the caller keeps alive."""
        with torch.inference_mode(False):  # slots outlive a host's inference mode
            for name, tensor in weights.items():
                if (slot := self._slots.get(name)) is None:
                    slot = self._slots[name] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                memory, offset = _lent(tensor.untyped_storage()), tensor.storage_offset()
                slot.set_(memory, offset, tensor.shape, tensor.stride())
        addresses = [tensor.data_ptr() for tensor in self._slots.values()]
        if addresses != self._addresses:  # each hand-over costs a few bytes that are never freed
            self._addresses = []
            self._package.load_constants(self._slots, False, True, True)  # no standby, all of them, ours to keep alive
            self._addresses = addresses


def _lent(memory: torch.UntypedStorage) -> Any:
    """The same memory as a storage that does not own it."""
    return torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes())


def load_package(path: Path, device: torch.device) -> Any:
    """Load a package, as torch's own loader of one model.

    Raises:
        IncompatibleEngine: it does not fit this machine.
    """
    index = device.index if device.type == "cuda" and device.index is not None else -1
    try:
        # What `torch._inductor.aoti_load_package` ends with; but that first imports the compiler, seconds at each
        # start, and runs the C++ compiler to look at the CPU. Single-threaded, since the events by which it waits for
        # other threads cannot be captured in a CUDA graph.
        with marked():
            return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    except Exception as error:  # the loader raises RuntimeError for anything from a bad archive to a missing symbol
        raise IncompatibleEngine(f"{path.name} cannot be loaded on this machine: {error}") from error


def _check_names(directory: Path, device: torch.device) -> None:
    """A weight that the compiler wrote into the code could never be changed: refuse such a package."""
    signature = ProgramSignature.read(directory)
    wanted = {*signature.weights, *signature.constants}
    found = set(load_package(directory / PACKAGE, device).get_constant_fqns())
    if missing := sorted(wanted - found):
        raise BuildFailed(
            f"The compiler left {len(missing)} of {len(wanted)} weights out of the package, such as {missing[0]}; "
            "please report this with your torch version"
        )
