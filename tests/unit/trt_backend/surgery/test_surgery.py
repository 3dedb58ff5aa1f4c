"""Surgery makes graphs shorter and weights' layouts other, never the numbers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("onnx", reason="no onnx")
pytest.importorskip("onnxscript", reason="no onnxscript")
pytest.importorskip("onnx_graphsurgeon", reason="no onnx-graphsurgeon")
pytest.importorskip("onnxruntime", reason="no onnxruntime")

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.core.errors import UnsupportedModel
from slipstream.tests.tensors import distance
from slipstream.tests.tiny_unet import CONFIG
from slipstream.trt_backend.surgery import PASSES, lower_to_opset_17, operate
from slipstream.trt_backend.surgery.weight_map import WeightMap, WeightSource

TOLERANCE = 1e-5
RUNNABLE = PASSES[:-1]  # onnxruntime does not know the last one's attribute
FEW = ("fold_sizes", "forget_empty_sizes")  # what an engine built without surgery goes through
TIDY = ("fold_sizes", "remove_idle")
BATCH, AREA = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("area", min=2, max=64)


@dataclass
class Case:
    """A graph whose weights are references to a file that does not exist, as the backend exports it."""

    model: onnx.ModelProto
    weights: WeightMap
    state: dict[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    expected: torch.Tensor

    def run(self, model: onnx.ModelProto, weights: WeightMap, *inputs: torch.Tensor) -> torch.Tensor:
        """What a graph gives with the real weights, laid out as the map says."""
        options = onnxruntime.SessionOptions()
        # Its fused products of 8-bit integers saturate on CPUs without VNNI.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        session = onnxruntime.InferenceSession(filled(model, weights, self.state).SerializeToString(), options)
        names = [tensor.name for tensor in session.get_inputs()]
        feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs or self.inputs, strict=True)}
        return torch.from_numpy(session.run(None, feeds)[0])

    def operated(self, *passes: str, opset: int | None = None) -> Operated:
        """The graph after these passes; checks that the numbers stayed and that a second time changes nothing."""
        weights = dict(self.weights)
        original = self.model.SerializeToString(deterministic=True)
        opset = opset or self.model.opset_import[0].version
        model, reports = operate(self.model, weights, opset=opset, only=passes or RUNNABLE)
        assert self.model.SerializeToString(deterministic=True) == original, "the caller's graph was changed"
        self.check(model, weights)
        again = dict(weights)
        _, second = operate(model, again, opset=opset, only=passes or RUNNABLE)
        assert not any(report.changed for report in second)
        assert again == weights
        return Operated(model, weights, {report.name: report.changed for report in reports})

    def check(self, model: onnx.ModelProto, weights: WeightMap) -> None:
        onnx.checker.check_model(filled(model, weights, self.state), full_check=True)
        assert distance(self.run(model, weights), self.expected) < TOLERANCE


@dataclass
class Operated:
    model: onnx.ModelProto
    weights: WeightMap
    changed: dict[str, int]

    @property
    def counts(self) -> Counter[str]:
        return counts(self.model)

    def node(self, kind: str) -> onnx.NodeProto:
        (node,) = [node for node in self.model.graph.node if node.op_type == kind]
        return node

    def attribute(self, kind: str, name: str) -> Any:
        (value,) = [attribute for attribute in self.node(kind).attribute if attribute.name == name]
        return onnx.helper.get_attribute_value(value)


def counts(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def filled(model: onnx.ModelProto, weights: WeightMap, state: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    """A graph with its weights in place of the references."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.name in weights:
            weight = weights[tensor.name].laid_out(state[weights[tensor.name].name])
            assert tuple(tensor.dims) == tuple(weight.shape), f"{tensor.name} is declared otherwise than it is laid out"
            assert reference(tensor) == {"location": "weights.bin", "offset": "0", "length": str(weight.nbytes)}
            raw = weight.reshape(-1).view(torch.uint8).numpy().tobytes()  # NumPy lacks eight-bit floats
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, raw, raw=True))
    return whole


def reference(tensor: onnx.TensorProto) -> dict[str, str]:
    assert tensor.data_location == onnx.TensorProto.EXTERNAL
    return {entry.key: entry.value for entry in tensor.external_data}


