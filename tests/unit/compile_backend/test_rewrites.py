"""Graphs that were written anew compute what they computed, of what the compiler is quick at."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slipstream.compile_backend import AOTInductorBackend
from slipstream.compile_backend.inductor.kernels import whole_rows
from slipstream.compile_backend.inductor.options import (
    JOINED_PERCENT,
    PACKAGED,
    REWRITES,
    ROWS_AT_ONCE,
    fusion_options,
    package_options,
)
from slipstream.compile_backend.layouts import LaidOutWeights, TensorLayout
from slipstream.compile_backend.rewrites import (
    Rewritten,
    eight_bits,
    gated,
    group_norm,
    passes,
    rewrite,
    wide_attention,
)
from slipstream.compile_backend.rewrites.derived_weights import DerivedWeight, Form
from slipstream.core.eight_bits import why_not_on
from slipstream.core.errors import UnsupportedModel
from slipstream.core.protocols import Tensors
from slipstream.core.spec import BackendConfig, EngineSpec, Optimize, Quantised
from slipstream.tests.tensors import distance
from slipstream.tests.unit.compile_backend.support import CPU, SmallModel, make_inputs, make_spec

aten = torch.ops.aten


class Block(nn.Module):
    """What UNets and VAEs are made of, in the layouts and orders in which their code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 32)
        self.first = nn.Conv2d(32, 32, 3, padding=1)
        self.second = nn.Conv2d(64, 32, 3, padding=1)
        self.time = nn.ModuleList(nn.Linear(24, 32) for _ in range(3))
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        times = [layer(F.silu(embedding))[:, :, None, None] for layer in self.time]
        h = self.first(F.silu(self.norm(x))) + times[0]
        n, c, height, width = h.shape
        tokens = h.flatten(2).transpose(1, 2)
        q, k, v = (layer(tokens)[:, None] for layer in (self.query, self.key, self.value))
        tokens = tokens + F.scaled_dot_product_attention(q, k, v)[:, 0]
        tokens = tokens + self.narrow(F.gelu(self.wide(tokens)))
        back = tokens.reshape(n, height, width, c).permute(0, 3, 1, 2).contiguous()
        joined = torch.cat([back + times[1], x], 1)
        return self.second(F.interpolate(joined, scale_factor=2, mode="nearest")) * times[2]


def inputs_of(side: int = 16, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(2, 32, side, side, generator=generator).to(dtype),
        "embedding": torch.randn(2, 24, generator=generator).to(dtype),
    }


def spec_of(percent: int = 0, rewrites: bool = True, quantised: Quantised | None = None) -> EngineSpec:
    backend = AOTInductorBackend()
    options = {REWRITES: rewrites, JOINED_PERCENT: percent, PACKAGED: rewrites}
    return replace(make_spec(backend), backend=BackendConfig(backend.name, options), quantised=quantised)


def rewritten(module: nn.Module, inputs: Tensors, spec: EngineSpec) -> Rewritten:
    with torch.no_grad():
        program = torch.export.export(module.eval(), (), dict(inputs), strict=False)
    return rewrite(program, spec, inputs, CPU)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def with_weights(found: Rewritten, module: nn.Module) -> nn.Module:
    """The rewritten program as an engine computes it: derived weights are made of the model's."""
    runnable = found.program.module()
    named = dict(module.named_parameters())
    for name, weight in found.derived.items():
        place = torch.empty_like(runnable.get_buffer(name))  # those of the program lie one upon the other
        setattr(runnable, name, weight.write(place, [named[source].detach() for source in weight.sources]))
    return runnable


def answer(found: Rewritten, module: nn.Module, inputs: Tensors) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = with_weights(found, module)(**inputs)
    return result


def count(found: Rewritten, *operators: object) -> int:
    return sum(node.target in operators for node in found.program.graph.nodes)


def test_a_graph_that_nobody_asked_to_rewrite_stays() -> None:
    module, inputs = Block(), inputs_of()
    found = rewritten(module, inputs, spec_of(100, rewrites=False))
    assert count(found, aten.group_norm.default) == 1 and not found.derived


@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize("many", [1, group_norm._MANY])
def test_all_passes_together_compute_the_same(side: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "_MANY", many)
    module, inputs = Block(), inputs_of(side)
    found = rewritten(module, inputs, spec_of(100))
    assert distance(answer(found, module, inputs), module(**inputs)) < 1e-5
    assert not count(found, aten.group_norm.default, aten.upsample_nearest2d.vec, aten.contiguous.default)
    assert count(found, aten.linear.default) == 4  # times, query with key and value, wide, narrow


