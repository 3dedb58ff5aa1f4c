"""A small model with what diffusion models are made of, and the way from it to an engine of a fake TensorRT."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from slipstream.core.dtypes import dtype_name, dtype_named, dtype_of, input_dtypes
from slipstream.core.eight_bits import DTYPES
from slipstream.core.environment import Environment
from slipstream.core.progress import ProgressCallback, ignore_progress
from slipstream.core.protocols import BuildJob, Tensors
from slipstream.core.shapes import ShapeProfile, ShapeRange
from slipstream.core.spec import BackendConfig, EngineSpec, ModelFingerprint, Optimize, Precision, Quantised, Role
from slipstream.tests.tensors import distance
from slipstream.tests.unit.compile_backend.support import SmallArchitecture
from slipstream.tests.unit.trt_backend.fakes.fake_tensorrt import FakeTensorRT, fake_tensorrt
from slipstream.trt_backend.build import PlanBuilder
from slipstream.trt_backend.engine import TensorRTEngine
from slipstream.trt_backend.export import ExportedGraph, export_graph, save_graph
from slipstream.trt_backend.fingerprint import fingerprints
from slipstream.trt_backend.library import FULL, RTX, Library
from slipstream.trt_backend.signature import PlanSignature
from slipstream.trt_backend.surgery import lower_to_opset_17, operate
from slipstream.trt_backend.timing_cache import TimingCache

CPU = torch.device("cpu")
OPTIONS = {"level": 2, "aux_streams": 0}
TOLERANCE = {Precision.FP32: 1e-5, Precision.FP16: 5e-3}
NO_CACHE = TimingCache(None, "fake", None)


class SmallNet(nn.Module):
    """Convolution, group norm, linear, attention over a context, feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.time = nn.Linear(1, 16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(8, 16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.out = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, _, height, width = x.shape
        h = nn.functional.silu(self.norm(self.conv(x)))
        h = h + self.time((timesteps * 0.01).sin().to(x.dtype)[:, None])[:, :, None, None]
        tokens = h.flatten(2).transpose(1, 2)
        q, k, v = (_heads(layer(source)) for layer, source in self._parts(tokens, context))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        found = found + self.narrow(nn.functional.gelu(self.wide(found)))
        return (self.out(h + found.transpose(1, 2).reshape(batch, 16, height, width)),)

    def _parts(self, tokens: torch.Tensor, context: torch.Tensor) -> list[tuple[nn.Module, torch.Tensor]]:
        return [(self.query, tokens), (self.key, context), (self.value, context)]


def _heads(tokens: torch.Tensor) -> torch.Tensor:
    """[b, t, 16] -> [b, 2, t, 8]"""
    return tokens.unflatten(2, (2, 8)).transpose(1, 2)


def profile(batch: tuple[int, int, int], height: tuple[int, int, int], width: int = 12) -> ShapeProfile:
    """Of these minima, tuned sizes and maxima; the width is open where the height is."""
    exactly = ShapeRange.exactly
    rows, columns = ShapeRange(*batch), ShapeRange(8, width, 24) if height[0] < height[2] else exactly(width)
    return ShapeProfile(
        {
            "x": (rows, exactly(4), ShapeRange(*height), columns),
            "timesteps": (rows,),
            "context": (rows, exactly(5), exactly(8)),
        }
    )


STATIC = profile((2, 2, 2), (8, 8, 8))
DYNAMIC = profile((1, 2, 4), (8, 12, 24))
THREE = (profile((1, 1, 1), (8, 8, 8), 8), profile((2, 2, 2), (16, 16, 16), 16), profile((1, 4, 4), (8, 24, 24), 24))
"""Two exact ones, and a range that takes the second's shapes too."""


def make_spec(
    precision: Precision = Precision.FP32,
    profiles: tuple[ShapeProfile, ...] = (STATIC,),
    quantised: Quantised | None = None,
    **options: Any,
) -> EngineSpec:
    dtype = dtype_name(dtype_of(precision))
    return EngineSpec(
        role=Role.UNET,
        fingerprint=ModelFingerprint("b" * 64, "Small"),
        profile=profiles[0],
        dtypes={"x": dtype, "timesteps": "float32", "context": dtype},
        output_dtype=dtype,
        precision=precision,
        optimize=Optimize.FAST_BUILD,
        backend=BackendConfig("tensorrt", {**OPTIONS, **options}),
        more_profiles=profiles[1:],
        quantised=quantised,
    )


def make_weights(precision: Precision = Precision.FP32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.4).to(dtype_of(precision))
        for name, tensor in SmallNet().state_dict().items()
    }


def make_inputs(spec: EngineSpec, shapes: Mapping[str, tuple[int, ...]] | None = None, seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in (shapes or spec.profile.opt).items()}
    drawn["timesteps"] = 1000 * drawn["timesteps"].sigmoid()
    return {name: drawn[name].to(dtype) for name, dtype in input_dtypes(spec).items()}


def error(found: Tensors, weights: Mapping[str, torch.Tensor], inputs: Tensors) -> float:
    """Of an engine's answer, relative to torch's in fp32."""
    wide = {name: tensor.float() for name, tensor in weights.items()}
    with torch.no_grad():
        (wanted,) = torch.func.functional_call(
            SmallNet(), wide, (), {name: tensor.float() for name, tensor in inputs.items()}
        )
    assert list(found) == ["out"] and found["out"].shape == wanted.shape
    return distance(found["out"], wanted)


# ------------------------------------------------------------------------------------------------ on the way


def library_of(release: str) -> tuple[Library, FakeTensorRT]:
    trt = fake_tensorrt(release)
    return Library(RTX if release.startswith("rtx") else FULL, trt), trt


@functools.cache
def _as_exported(opset: int, precision: Precision, profiles: tuple[ShapeProfile, ...]) -> ExportedGraph:
    """For each opset once in a session: it takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        architecture = SmallArchitecture(SmallNet, outputs=("out",))
        job = BuildJob(Path(folder), make_spec(precision, profiles), architecture, CPU, Environment.current(CPU))
        return export_graph(job, opset)


def as_exported(opset: int, spec: EngineSpec) -> ExportedGraph:
    """`SmallNet`'s graph as torch writes it, before surgery."""
    return _copy(_as_exported(opset, spec.precision, spec.profiles))


@functools.cache
def _exported(
    opset: int,
    lowered: bool,
    precision: Precision,
    profiles: tuple[ShapeProfile, ...],
    quantised: Quantised | None,
) -> ExportedGraph:
    graph = _as_exported(opset, precision, profiles)
    weights = dict(graph.weights)
    eight_bits = DTYPES[quantised] if quantised else None
    with mock.patch.multiple("slipstream.core.eight_bits", LEAST_COLUMNS=16, LEAST_PRODUCT=1):
        model, _ = operate(graph.model, weights, opset=opset, eight_bits=eight_bits, tuned=profiles[0].opt)
    return ExportedGraph(lower_to_opset_17(model) if lowered else model, weights, graph.weight_bytes)


def exported(library: Library, spec: EngineSpec) -> ExportedGraph:
    return _copy(_exported(max(library.opset, 18), library.opset < 18, spec.precision, spec.profiles, spec.quantised))


def _copy(graph: ExportedGraph) -> ExportedGraph:
    return ExportedGraph(copy.deepcopy(graph.model), dict(graph.weights), graph.weight_bytes)


class Bench:
    """One TensorRT, one spec, and the steps between a model and its engine.

    Args:
        numbers: the model's weights, for a plan that holds them; None for one that is refitted.
    """

    def __init__(
        self,
        release: str,
        folder: Path,
        spec: EngineSpec | None = None,
        numbers: Mapping[str, torch.Tensor] | None = None,
        keep: Path | None = None,
    ) -> None:
        self.library, self.trt = library_of(release)
        self.script = self.trt.script
        self.spec = spec or make_spec()
        if not self.spec.is_static and (reason := self.library.why_no_range):
            pytest.skip(reason)
        self.graph = exported(self.library, self.spec)
        self.numbers = numbers
        self.baked = numbers is not None
        self.cache = TimingCache(keep, f"{self.library.name} {self.library.version}", "NVIDIA H200")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = save_graph(self.graph.model, self.graph.weights, folder, numbers)
        self.nodes = len(self.graph.model.graph.node)

    def build(self, progress: ProgressCallback = ignore_progress, sparse_share: float = 0.0) -> bytes:
        refittable = () if self.baked else self.graph.weights
        exact = [node.name for node in self.graph.model.graph.node if node.op_type == "Sin"]
        builder = PlanBuilder(self.library, self.spec, refittable, self.cache, progress, sparse_share, exact)
        return bytes(memoryview(builder.build(self.path, self.nodes)))

    @property
    def signature(self) -> PlanSignature:
        inputs = {value.name: dtype_named(self.spec.dtypes[value.name]) for value in self.graph.model.graph.input}
        weights = {} if self.baked else self.graph.weights
        baked = (
            {}
            if self.numbers is None
            else dict(zip(self.numbers, fingerprints(list(self.numbers.values())), strict=True))
        )
        return PlanSignature(inputs, weights, baked, self.graph.weight_bytes, self.library.version, self.nodes)

    def load(self, plan: bytes | None = None, signature: PlanSignature | None = None) -> TensorRTEngine:
        """On the CPU, as if there were a GPU."""
        plan = self.build() if plan is None else plan
        with mock.patch("torch.cuda.is_available", return_value=True):
            engine, runtime = self.library.load(plan)
        assert engine is not None, self.library.log.said()
        wanted = signature or self.signature
        return TensorRTEngine(self.library, engine, runtime, wanted, self.spec.profiles, ("out",), CPU)