def export(module: nn.Module, *inputs: torch.Tensor, opset: int = 18, dynamic: Any = None) -> Case:
    torch.manual_seed(0)
    for parameter in module.eval().requires_grad_(False).parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    program = torch.export.export(module, inputs, dynamic_shapes=dynamic)
    exported = torch.onnx.export(
        program, args=(), dynamo=True, opset_version=opset, optimize=False, external_data=True, verbose=False
    )
    assert exported is not None
    model, state = exported.model_proto, module.state_dict()
    del model.graph.value_info[:]  # so does the backend: they name axes otherwise than the inputs do
    weights = {tensor.name: WeightSource(tensor.name) for tensor in model.graph.initializer if tensor.name in state}
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            length = state[tensor.name].nbytes
            for field in ("raw_data", "float_data"):
                tensor.ClearField(field)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", str(length))):
                tensor.external_data.add(key=key, value=value)
    return Case(model, weights, state, inputs, module(*inputs))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_graph(nodes: str, *, opset: int = 18) -> onnx.ModelProto:
    """A graph from ONNX's own text, float[2,4] x in and float[2,4] y out."""
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g (float[2,4] x) => (float[2,4] y) {{ {nodes} }}'
    return onnx.parser.parse_model(text)


# ------------------------------------------------------------------------------------------------- references


def test_references_to_one_place_of_a_file_survive_untouched() -> None:
    case = export(nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3)), random(1, 4, 8, 8))
    before = {tensor.name: tensor for tensor in case.model.graph.initializer if tensor.name in case.weights}
    after = {tensor.name: tensor for tensor in case.operated().model.graph.initializer}
    assert len(before) == 4
    assert {name: after[name] for name in before} == before


class Unused(nn.Module):
    """A linear whose output leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_a_weight_that_leaves_the_graph_leaves_the_map() -> None:
    case = export(Unused(), random(2, 8))
    case.weights["unused.weight"] = WeightSource("unused.weight")
    assert set(case.operated().weights) == {"used.weight", "used.bias"}


# ------------------------------------------------------------------------------------------------- small passes


class Chunked(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.linear = parts, nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.linear(x).chunk(self.parts, dim=-1)
        return parts[0][..., :4] * F.gelu(parts[-1][..., :4]) + parts[0][..., 4:8].sigmoid()[..., :4]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_chunk_becomes_one_split(parts: int) -> None:
    case = export(Chunked(parts), random(2, 3, 8))
    assert counts(case.model)["SplitToSequence"] == 1
    operated = case.operated("fold_sizes")
    assert (operated.counts["SplitToSequence"], operated.counts["SequenceAt"], operated.counts["Split"]) == (0, 0, 1)
    assert len(operated.node("Split").output) == parts


def test_chunk_of_open_axes_becomes_a_split() -> None:
    """Also where the size to split is only found behind a Reshape to sizes that are not known before it runs."""

    class Flattened(Chunked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(2).transpose(1, 2))

    case = export(Flattened(2), random(2, 8, 4, 6), dynamic=({0: BATCH, 2: 2 * AREA, 3: 2 * torch.export.Dim("w")},))
    operated = case.operated("fold_sizes")
    assert (operated.counts["SplitToSequence"], operated.counts["Split"]) == (0, 1)


class Reshaped(nn.Module):
    """Sizes written out, and an arithmetic of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-torch.arange(8, dtype=torch.float32) / 8)
        return self.linear(x).view(x.shape[0], -1, 4) * frequencies.view(2, 4)[0]


def test_constants_are_computed_once() -> None:
    case = export(Reshaped(), random(2, 3, 8))
    before = counts(case.model)
    assert before["Constant"] > 5 and before["Concat"] and before["Exp"]
    operated = case.operated("fold_sizes")
    assert not {"Constant", "Concat", "Exp", "Cast", "Range"} & set(operated.counts)