class JointAttention(nn.Module):
    """Text and picture attend to each other, as in SD3: four axes, and no picture."""

    def forward(self, text: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([text, x], dim=1).transpose(1, 2)
        return F.scaled_dot_product_attention(joined, joined, joined)


def test_what_attention_reads_keeps_its_channels_side_by_side() -> None:
    """No fused kernel takes anything else: SD3 at 1024×1024 took four times as long."""
    inputs = {"text": torch.randn(2, 5, 4, 8), "x": torch.randn(2, 16, 4, 8)}
    found = rewritten(JointAttention(), inputs, spec_of())
    (node,) = (each for each in found.program.graph.nodes if each.target is aten.scaled_dot_product_attention.default)
    assert all(each.meta["val"].stride(-1) == 1 for each in node.args[:3])
    assert distance(answer(found, JointAttention(), inputs), JointAttention()(**inputs)) < 1e-6


@pytest.mark.parametrize("shape", [(1, 32, 8, 8), (2, 64, 20, 12), (1, 32, 64, 64), (3, 48, 33, 31)])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_is_exact_far_from_zero(shape: tuple[int, ...], affine: bool) -> None:
    """A difference of squares would lose everything here."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) + 3000).contiguous(
        memory_format=torch.channels_last
    )
    weight, bias = (torch.linspace(-1, 2, shape[1]), torch.linspace(0, 1, shape[1])) if affine else (None, None)
    wanted = F.group_norm(x.double(), 16, *((t.double() for t in (weight, bias)) if affine else ()), eps=1e-6)
    found = group_norm.group_norm(x, 16, weight, bias, 1e-6)
    usual = F.group_norm(x, 16, weight, bias, eps=1e-6)
    assert distance(found, wanted) < max(2 * distance(usual, wanted), 1e-3)


def test_group_norm_keeps_half_precision_and_layout() -> None:
    x = torch.randn(1, 32, 16, 16).half().contiguous(memory_format=torch.channels_last)
    found = group_norm.group_norm(x, 4, None, None, 1e-5)
    assert found.dtype == torch.float16 and found.is_contiguous(memory_format=torch.channels_last)


class WideAttention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("scores_bytes", [1 << 30, 4 * 40 * 7])
def test_wide_heads_are_products(scale: float | None, scores_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_attention, "_SCORES_BYTES", scores_bytes)
    generator = torch.Generator().manual_seed(3)
    inputs = {name: torch.randn(1, 2, 40, 320, generator=generator) for name in "qkv"}
    module = WideAttention(scale=scale)
    found = rewritten(module, inputs, spec_of())
    assert not count(found, aten.scaled_dot_product_attention.default)
    assert distance(answer(found, module, inputs), module(**inputs)) < 1e-5


@pytest.mark.parametrize(
    ("options", "channels"), [({"is_causal": True}, 320), ({}, 128), ({"attn_mask": torch.zeros(40, 40)}, 320)]
)
def test_other_attention_stays(options: dict[str, object], channels: int) -> None:
    inputs = {name: torch.randn(1, 2, 40, channels) for name in "qkv"}
    found = rewritten(WideAttention(**options), inputs, spec_of())
    assert count(found, aten.scaled_dot_product_attention.default) == 1


def test_joined_layers_take_no_more_than_they_may() -> None:
    module, inputs = Block(), inputs_of()
    whole = sum(weight.nbytes for weight in module.parameters())
    for percent in (0, 1, 3, 6, 100):
        found = rewritten(module, inputs, spec_of(percent))
        named = dict(module.named_parameters())
        copies = sum(named[name].nbytes for weight in found.derived.values() for name in weight.sources)
        biases = sum(named[name].nbytes for w in found.derived.values() for name in w.sources if "bias" in name)
        assert copies - biases <= whole * percent / 100
        assert distance(answer(found, module, inputs), module(**inputs)) < 1e-5
    assert {weight.sources for weight in found.derived.values()} == {
        ("time.0.weight", "time.1.weight", "time.2.weight"),
        ("time.0.bias", "time.1.bias", "time.2.bias"),
        ("query.weight", "key.weight", "value.weight"),
    }


def test_constants_and_unsaved_buffers_survive() -> None:
    module, inputs = SmallModel(), make_inputs()
    found = rewritten(module, inputs, spec_of(100))
    with torch.no_grad():
        for given, wanted in zip(found.program.module()(**inputs), module(**inputs), strict=True):
            assert distance(given, wanted) < 1e-5


@pytest.fixture
def small_layers_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_COLUMNS", 16)
    monkeypatch.setattr("slipstream.core.eight_bits.LEAST_PRODUCT", 1)


@pytest.mark.usefixtures("small_layers_gain")
@pytest.mark.parametrize(("quantised", "limit"), [(Quantised.FP8, 3e-2), (Quantised.INT8, 1e-2)])
@pytest.mark.parametrize("long", [2048, 32])
def test_feed_forward_in_eight_bits(
    quantised: Quantised, limit: float, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eight_bits, "_LONG", long)
    monkeypatch.setattr(eight_bits, "_LEAST_PART", 8)
    module, inputs = Block(), inputs_of()
    found = rewritten(module, inputs, spec_of(100, quantised=quantised))
    error = distance(answer(found, module, inputs), module(**inputs))
    assert found.eight_bits == 2 and count(found, aten.linear.default) == 2
    assert 1e-5 < error < limit
    assert not count(found, aten.ones.default), "a kernel in each layer, for a constant"
    assert count(found, aten.as_strided.default) == (long < 128)
    scales = [weight for weight in found.derived.values() if weight.form is Form.SCALE]
    assert {weight.sources for weight in scales} == {("wide.weight",), ("narrow.weight",)}


class Gated(nn.Module):
    """A feed-forward block as UNets have it."""

    def __init__(self, columns: int = 80, width: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * columns, bias=bias), nn.Linear(columns, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(F.dropout(self.gate(*self.halves(self.wide(x))), 0.1, training=False))

    def halves(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.chunk(2, dim=-1)

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * F.gelu(gate)


class GateFirst(Gated):
    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.gelu(gate) * x


class Split(Gated):
    def halves(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.split(y.shape[-1] // 2, -1)


class Turned(Gated):
    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate * F.gelu(x)


class OneHalf(Gated):
    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * F.gelu(x)


class Tanh(Gated):
    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * F.gelu(gate, approximate="tanh")


class Written(Gated):
    """Into what the gate gives."""

    def gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gate = F.gelu(gate)
        gate[..., :40] = 0
        return x * gate


class ReadTwice(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.gate(*self.halves(self.wide(x)))
        return self.narrow(gated) + gated.sum(-1, keepdim=True)


class OtherHalves(Gated):
    """Along another axis."""

    def halves(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.chunk(2, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.gate(*self.halves(self.wide(x))).repeat(1, 2, 1)[..., : self.narrow.in_features])


class Trained(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(F.dropout(self.gate(*self.halves(self.wide(x))), 1e-6, training=True))


@pytest.fixture
def gates_in_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What stands for the kernel where there is no Triton; the shapes that it was asked for."""
    asked = []

    def geglu_rows(y: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(tuple(y.shape))
        x, gate = (y + bias).float().chunk(2, -1)
        return eight_bits.in_eight_bits(x * F.gelu(gate), torch.float8_e4m3fn)

    kernels = ModuleType("geglu_rows")
    kernels.geglu_rows = geglu_rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, gated.__name__.replace("gated", "geglu_rows"), kernels)
    monkeypatch.setattr(passes, "runs_on", lambda device: True)
    return asked


@pytest.mark.usefixtures("small_layers_gain")
@pytest.mark.parametrize("kind", [Gated, GateFirst, Split])
def test_a_gate_between_layers_in_fp8_is_one_kernel(kind: type[Gated], gates_in_torch: list[tuple[int, ...]]) -> None:
    module, inputs = kind(), {"x": torch.randn(2, 16, 32)}
    found = rewritten(module, inputs, spec_of(quantised=Quantised.FP8))
    assert gates_in_torch == [(32, 160)] and found.eight_bits == 2
    assert 1e-5 < distance(answer(found, module, inputs), module(**inputs)) < 0.1
    assert count(found, aten.linear.default) == 0 and count(found, aten.chunk.default) == 1  # of what stands for it
    assert count(found, aten._scaled_mm.default) == 2


@pytest.mark.usefixtures("small_layers_gain")
@pytest.mark.parametrize(
    "module",
    [
        *(kind() for kind in (Turned, OneHalf, Tanh, Written, ReadTwice, OtherHalves, Trained)),
        Gated(112),  # columns that the kernel cannot hold
        Gated(width=160),  # not wider than what it reads
        Gated(bias=False),
    ],
    ids=lambda module: f"{type(module).__name__} {module.wide}",
)
def test_what_the_kernel_does_not_compute_is_left(module: Gated, gates_in_torch: list[tuple[int, ...]]) -> None:
    inputs = {"x": torch.randn(2, 16, module.wide.in_features)}
    found = rewritten(module, inputs, spec_of(quantised=Quantised.FP8))
    assert not gates_in_torch and found.eight_bits
    assert 1e-5 < distance(answer(found, module, inputs), module(**inputs)) < 0.1


@pytest.mark.usefixtures("small_layers_gain", "gates_in_torch")
def test_a_kernel_that_cannot_be_traced_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, gated.__name__.replace("gated", "geglu_rows"), None)
    module, inputs = Gated(), {"x": torch.randn(2, 16, 32)}
    found = rewritten(module, inputs, spec_of(quantised=Quantised.FP8))
    assert found.eight_bits == 2 and "is built without the fused GEGLU kernel" in caplog.text
    assert 1e-5 < distance(answer(found, module, inputs), module(**inputs)) < 0.1


