"""Builds and loads packages of blocks by AOTInductor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from ...core.errors import IncompatibleEngine
from ...core.progress import Progress, ProgressCallback
from ...core.protocols import Artifact, BuildJob, Engine
from ...core.spec import EngineSpec, Optimize, Precision
from ..aot_inductor import PACKAGE, AOTInductorBackend, compile_package
from ..inductor.options import block_options
from ..packages import load_package
from .attention_out import calls_attention_out
from .engine import BlockEngine, Run
from .program import SIGNATURE, BlockArchitecture, BlockSignature, export_block

_KEPT_BUFFERS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Options under which no memory is written twice: whoever computes attention may keep what the package hands out, and
what it gives the package."""


class BlockBackend(AOTInductorBackend):
    """Packages whose weights are arguments: one for each kind of block, form of its calls and dtype."""

    name = "aotinductor-blocks"

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        return block_options(device, optimize)

    def why_unsupported(self, spec: EngineSpec) -> str | None:
        return None

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        import torch._inductor.config

        progress(Progress("export", None, "tracing the block"))
        program, signature = export_block(job, cast(BlockArchitecture, job.architecture))
        signature.save(job.directory)
        progress(Progress("compile", None, f"compiling {signature.nodes} operations", signature.nodes))
        kept = _KEPT_BUFFERS if calls_attention_out(program) else {}
        with torch._inductor.config.patch(compile_threads=1, **kept):  # as many builds as cores run beside this one
            files = self._compile(job, program)
        details = {"nodes": signature.nodes, "open_sizes": signature.sizes.are_open}
        return Artifact(job.directory, (*files, SIGNATURE), details)

    def _compile(self, job: BuildJob, program: torch.export.ExportedProgram) -> tuple[str, ...]:
        """Names of the files that it made in the job's folder."""
        compile_package(job, program)
        return (PACKAGE,)

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> Engine:
        raise IncompatibleEngine("A block's package takes its weights at each call; load it by load_block()")

    def load_block(self, artifact: Artifact, device: torch.device) -> BlockEngine:
        """
        Raises:
            IncompatibleEngine: the package does not fit this machine.
        """
        signature = BlockSignature.read(artifact.directory)
        return BlockEngine(signature, self._loaded(artifact.directory, device))

    def _loaded(self, directory: Path, device: torch.device) -> Run:
        return load_package(directory / PACKAGE, device).run