def test_known_sizes_of_open_shapes_are_computed_once() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float[batch, 4, 6] x) => (float[a, b] y) {
            shape = Shape (x)
            last = Constant <value_ints: ints = [-1]> ()
            size = Gather <axis = 0> (shape, last)
            first = Shape <start: int = 0, end: int = 1> (x)
            rest = Constant <value_ints: ints = [-1]> ()
            target = Concat <axis = 0> (rest, size)
            open = Concat <axis = 0> (first, rest)
            flat = Reshape (x, target)
            halved = Reshape (flat, open)
            y = Identity (halved) }"""
    )
    operated, _ = operate(model, {}, opset=18, only=("fold_sizes",))
    assert counts(operated) == {"Shape": 1, "Concat": 1, "Reshape": 2}


def test_what_is_not_known_or_not_repeatable_or_quantized_stays() -> None:
    model = in_graph(
        """one = Constant <value_floats: floats = [1.0, 2.0, 3.0, 4.0]> ()
        noise = RandomNormalLike (one)
        scale = Constant <value_float: float = 0.5> ()
        small = Constant <value = int8 {3}> ()
        number = DequantizeLinear (small, scale)
        a = Add (x, noise)
        b = Add (a, number)
        y = Add (b, weight)"""
    )
    tensor = onnx.TensorProto(name="weight", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere.bin")
    model.graph.initializer.append(tensor)
    operated, _ = operate(model, {}, opset=18, only=RUNNABLE)
    assert counts(operated) == {"RandomNormalLike": 1, "DequantizeLinear": 1, "Add": 3}


def test_equal_work_is_done_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.silu(x) * F.silu(y) + F.silu(x).mean(1, keepdim=True) - F.elu(x) * F.elu(x, alpha=0.5)

    case = export(Twice(), random(2, 8), random(3, 8)[:2])
    assert (counts(case.model)["Sigmoid"], counts(case.model)["Elu"]) == (3, 2)
    operated = case.operated("fold_sizes")
    assert (operated.counts["Sigmoid"], operated.counts["Elu"]) == (2, 2)


def test_merging_is_the_same_every_time() -> None:
    case = export(Twins(), random(2, 3, 8))
    first, second = (case.operated().model.SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


class Twins(nn.Module):
    """Two equal branches, and outputs that must keep their names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.silu(self.linear(x)), F.silu(self.linear(x))

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().__call__(*inputs)[0]


def test_outputs_keep_their_names() -> None:
    model = in_graph("a = Relu (x) y = Identity (a)")
    operated, _ = operate(model, {}, opset=18)
    assert [(node.op_type, list(node.output)) for node in operated.graph.node] == [("Relu", ["y"])]
    passed_on, _ = operate(in_graph("y = Identity (x)"), {}, opset=18)
    assert counts(passed_on) == {"Identity": 1}


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("a = Relu (x) b = Identity (a) y = Relu (b)", {"Relu": 2}),
        ("a = Relu (x) unread = Exp (a) y = Relu (a)", {"Relu": 2}),
        ("a = Cast <to = 1> (x) y = Relu (a)", {"Relu": 1}),
        ("a = Cast <to = 10> (x) b = Cast <to = 1> (a) y = Relu (b)", {"Relu": 1, "Cast": 2}),
        ("a = CastLike (x, x) y = Relu (a)", {"Relu": 1}),
        ("a = Dropout (x) y = Relu (a)", {"Relu": 1}),
        ("a = Transpose <perm = [0, 1]> (x) y = Relu (a)", {"Relu": 1}),
        ("a = Transpose <perm = [1, 0]> (x) b = Transpose (a) y = Relu (b)", {"Relu": 1}),
        (
            "s = Constant <value_ints = [1, 2, 4]> () t = Constant <value_ints = [2, 4]> () a = Reshape (x, s)"
            "b = Transpose <perm = [1, 2, 0]> (a) c = Transpose <perm = [0, 2, 1]> (b) d = Relu (c) y = Reshape (d, t)",
            {"Relu": 1, "Reshape": 2, "Transpose": 1},
        ),
        ("a = Transpose (x) b = Relu (a) y = Transpose (b)", {"Relu": 1, "Transpose": 2}),
        ("s = Constant <value_ints = [2, 4]> () a = Reshape (x, s) y = Relu (a)", {"Relu": 1}),
        ("s = Constant <value_ints = [0, -1]> () a = Reshape (x, s) y = Relu (a)", {"Relu": 1}),
        (
            "s = Constant <value_ints = [8]> () t = Constant <value_ints = [4, 2]> ()"
            "u = Constant <value_ints = [2, 4]> () a = Reshape (x, s) b = Reshape (a, t)"
            "c = Relu (b) y = Reshape (c, u)",
            {"Relu": 1, "Reshape": 2},
        ),
        ("s = Constant <value_ints = [2, 4]> () a = Expand (x, s) y = Relu (a)", {"Relu": 1}),
        ("a = Concat <axis = 0> (x) y = Relu (a)", {"Relu": 1}),
    ],
)
def test_what_does_nothing_goes(nodes: str, left: dict[str, int]) -> None:
    model = in_graph(nodes)
    operated, _ = operate(model, {}, opset=18, only=("fold_sizes", "remove_idle"))
    assert counts(operated) == left
    x = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)}
    before, after = (onnxruntime.InferenceSession(m.SerializeToString()).run(None, x)[0] for m in (model, operated))
    assert np.array_equal(before, after)