def test_only_packages_have_kernels_of_ours() -> None:
    """Whoever reads a saved program back does not know them."""
    device = torch.device("cuda")
    for optimize in (Optimize.BALANCED, Optimize.MAX):
        assert package_options(device, optimize)[PACKAGED] is True
        assert PACKAGED not in fusion_options(device, optimize)
    assert gated.runs_on(device) and not gated.runs_on(CPU)


@pytest.mark.usefixtures("small_layers_gain")
def test_a_program_that_is_saved_has_no_kernel_of_ours(gates_in_torch: list[tuple[int, ...]]) -> None:
    spec = spec_of(quantised=Quantised.FP8)
    options = {**spec.backend.options, PACKAGED: False}
    rewritten(Gated(), {"x": torch.randn(2, 16, 32)}, replace(spec, backend=BackendConfig(spec.backend.name, options)))
    assert not gates_in_torch


def test_a_model_without_large_layers_says_so() -> None:
    with pytest.raises(UnsupportedModel, match="no linear layer that is faster in int8"):
        rewritten(Block(), inputs_of(), spec_of(100, quantised=Quantised.INT8))


def test_a_chip_without_such_arithmetic_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "Ada" in (why_not_on(torch.device("cuda"), Quantised.FP8) or "")
    assert why_not_on(torch.device("cuda"), Quantised.INT8) is None


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_quantised_rows_are_near_and_finite(kind: torch.dtype) -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    rows[1] = 0
    rows[2] *= 1e4
    rows[3] *= 1e-7
    source = rows.to(torch.float16) if kind == torch.int8 else rows
    small = DerivedWeight(("a",), Form.QUANTISED, kind).write(torch.empty(5, 64, dtype=kind), [source])
    scale = DerivedWeight(("a",), Form.SCALE, kind).write(torch.empty(5, 1), [source])
    back = small.float() * scale
    assert back.isfinite().all() and not back[1].any()
    for row in (0, 2, 4):
        assert distance(back[row], source[row].float()) < 0.04


