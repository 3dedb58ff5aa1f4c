"""TensorRT as a `Backend`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.dtypes import dtype_named, dtype_of
from ..core.eight_bits import DTYPES, why_no_layer, why_not_on
from ..core.environment import Environment
from ..core.errors import BackendUnavailable, BuildFailed, IncompatibleEngine, UnsupportedModel
from ..core.progress import Progress, ProgressCallback
from ..core.protocols import Artifact, BuildJob, Engine
from ..core.spec import EngineSpec, Optimize, Precision
from ..core.streams import on_device
from .build import PlanBuilder
from .engine import TensorRTEngine
from .export import ExportedGraph, bytes_of_weights, export_graph, save_graph
from .fingerprint import fingerprints
from .library import Library, find_library
from .requirements import advice, advice_on_packages, missing_packages
from .signature import SIGNATURE, PlanSignature
from .sparsity import sparse_share
from .timing_cache import TimingCache

PLAN = "engine.plan"
RECIPE = 1
"""Raise when export, surgery or build make another plan of the same model: it makes new engines of all old ones."""
ALL, NEEDED = "all", "needed"
"""Graph passes to run: all of them, or those without which TensorRT cannot read the graph (for benchmarks)."""
_NEEDED = ("fold_sizes", "forget_empty_sizes")
_NEEDED_FOR_EIGHT_BITS = (*_NEEDED, "fold_transposes")


class TensorRTBackend:
    """Plans that are refitted with the host's weights: one serves every checkpoint of an architecture, and a LoRA.

    With `BackendConfig.contains_weights` the weights are baked in instead.
    """

    name = "tensorrt"
    can_bake = True

    def environment(self, device: torch.device) -> Environment:
        library = find_library(device)
        return replace(Environment.current(device), versions={library.name: library.version})

    def options(self, device: torch.device, precision: Precision, optimize: Optimize) -> Mapping[str, Any]:
        library = find_library(device)
        return {
            "opset": library.opset,
            "level": library.level(optimize),
            "aux_streams": 0,  # a CUDA graph of one stream is simpler to capture, and gains more
            "hardware": "this",  # never another: a part of the keys of stored engines
            "stripped": library.can_strip,
            "surgery": ALL,
            "recipe": RECIPE,
        }

    def why_unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return advice(device)
        return self._why_no_library(device)

    def why_cannot_build(self, device: torch.device) -> str | None:
        if reason := self._why_no_library(device):
            return reason
        if missing := missing_packages():
            return f"{', '.join(missing)} not installed, which exporting a model needs. {advice_on_packages(missing)}"
        return None

    def why_unsupported(self, spec: EngineSpec) -> str | None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            library = find_library(device)
        except BackendUnavailable as error:
            return str(error)
        reason = library.why_not_precision(spec.precision)
        if reason is None and spec.quantised is not None:
            reason = why_not_on(device, spec.quantised) or library.why_not_in_eight_bits
        if reason is None and not spec.is_static:
            reason = library.why_no_range
        return reason

    def build_bytes(self, spec: EngineSpec) -> int:
        """Twice the weights, in the network and in the plan, and as much again as workspace for kernel selection."""
        return 4 * spec.fingerprint.parameters * dtype_of(spec.precision).itemsize

    def build(self, job: BuildJob, progress: ProgressCallback) -> Artifact:
        try:
            with on_device(job.device):
                return _build(job, progress)
        except UnsupportedModel as error:  # by TensorRT, or in ONNX: another backend may do better
            raise BuildFailed(str(error)) from error

    def load(self, spec: EngineSpec, outputs: tuple[str, ...], artifact: Artifact, device: torch.device) -> Engine:
        library = find_library(device)
        signature = PlanSignature.read(artifact.directory)
        if signature.library != (here := _maker(library)):
            raise IncompatibleEngine(f"The engine was built by {signature.library}, here is {here}; build it again")
        library.log.clear()
        with on_device(device):
            engine, runtime = library.load((artifact.directory / PLAN).read_bytes())
            if engine is None:
                raise IncompatibleEngine(f"TensorRT {library.version} cannot load the engine: {library.log.said()}")
            return TensorRTEngine(library, engine, runtime, signature, spec.profiles, outputs, device)

    def _why_no_library(self, device: torch.device) -> str | None:
        try:
            find_library(device)
        except BackendUnavailable as error:
            return f"{error}. {advice(device)}"
        return None


def _build(job: BuildJob, progress: ProgressCallback) -> Artifact:
    library = find_library(job.device)
    if job.spec.quantised is not None and (reason := why_not_on(job.device, job.spec.quantised)):
        raise UnsupportedModel(reason)  # the machine may have several cards, of which this is another
    progress(Progress("export", None, "exporting the model"))
    graph = export_graph(job, max(library.opset, 18))
    progress(Progress("export", None, "simplifying the graph"))
    graph, reports = _operated(graph, library, job.spec)
    embedded = _read_weights(job.weights) if job.spec.backend.contains_weights else None
    path = save_graph(graph.model, graph.weights, job.directory, embedded)
    share = sparse_share(embedded.values()) if embedded else 0.0
    nodes = len(graph.model.graph.node)
    refittable = graph.weights if embedded is None else ()
    cache = TimingCache(job.keep, _maker(library), job.environment.gpu)
    exact = [node.name for node in graph.model.graph.node if node.op_type in ("Sin", "Cos")]  # of timesteps
    plan = PlanBuilder(library, job.spec, refittable, cache, progress, share, exact).build(path, nodes)
    (job.directory / PLAN).write_bytes(memoryview(plan))
    _signature(job, library, graph, nodes, embedded).save(job.directory)
    details = {"nodes": nodes, "surgery": {report.name: report.changed for report in reports}}
    details |= {"sparse_weights": round(share, 3), "device_bytes": 2 * graph.weight_bytes}
    return Artifact(job.directory, (PLAN, SIGNATURE), details)


def _maker(library: Library) -> str:
    return f"{library.name} {library.version}"


def _operated(graph: ExportedGraph, library: Library, spec: EngineSpec) -> tuple[ExportedGraph, list[Any]]:
    """Run the graph passes on an exported graph.

    Raises:
        UnsupportedModel: eight bits were asked for, and no layer gains by them.
    """
    from .surgery import lower_to_opset_17, operate

    weights, eight_bits = dict(graph.weights), DTYPES[spec.quantised] if spec.quantised else None
    only = None if spec.backend.options["surgery"] == ALL else _NEEDED if eight_bits is None else _NEEDED_FOR_EIGHT_BITS
    opset, tuned = max(library.opset, 18), spec.profile.opt
    model, reports = operate(graph.model, weights, opset=opset, only=only, eight_bits=eight_bits, tuned=tuned)
    if eight_bits is not None and not any(source.eight_bits for source in weights.values()):
        raise UnsupportedModel(why_no_layer(spec.fingerprint.architecture_name, spec.precision_name))
    if library.opset < 18:
        model = lower_to_opset_17(model)
    return ExportedGraph(model, weights, bytes_of_weights(model, weights)), reports


def _signature(
    job: BuildJob, library: Library, graph: ExportedGraph, nodes: int, embedded: Mapping[str, torch.Tensor] | None
) -> PlanSignature:
    inputs = {tensor.name: job.spec.dtypes[tensor.name] for tensor in graph.model.graph.input}
    used = sorted({source.name for source in graph.weights.values()})
    return PlanSignature(
        inputs={name: dtype_named(dtype) for name, dtype in inputs.items()},
        weights=graph.weights if embedded is None else {},
        baked=dict(zip(used, fingerprints([embedded[name] for name in used]), strict=True)) if embedded else {},
        weight_bytes=graph.weight_bytes,
        library=_maker(library),
        nodes=nodes,
    )


def _read_weights(path: Path | None) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    if path is None:
        raise IncompatibleEngine("An engine with embedded weights cannot be built without the weights; build it again")
    return load_file(path)
