"""What real TensorRT makes of a feed-forward block in eight bits, by what its builder tells of layers; nothing runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxscript", reason="no onnxscript")
pytest.importorskip("onnx_graphsurgeon", reason="no onnx-graphsurgeon")
pytest.importorskip("tensorrt_rtx_bindings", reason="no TensorRT-RTX")

import tensorrt_rtx_bindings as trt
import torch
from torch import nn
from torch.nn import functional as F

from slipstream.core.eight_bits import DTYPES
from slipstream.core.spec import Quantised
from slipstream.tests.unit.trt_backend.surgery.test_surgery import RUNNABLE, export
from slipstream.trt_backend.export import save_graph
from slipstream.trt_backend.surgery import operate

CHANNELS = 640
WORDS = {Quantised.FP8: ("FP8", "SM89"), Quantised.INT8: ("Int8", "SM80")}


class FeedForward(nn.Module):
    """As SDXL has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.wide, self.narrow = nn.Linear(CHANNELS, 8 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features, gate = self.wide(self.norm(x)).chunk(2, -1)
        return x + self.narrow(features * F.gelu(gate))


class Listener(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.messages: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.messages.append(message)


def layers_of(graph: Path, chip: str) -> list[tuple[str, list[str]]]:
    """Of the plan for a chip, each layer's name and the dtypes of all that it reads and writes."""
    listener = Listener()
    builder = trt.Builder(listener)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, listener)
    assert parser.parse_from_file(str(graph))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, chip), 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    assert builder.build_serialized_network(network, config) is not None
    (told,) = [message for message in listener.messages if message.startswith("Layers:")]
    lines = [line for line in told.splitlines() if line.startswith("Name: ")]
    return [(line[6:].split(",")[0], re.findall(r"Datatype: (\w+)", line)) for line in lines]


@pytest.mark.parametrize("wanted", list(Quantised))
def test_products_are_of_eight_bits_and_what_quantises_is_part_of_other_kernels(
    wanted: Quantised, tmp_path: Path
) -> None:
    case = export(FeedForward().half(), torch.randn(2, 1024, CHANNELS).half(), opset=23)
    model, _ = operate(case.model, weights := dict(case.weights), opset=23, only=RUNNABLE, eight_bits=DTYPES[wanted])
    numbers = {name: tensor.detach() for name, tensor in case.state.items()}
    word, chip = WORDS[wanted]
    layers = layers_of(save_graph(model, weights, tmp_path, numbers), chip)
    products = [dtypes for name, dtypes in layers if "MatMul" in name]
    assert [dtypes[:2] for dtypes in products] == [[word, word]] * 2
    others = [dtypes for name, dtypes in layers if "MatMul" not in name]
    assert len(others) == 3, "norm and quantisation; GEGLU between two quantisations; scales, bias and residual"
    assert [dtypes[-1] for dtypes in others] == [word, word, "Half"]