@pytest.mark.parametrize(
    "sources",
    [
        [torch.zeros(2, 4), torch.zeros(3, 4)],
        [torch.zeros(2, 4), torch.zeros(2, 1)],
        [torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float16)],
    ],
)
def test_weights_that_do_not_fit_are_refused(sources: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="which the engine cannot use|do not have 4 rows together"):
        DerivedWeight(("a", "b")).write(torch.empty(4, 4), sources)


class Writes(nn.Module):
    """Writes into what would be joined, computed once or handed on as it is."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "activation":
            first = F.silu(x)
            first += 1
            return first + F.silu(x)
        if self.what == "input between layers":
            tokens = x.flatten(2).transpose(1, 2) * 1.0
            view = tokens.view(tokens.shape)
            first = self.one(view)
            tokens += 1
            return first + self.other(view)
        if self.what == "output of a layer":
            tokens = x.flatten(2).transpose(1, 2)
            first = self.one(tokens)
            first.view(-1)[:3] = 7.0
            return first + self.other(tokens)
        kept = (h := self.norm(x)).clone()
        h[:, :4] += 1
        return F.conv2d(kept + h * 2, torch.ones(8, 8, 1, 1))


@pytest.mark.parametrize("what", ["activation", "input between layers", "output of a layer", "copy"])
def test_what_is_written_in_between_is_left_alone(what: str) -> None:
    module = Writes(what)
    x = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(5))
    inputs = {"x": x.contiguous(memory_format=torch.channels_last)}
    found = rewritten(module, inputs, spec_of(100))
    assert distance(answer(found, module, inputs), module(**inputs)) < 1e-5


class LongRows(nn.Module):
    """A layer whose input does not lie row after row."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = {"whole": x[..., :64] * 1, "part": x[..., 64:], "turned": x[:, :64].transpose(1, 2)}
        return self.layer(rows[self.how])