# ----------------------------------------------------------------------------------------------- normalizations


@pytest.mark.parametrize("dynamic", [None, ({0: BATCH, 2: 2 * AREA},)])
def test_group_norm_is_recovered(dynamic: Any) -> None:
    case = export(nn.GroupNorm(4, 12), random(2, 12, 6, 5), dynamic=dynamic)
    assert counts(case.model)["InstanceNormalization"] == 1
    assert "GroupNormalization" not in case.operated().counts  # opset 18 has none that scales each channel
    operated = case.operated(*TIDY, "recover_group_norm", opset=21)
    assert operated.counts == {"GroupNormalization": 1}
    assert operated.changed["recover_group_norm"] == 1
    assert operated.attribute("GroupNormalization", "num_groups") == 4
    assert list(operated.node("GroupNormalization").input)[1:] == ["weight", "bias"]


def test_an_instance_norm_of_its_own_stays() -> None:
    case = export(nn.InstanceNorm2d(12, affine=True), random(2, 12, 6, 5))
    assert case.operated(opset=23).counts["GroupNormalization"] == 0


class WrittenNorm(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.weight, self.bias = form, nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.form == "pow":
            return (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight + self.bias
        if self.form == "rsqrt":
            variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            return self.weight * ((x - mean) * torch.rsqrt(variance + 1e-3)) + self.bias
        if self.form == "no bias":
            return self.weight * ((x - mean) / (x.var(-1, unbiased=False, keepdim=True) + 1e-3) ** 0.5)
        if self.form == "other axis":
            return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-3) * self.weight + self.bias
        assert self.form == "unbiased"
        return (x - mean) / torch.sqrt(x.var(-1, keepdim=True) + 1e-3) * self.weight + self.bias


@pytest.mark.parametrize("form", ["pow", "rsqrt", "no bias"])
def test_layer_norm_is_recovered(form: str) -> None:
    case = export(WrittenNorm(form), random(2, 5, 16))
    assert counts(case.model)["ReduceMean"] >= 2
    operated = case.operated(*TIDY, "recover_layer_norm")
    assert operated.counts == {"LayerNormalization": 1}
    assert operated.attribute("LayerNormalization", "epsilon") == pytest.approx(1e-3)
    assert len(operated.node("LayerNormalization").input) == (2 if form == "no bias" else 3)


@pytest.mark.parametrize("form", ["other axis", "unbiased"])
def test_what_only_looks_like_layer_norm_stays(form: str) -> None:
    case = export(WrittenNorm(form), random(2, 16, 16))
    assert case.operated().counts["LayerNormalization"] == 0


# ---------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """softmax(q k / sqrt(8) + mask) v, written in several ways."""

    def __init__(self, form: str = "sdpa") -> None:
        super().__init__()
        self.form = form

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        if self.form == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, *masks)
        if self.form == "scaled":
            return F.scaled_dot_product_attention(q, k, v, scale=0.7)
        scores = q @ k.transpose(-1, -2)
        if self.form == "mul":
            return torch.softmax(scores * 0.3, -1) @ v
        if self.form == "div":
            return torch.softmax(scores / 3, -1) @ v
        if self.form == "mask first":
            return torch.softmax(masks[0] + (q * 0.3) @ k.transpose(-1, -2), -1) @ v
        if self.form == "read twice":
            weights = torch.softmax(scores, -1)
            return weights @ v + weights.amax(-1, keepdim=True)
        if self.form == "other axis":
            return torch.softmax(scores * 0.3, -2) @ v
        assert self.form == "plain"
        return torch.softmax(scores, -1) @ v


