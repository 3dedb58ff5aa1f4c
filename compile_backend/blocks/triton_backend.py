"""Blocks without C++: their kernels are triton's, and Python that torch's compiler wrote calls them.

For machines without a C++ compiler or the CUDA toolkit's headers. A call takes longer to launch than that of a package,
unless a CUDA graph repeats its kernels. torch reads such an engine by `pickle`: like a package it can do what its maker
likes, and is loaded only where the store trusts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ...core.errors import BuildFailed, IncompatibleEngine, UnsupportedModel, first_line
from ...core.protocols import BuildJob
from ...core.spec import Optimize, Precision
from ..cpp.toolchain import why_no_c_compiler, why_no_triton
from ..cpp.vector_instructions import vector_instructions
from ..inductor.kernels import chosen_kernels
from ..inductor.options import of_compiler, triton_block_options
from ..program import CONSTANTS
from .backend import BlockBackend
from .engine import Run

COMPILED = "compiled.bin"

OLDEST_TORCH = "2.11"
"""The first torch with which this was seen to work."""


class TritonBlockBackend(BlockBackend):
    """As `BlockBackend`, for CUDA alone."""

    name = "triton-blocks"

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return triton_block_options(device, optimize)

    def why_unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"blocks without C++ run on CUDA, not on {device.type}"
        if device.index:  # its number is part of the Python code
            return f"blocks without C++ run on the first GPU, not on {device}"
        if TorchVersion(str(torch.__version__)) < OLDEST_TORCH:
            return f"torch {torch.__version__} cannot keep blocks without C++; torch {OLDEST_TORCH} or newer can"
        return why_no_triton()

    def why_cannot_build(self, device: torch.device) -> str | None:
        return self.why_unavailable(device) or why_no_c_compiler()

    def _compile(self, job: BuildJob, program: torch.export.ExportedProgram) -> tuple[str, ...]:
        _save_constants(program, job.directory)
        with vector_instructions(job.device, job.keep), chosen_kernels(job.spec, job.device):
            compiled = _compiled(program, of_compiler(job.spec))
        compiled.save(path=str(job.directory / COMPILED), format="binary")
        return COMPILED, CONSTANTS

    def _loaded(self, directory: Path, device: torch.device) -> Run:
        from torch._inductor.standalone_compile import CompiledArtifact

        try:
            with _nothing_compiled():
                compiled = CompiledArtifact.load(path=str(directory / COMPILED), format="binary")
            constants = _load_constants(directory, device)
        except Exception as error:  # torch raises many kinds for a file that is not what it expects
            raise IncompatibleEngine(f"{COMPILED} cannot be loaded on this machine: {first_line(error)}") from error
        return lambda given: compiled(*constants, *given)


def _compiled(program: torch.export.ExportedProgram, options: Mapping[str, Any]) -> Any:
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), tracing(TracingContext(detect_fake_mode(inputs))):
        compiled = torch._inductor.standalone_compile(  # type: ignore[no-untyped-call,unused-ignore]
            program.graph_module,
            inputs,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": dict(options)},
            aot=True,
        )
    if kernel_side_table.id_to_kernel:  # a process that loads it would have them in the places of its own
        raise BuildFailed("the block has triton kernels of its own, which cannot be kept without C++")
    return compiled


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Let torch load what was compiled, and nothing more: it starts no processes that compile, and asks nothing of
    triton's driver, which is compiled first. Meanwhile no other thread compiles, which these settings would reach.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config
    from torch._inductor.runtime import autotune_cache

    asking: Any = autotune_cache
    with compile_lock, config.patch({"compile_threads": 1, "triton.cudagraphs": False}):
        before = asking.has_triton
        asking.has_triton = lambda: False  # asked for the name of a cache that is not used here
        try:
            yield
        finally:
            asking.has_triton = before


def _save_constants(program: torch.export.ExportedProgram, directory: Path) -> None:
    """Write what the block's code made of numbers, which the program takes before its inputs."""
    from safetensors.torch import save_file
    from torch.export.graph_signature import InputKind

    others = [spec for spec in program.graph_signature.input_specs if spec.kind is not InputKind.USER_INPUT]
    if any(spec.kind is not InputKind.CONSTANT_TENSOR for spec in others):
        raise UnsupportedModel("the block holds what is no tensor")
    found = [program.constants[str(spec.target)] for spec in others]
    tensors = {
        f"{place:04} {tensor.device.type}": tensor.cpu().clone(memory_format=torch.contiguous_format)
        for place, tensor in enumerate(found)
    }
    save_file(tensors, directory / CONSTANTS)


def _load_constants(directory: Path, device: torch.device) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    found = sorted(load_file(directory / CONSTANTS).items())
    return [tensor.to(device if name.endswith(device.type) else "cpu") for name, tensor in found]
