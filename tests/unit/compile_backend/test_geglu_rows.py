"""Our kernel for GEGLU computes what torch does; on a GPU, and its arithmetic by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from slipstream.compile_backend.rewrites import rewrite, row_parts
from slipstream.core.eight_bits import FP8, quantised, scale_of_rows
from slipstream.core.spec import Quantised
from slipstream.tests.tensors import distance
from slipstream.tests.unit.compile_backend.test_rewrites import Gated, spec_of, with_weights

MAIN = Path(__file__).resolve().parents[3] / "__main__.py"
NUMBERS = torch.tensor([row for row in range(37) if row not in (4, 5)])
"""Rows without NaN and Inf."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def in_torch(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x, gate = (y.float() + bias.float()).chunk(2, -1)
    return x * F.gelu(gate)


def inputs(columns: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """With a row that comes to zeros, large and small numbers, NaN and Inf, and both of GELU's tails."""
    generator = torch.Generator().manual_seed(columns)
    y = torch.randn(37, 2 * columns, generator=generator)
    bias = torch.randn(2 * columns, generator=generator).bfloat16()
    y[1] = -bias.float()
    y[2] *= 1e3
    y[3] *= 1e-3
    y[4, 0], y[5, 1] = float("nan"), float("inf")
    return y.to(device, torch.bfloat16), bias.to(device, torch.float16)


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(5120, (4096, 1024)), (2560, (2048, 512)), (4096, (4096, 0)), (5376, None), (20480, None)],
)
def test_rows_that_are_two_powers_of_two_are_held(columns: int, parts: tuple[int, int] | None) -> None:
    assert row_parts.parts_of(columns) == parts


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [640, 1024, 2560, 5120, 6144, 8192, 12288])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_torch(columns: int, dtype: torch.dtype) -> None:
    from slipstream.compile_backend.rewrites.geglu_rows import geglu_rows

    y, bias = inputs(columns, "cuda")
    small, scale = geglu_rows(y.to(dtype), bias)
    wanted = in_torch(y, bias)
    expected = scale_of_rows(wanted, FP8)
    assert small.dtype == FP8 and small.shape == (37, columns) and scale.shape == (37, 1)
    rows = NUMBERS.to("cuda")
    assert not small[1].float().any()
    torch.testing.assert_close(scale[rows], expected[rows], rtol=1e-5, atol=1e-12)
    # Of numbers between two of eight bits, a few come out as the other one.
    other = small.float() != quantised(wanted, expected, FP8).float()
    assert other[rows].float().mean() < 1e-3
    near = (small.float() * scale - wanted).abs() <= wanted.abs() / 16 + expected / 512 + 1e-12
    assert near[rows].all()
    assert not (small.float() * scale)[4:6].isfinite().all(-1).any(), "NaN and Inf must not be lost"


@pytest.mark.gpu
def test_rows_that_the_kernel_would_misread_are_refused() -> None:
    from slipstream.compile_backend.rewrites.geglu_rows import geglu_rows

    y, bias = inputs(640, "cuda")
    with pytest.raises(ValueError, match="one behind the other"):
        geglu_rows(y.t().contiguous().t(), bias)
    with pytest.raises(ValueError, match="no sum of two powers"):
        geglu_rows(y[:, :1200].contiguous(), bias)


@pytest.mark.gpu
def test_a_compiled_program_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines are made: exported, written anew, and compiled ahead of time."""
    for name, value in (("LEAST_COLUMNS", 16), ("LEAST_PRODUCT", 1)):
        monkeypatch.setattr(f"slipstream.core.eight_bits.{name}", value)
    device = torch.device("cuda", 0)
    module = Gated().to(device, torch.float16).eval()
    example = {"x": torch.randn(2, 16, 32, device=device, dtype=torch.float16)}
    with torch.no_grad():
        program = torch.export.export(module, (), example, strict=False)
        found = rewrite(program, spec_of(quantised=Quantised.FP8), example, device)
        assert any(node.target is torch.ops.slipstream.geglu_rows.default for node in found.program.graph.nodes)
        error = distance(torch.compile(with_weights(found, module))(**example), module(**example))
    assert 1e-5 < error < 0.1


@needs_triton
def test_its_arithmetic_is_that_of_torch() -> None:
    """The interpreter's own eight bits are wrong where rounding carries, so it gives out float32 here."""
    code = (
        "import torch\n"
        "from slipstream.compile_backend.rewrites.geglu_rows import rows_kernel\n"
        "from slipstream.tests.unit.compile_backend.test_geglu_rows import NUMBERS, in_torch, inputs\n"
        "y, bias = inputs(640)\n"
        "rows, scale = torch.empty(37, 640), torch.empty(37, 1)\n"
        "rows_kernel[(37,)](y, bias, rows, scale, 640, 512, 128)\n"
        "wanted = in_torch(y, bias)\n"
        "torch.testing.assert_close((rows * scale)[NUMBERS], wanted[NUMBERS], rtol=2e-5, atol=2e-6)\n"
        "assert rows[NUMBERS].abs().max() <= 448.001\n"
        "assert not rows[1].any() and scale[1] > 0\n"
        "assert not (rows * scale)[4:6].isfinite().all(-1).any()\n"
    )
    start = f"import runpy; runpy.run_path({str(MAIN)!r}, run_name='slipstream_main')['register']()\n"
    subprocess.run([sys.executable, "-c", start + code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