def attention_inputs(*masks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return random(2, 4, 6, 8), random(2, 4, 7, 8), random(2, 4, 7, 9), *masks


SCALES = {"sdpa": 8**-0.5, "scaled": 0.7, "mul": 0.3, "div": 1 / 3, "plain": 1.0}


@pytest.mark.parametrize("form", SCALES)
def test_attention_is_recovered(form: str) -> None:
    case = export(Attention(form), *attention_inputs())
    assert counts(case.model)["Softmax"] == 1
    assert "Attention" not in case.operated().counts  # opset 18 has none
    operated = case.operated(opset=23)
    assert operated.counts == {"Attention": 1}
    assert operated.changed["recover_attention"] == 1
    assert operated.attribute("Attention", "scale") == pytest.approx(SCALES[form], rel=1e-6)


def test_attention_of_open_lengths_is_recovered() -> None:
    length = torch.export.Dim("length", min=2, max=64)
    case = export(
        Attention(), *attention_inputs(), dynamic=({0: BATCH, 2: AREA}, {0: BATCH, 2: length}, {0: BATCH, 2: length})
    )
    operated = case.operated(opset=23)
    assert operated.counts == {"Attention": 1}
    others = random(3, 4, 9, 8), random(3, 4, 5, 8), random(3, 4, 5, 9)
    expected = F.scaled_dot_product_attention(*others)
    assert distance(case.run(operated.model, operated.weights, *others), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("form", "mask"),
    [
        ("sdpa", random(2, 1, 6, 7)),
        ("sdpa", random(6, 7)),
        ("mask first", random(1, 4, 6, 7)),
        ("sdpa", torch.ones(6, 7).tril().bool()),
    ],
)
def test_masked_attention_is_recovered(form: str, mask: torch.Tensor) -> None:
    operated = export(Attention(form), *attention_inputs(mask)).operated(opset=23)
    assert operated.counts["Attention"] == 1
    assert len(operated.node("Attention").input) == 4
    assert not {"Softmax", "MatMul", "IsNaN"} & set(operated.counts)


@pytest.mark.parametrize(
    ("form", "masks"), [("read twice", ()), ("other axis", ()), ("mask first", (random(2, 1, 6, 1),))]
)
def test_what_only_looks_like_attention_stays(form: str, masks: tuple[torch.Tensor, ...]) -> None:
    """A mask whose last axis is short would be padded, not spread."""
    inputs = attention_inputs(*masks)
    if form == "other axis":
        inputs = random(2, 4, 7, 8), random(2, 4, 7, 8) + 1, random(2, 4, 7, 9)
    assert export(Attention(form), *inputs).operated(opset=23).counts["Attention"] == 0


def test_attention_is_marked_for_tensorrt() -> None:
    case = export(Attention(), *attention_inputs(), opset=23)
    model, reports = operate(case.model, {}, opset=23, only=("mark_attention_decomposable",))
    (node,) = model.graph.node
    said = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert said == {"TRT_decomposable": 1, "scale": pytest.approx(8**-0.5), "is_causal": 0}
    assert [(report.name, report.changed) for report in reports] == [("mark_attention_decomposable", 1)]
    _, again = operate(model, {}, opset=23)
    assert [report.changed for report in again] == [0] * len(PASSES)


# ---------------------------------------------------------------------------------------------------- transposes


class Tied(nn.Module):
    """One weight, read as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) @ self.weight


def test_a_weight_is_stored_as_its_readers_want_it() -> None:
    case = export(nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 8)), random(2, 3, 8))
    assert counts(case.model)["Transpose"] == 2
    operated = case.operated("fold_transposes")
    assert operated.counts["Transpose"] == 0
    assert operated.changed == {"fold_transposes": 2}
    assert operated.weights["0.weight"] == WeightSource("0.weight", permutation=(1, 0))
    assert operated.weights["0.bias"] == WeightSource("0.bias")


def test_a_weight_that_is_also_read_as_it_is_stays() -> None:
    operated = export(Tied(), random(2, 3, 8)).operated()
    assert operated.counts["Transpose"] == 1
    assert operated.weights == {"weight": WeightSource("weight")}


def test_gemm_transposes_for_itself() -> None:
    model = in_graph(
        "t = Transpose <perm = [1, 0]> (x) a = Relu (x) b = Transpose (a)"
        "c = Gemm (t, a) d = Transpose (c) y = Gemm <transB = 1> (x, d) unread = Gemm (x, b)"
    )
    model.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("unread", 1, None))
    operated, _ = operate(model, {}, opset=18, only=("fold_transposes",))
    assert counts(operated)["Transpose"] == 0
    x = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)}
    before, after = (onnxruntime.InferenceSession(m.SerializeToString()).run(None, x) for m in (model, operated))
    assert all(np.allclose(one, other, rtol=TOLERANCE) for one, other in zip(before, after, strict=True))


# ------------------------------------------------------------------------------------------------------- padding


class Shared(nn.Module):
    """Two linears over one activation of an odd size, and one whose size is even."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.out = nn.Linear(13, 16, bias=False), nn.Linear(13, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.k(x) * self.v(x))


@pytest.mark.parametrize(("shape", "kind"), [((2, 3, 13), "MatMul"), ((2, 13), "Gemm")])
def test_odd_products_are_lengthened(shape: tuple[int, ...], kind: str) -> None:
    case = export(Shared(), random(*shape))
    operated = case.operated("fold_transposes", "pad_matmul_k")
    assert operated.counts["Pad"] == 1  # one for both
    assert operated.changed["pad_matmul_k"] == 2
    padded = {name: source.padded for name, source in operated.weights.items() if source.padded}
    shapes = [(16, 16), (16, 16)]
    assert [padded["k.weight"], padded["v.weight"]] == shapes
    assert operated.counts[kind] >= 2


def test_padding_lengthens_the_reference() -> None:
    operated = export(Shared(), random(2, 3, 13)).operated()
    tensors = {tensor.name: tensor for tensor in operated.model.graph.initializer}
    assert list(tensors["k.weight"].dims) == [16, 16]
    assert reference(tensors["k.weight"]) == {"location": "weights.bin", "offset": "0", "length": str(16 * 16 * 4)}


# -------------------------------------------------------------------------------------------------------- opsets


class Changed18(nn.Module):
    """Operators whose opset 18 says the same as 17 in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(self.norm(x), scale_factor=2.0)
        a, b = self.conv(F.pad(x, (0, 1, 0, 1))).chunk(2, dim=1)
        return a * b


def test_opset_18_is_lowered_to_17() -> None:
    case = export(Changed18(), random(2, 4, 6, 6))
    operated = case.operated()
    assert {"Split", "Resize", "Pad"} <= set(operated.counts)
    lowered = lower_to_opset_17(operated.model)
    assert (lowered.opset_import[0].version, lowered.ir_version) == (17, 8)
    assert operated.model.opset_import[0].version == 18
    assert counts(lowered) == operated.counts
    case.check(lowered, operated.weights)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("y = Mish (x)", "Mish .* was not tried there"),
        ("y = ReduceMean (x)", "ReduceMean .* was not tried there"),
        ("y = Slice (x, x, x, x)", "Slice .* only known when it runs"),
        ("a, b = Split <axis = 1, num_outputs = 2> (x) y = Concat <axis = 1> (a, b)", "Split .* is told no sizes"),
        (
            'y = Resize <mode = "linear", antialias = 1> (x, , x)',
            "Resize .* antialiases",
        ),
        (
            "y = Pad (x, x, x, x)",
            "Pad .* names axes",
        ),
    ],
)
def test_what_tensorrt_8_cannot_read_is_named(nodes: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        lower_to_opset_17(in_graph(nodes))


def test_an_opset_is_only_raised_where_operators_keep_their_meaning() -> None:
    graph = in_graph('s = Constant <value_floats = [1.0, 1.0]> () y = Resize <mode = "linear", antialias = 1> (x, , s)')
    with pytest.raises(UnsupportedModel, match="Resize .* means something else in opset 21"):
        operate(graph, {}, opset=21)
    with pytest.raises(UnsupportedModel, match="of opset 21 cannot be prepared for opset 18"):
        operate(in_graph("y = Relu (x)", opset=21), {}, opset=18)


# ----------------------------------------------------------------------------------------------------- a whole UNet

UNET = {**CONFIG, "cross_attention_dim": 36}
LAYERS = 4 * 2  # transformer blocks, each with attention to itself and to the prompt
KEPT = {
    "Conv": 33, "Gemm": 10, "LayerNormalization": 12, "Resize": 1, "Split": 4, "Transpose": 5 * LAYERS, "Pad": 1
}  # fmt: skip
GONE = (
    "SplitToSequence", "SequenceAt", "Constant", "Identity", "Cast", "CastLike", "Range", "Expand", "Shape", "Gather",
    "Sqrt",
)  # fmt: skip


class WholeUNet(nn.Module):
    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        torch.manual_seed(1)
        self.unet = UNet2DConditionModel(**UNET)

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.unet(x, timesteps, context, return_dict=False)[0]


def unet_inputs(batch: int = 2, height: int = 16, width: int = 16) -> tuple[torch.Tensor, ...]:
    return random(batch, 4, height, width), 100 * random(batch).abs(), random(batch, 77, 36)


@functools.cache
def whole_unet(opset: int) -> Case:
    """Exported once in a session: it takes seconds."""
    return export(WholeUNet(), *unet_inputs(), opset=opset)


@pytest.mark.diffusers
@pytest.mark.parametrize(("opset", "target"), [(18, 18), (18, 23), (23, 23)])
def test_a_unet_gives_the_same_numbers_with_far_fewer_operators(opset: int, target: int) -> None:
    case = whole_unet(opset)
    operated = case.operated(opset=target)
    there = operated.counts
    assert {kind: there[kind] for kind in KEPT} == KEPT
    assert not set(GONE) & set(there)
    assert there["Attention"] == (LAYERS if target == 23 else 0)
    assert there["GroupNormalization"] == (21 if target == 23 else 0)
    assert there["MatMul"] == (40 if target == 23 else 40 + 2 * LAYERS)
    assert sum(there.values()) < 0.55 * sum(counts(case.model).values())
    assert not [
        node for node in operated.model.graph.node if node.op_type == "Transpose" and node.input[0] in case.weights
    ]
    assert set(operated.weights) == set(case.weights)
    if target == 18:
        case.check(lower_to_opset_17(operated.model), operated.weights)


@pytest.fixture(scope="module")
def open_unet() -> tuple[nn.Module, Case]:
    """A whole UNet whose batch, height, width and prompt's length are open."""
    open_axis = torch.export.Dim.DYNAMIC
    dynamic = ({0: open_axis, 2: open_axis, 3: open_axis}, {0: open_axis}, {0: open_axis, 1: open_axis})
    module = WholeUNet()
    return module, export(module, *unet_inputs(2, 16, 12), opset=18, dynamic=dynamic)


@pytest.mark.diffusers
def test_a_unet_of_open_shapes_runs_at_others(open_unet: tuple[nn.Module, Case]) -> None:
    module, case = open_unet
    operated = case.operated(opset=23)
    assert (operated.counts["Attention"], operated.counts["GroupNormalization"]) == (LAYERS, 21)
    assert not {"SplitToSequence", "Constant", "Softmax", "InstanceNormalization"} & set(operated.counts)
    others = unet_inputs(3, 8, 20)
    assert distance(case.run(operated.model, operated.weights, *others), module(*others)) < TOLERANCE


def test_a_view_beside_an_open_axis_says_nothing_of_sizes_of_0() -> None:
    """TensorRT 8.6 refuses a -1 beside an open axis where sizes might be 0."""

    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0], -1, 4, 8).transpose(1, 2)

    case = export(Heads(), torch.randn(2, 6, 32), dynamic=({0: BATCH, 1: AREA},))
    done = case.operated("forget_empty_sizes")
    assert done.changed["forget_empty_sizes"] == 1
    told = [
        attribute.i for node in done.model.graph.node for attribute in node.attribute if attribute.name == "allowzero"
    ]
    assert not any(told)
