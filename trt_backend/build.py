"""Builds a TensorRT plan from an ONNX file."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch

from ..core.errors import BuildFailed, UnsupportedModel
from ..core.progress import Progress, ProgressCallback
from ..core.spec import EngineSpec
from .library import Library
from .sparsity import LAYER_SHARE
from .timing_cache import TimingCache

_SMALLEST_WORKSPACE = 256 << 20
_REPORT_SECONDS = 0.2


class PlanBuilder:
    """Builds one plan.

    Args:
        refittable: names of the weights that can be refitted; empty for a plan with embedded weights.
        sparse_share: share of the weights that are 2:4 sparse, 0 to 1.
        exact: names of nodes that are computed in fp32 in any case.
    """

    def __init__(
        self,
        library: Library,
        spec: EngineSpec,
        refittable: Iterable[str],
        cache: TimingCache,
        progress: ProgressCallback,
        sparse_share: float = 0.0,
        exact: Container[str] = (),
    ) -> None:
        self._library = library
        self._spec = spec
        self._refittable = list(refittable)
        self._cache = cache
        self._progress = progress
        self._sparse_share = sparse_share
        self._exact = exact

    def build(self, graph: Path, operations: int) -> Any:
        """Build the plan, with ever smaller workspaces where GPU memory runs out.

        Args:
            graph: the ONNX file.
            operations: number of its nodes, for progress reports.

        Returns:
            TensorRT's buffer with the plan's bytes.

        Raises:
            UnsupportedModel: TensorRT does not know an operator, or cannot let a weight be replaced.
            BuildFailed: it made no plan.
        """
        workspace: int | None = None
        while True:
            plan = self._attempt(graph, operations, workspace)
            if plan is not None:
                return plan
            log = self._library.log
            if not log.ran_out_of_memory:
                raise BuildFailed(
                    f"TensorRT {self._library.version} made no engine: {log.said()}. Choose backend compiled, or "
                    f"report this with the versions (torch {torch.__version__}, CUDA {torch.version.cuda or 'none'})"
                )
            smaller = _smaller_workspace(workspace)
            if smaller < _SMALLEST_WORKSPACE:
                raise BuildFailed(
                    f"TensorRT ran out of GPU memory while it built {self._spec.describe()}, with a workspace of "
                    f"{(workspace or smaller) >> 20} MB too. Unload other models and programs, or build a smaller size"
                )
            self._progress(Progress("compile", None, f"again, within {smaller >> 20} MB of workspace", operations))
            workspace = smaller

    def _attempt(self, graph: Path, operations: int, workspace: int | None) -> Any:
        library = self._library
        library.log.clear()
        builder = library.new_builder()
        network = library.new_network(builder)
        parser = library.trt.OnnxParser(network, library.log.listener)
        if not parser.parse_from_file(str(graph)):
            raise UnsupportedModel(
                f"TensorRT {library.version} cannot read the model: {_parser_errors(parser)}. {library.log.said()}"
            )
        config = builder.create_builder_config()
        self._configure(builder, network, config, workspace)
        self._cache.lend(config)
        monitor = library.watch(config, _monitor(self._progress, operations))
        self._progress(Progress("compile", None, f"building {operations} operations", operations))
        plan = builder.build_serialized_network(network, config)
        del monitor
        if plan is not None:
            self._cache.learn(config)
        return plan

    def _configure(self, builder: Any, network: Any, config: Any, workspace: int | None) -> None:
        library, options = self._library, self._spec.backend.options
        config.builder_optimization_level = int(options["level"] or 0)
        config.max_aux_streams = int(options["aux_streams"] or 0)
        library.follow_dtypes(config, network, self._spec.precision, self._exact)
        library.target_this_gpu(config)
        if workspace is not None:
            config.set_memory_pool_limit(library.trt.MemoryPoolType.WORKSPACE, workspace)
        if self._sparse_share >= LAYER_SHARE:
            config.set_flag(library.trt.BuilderFlag.SPARSE_WEIGHTS)
        if self._refittable and (unknown := library.make_refittable(config, network, self._refittable)):
            raise UnsupportedModel(
                f"TensorRT cannot let {len(unknown)} weights be replaced, such as {unknown[0]}; switch bake on in the "
                "node, or choose backend compiled"
            )
        self._add_profiles(builder, network, config)

    def _add_profiles(self, builder: Any, network: Any, config: Any) -> None:
        if self._spec.is_static:
            return
        inputs = [network.get_input(index).name for index in range(network.num_inputs)]
        for wanted in self._spec.profiles:
            profile = builder.create_optimization_profile()
            for name in inputs:
                axes = wanted.inputs[name]
                ends = [tuple(getattr(axis, end) for axis in axes) for end in ("min", "opt", "max")]
                profile.set_shape(name, *ends)
            if config.add_optimization_profile(profile) < 0:
                raise UnsupportedModel(f"TensorRT does not take the shapes {wanted}: {self._library.log.said()}")


def _smaller_workspace(workspace: int | None) -> int:
    """Half of the last workspace; at first half of the free GPU memory; in bytes."""
    if workspace is not None:
        return workspace // 2
    return torch.cuda.mem_get_info()[0] // 2 if torch.cuda.is_available() else 4 << 30


def _parser_errors(parser: Any) -> str:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return " | ".join(f"{error.desc()} (node {error.node()})" for error in errors[:3]) or "it gave no reason"


def _monitor(progress: ProgressCallback, operations: int) -> type:
    """A progress monitor for TensorRT, which calls it from several threads."""

    class Monitor:
        _told = 0.0
        _steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._steps[phase] = steps
            self._tell(phase, 0)

        def step_complete(self, phase: str, step: int) -> bool:
            self._tell(phase, step + 1)
            return True

        def phase_finish(self, phase: str) -> None:
            self._steps.pop(phase, None)

        def _tell(self, phase: str, step: int) -> None:
            if time.monotonic() - self._told >= _REPORT_SECONDS:
                type(self)._told = time.monotonic()
                of = self._steps.get(phase) or 0
                progress(Progress("compile", None, f"{phase} {step}/{of}" if of > 1 else phase, operations))

    return Monitor