@pytest.mark.usefixtures("small_layers_gain")
@pytest.mark.parametrize("quantised", list(Quantised))
@pytest.mark.parametrize("how", ["whole", "part", "turned"])
def test_long_rows_may_lie_anyhow(how: str, quantised: Quantised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "_LONG", 32)
    module, inputs = LongRows(how), {"x": torch.randn(1, 128, 128, generator=torch.Generator().manual_seed(6))}
    found = rewritten(module, inputs, spec_of(quantised=quantised))
    assert found.eight_bits == 1 and distance(answer(found, module, inputs), module(**inputs)) < 0.05


def test_layers_of_one_input_are_joined_only_where_they_stay_as_they_are(
    small_layers_gain: None,
) -> None:
    """Layers in eight bits come first: joined ones would be too alike to attention to gain."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(32, 144), nn.Linear(32, 144), nn.Linear(144, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    module, inputs = Gated(), {"x": torch.randn(2, 16, 32)}
    assert [
        rewritten(module, inputs, spec_of(percent, quantised=Quantised.FP8)).eight_bits for percent in (0, 100)
    ] == [3, 3]


@pytest.mark.parametrize(
    ("query", "key"),
    [((2, 2, 8, 320), (1, 2, 8, 320)), ((1, 2, 8, 320), (1, 1, 8, 320)), ((9, 8, 8, 320), (9, 8, 8, 320))],
)
def test_attention_that_shares_keys_or_has_many_heads_stays(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    inputs = {"q": torch.randn(query), "k": torch.randn(key), "v": torch.randn(key)}
    found = rewritten(WideAttention(), inputs, spec_of())
    assert count(found, aten.scaled_dot_product_attention.default) == 1


def test_a_graph_that_cannot_be_traced_again_is_compiled_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no such stride")

    module, inputs = Block(), inputs_of()
    monkeypatch.setattr(passes, "by_channel", fails)
    found = rewritten(module, inputs, spec_of(100))
    assert found.as_it_is == "RuntimeError: no such stride" and not found.derived
    assert count(found, aten.group_norm.default) == 1
    assert "is compiled without rewriting its graph: RuntimeError: no such stride" in caplog.text
    with pytest.raises(UnsupportedModel, match="no such stride"):
        rewritten(module, inputs, spec_of(100, quantised=Quantised.FP8))


def test_what_is_said_of_derived_weights_is_read_again() -> None:
    for weight in (
        DerivedWeight(("a", "b")),
        DerivedWeight(("a",), Form.SCALE, torch.int8),
        DerivedWeight((), Form.ONE),
    ):
        assert DerivedWeight.from_json(weight.to_json()) == weight


def test_copies_follow_their_sources_and_are_shared() -> None:
    """As engines hold them: a number that changes where it lies arrives, and two engines hold one copy."""
    first, second = torch.randn(2, 4), torch.randn(3, 4)
    weight, wanted = DerivedWeight(("a", "b")), TensorLayout((5, 4), (4, 1), torch.float32)
    one, other = LaidOutWeights(), LaidOutWeights()
    copy = one.made("derived_0", weight, [first, second], wanted, CPU)
    one.write({"a": first, "b": second})
    assert torch.equal(copy, torch.cat([first, second])) and one.bytes == copy.nbytes
    second += 1
    again = other.made("derived_0", weight, [first, second], wanted, CPU)
    other.write({"a": first, "b": second})
    assert again is copy and torch.equal(copy[2:], second) and one.bytes == other.bytes == copy.nbytes // 2
    moved = other.made("derived_0", weight, [first, second.clone()], wanted, CPU)
    assert moved is not copy and one.bytes == copy.nbytes
    quantised = replace(weight, form=Form.QUANTISED)
    small = other.made("derived_1", quantised, [first, second], replace(wanted, dtype=torch.float8_e4m3fn), CPU)
    other.write({"a": first, "b": second})
    assert small.dtype == torch.float8_e4m3fn and small[0].float().abs().max() == 448
    with pytest.raises(ValueError, match="do not have 5 rows"):
        other.made("derived_2", weight, [first, first], wanted, CPU)
    one.clear()
    other.clear()
    assert one.bytes == other.bytes == 0


def test_long_rows_are_read_whole_where_that_is_asked_for() -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    asked = replace(spec_of(), backend=BackendConfig("aotinductor", {ROWS_AT_ONCE: 4096}))
    with whole_rows(asked):
        inside = type(V.choices)
    assert issubclass(inside, InductorChoices) and inside is not InductorChoices
    assert type(V.choices) is InductorChoices
    with whole_rows(spec_of()):
        assert type(V.choices) is InductorChoices
