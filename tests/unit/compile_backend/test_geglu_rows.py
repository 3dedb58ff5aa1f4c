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

from slipstream.compile_backend.derived import FP8, quantised, scale_of_rows
from slipstream.compile_backend.rewrites import gated

MAIN = Path(__file__).resolve().parents[3] / "__main__.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def in_torch(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x, gate = (y.float() + bias.float()).chunk(2, -1)
    return x * F.gelu(gate)


def inputs(columns: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """With a row of zeros, one of large and one of small numbers, and both of GELU's tails."""
    generator = torch.Generator().manual_seed(columns)
    y = torch.randn(37, 2 * columns, generator=generator)
    y[1] = 0
    y[2] *= 1e3
    y[3] *= 1e-3
    bias = torch.randn(2 * columns, generator=generator)
    return y.to(device, torch.bfloat16), bias.to(device, torch.float16)


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(5120, (4096, 1024)), (2560, (2048, 512)), (4096, (4096, 0)), (5376, None), (20480, None)],
)
def test_rows_that_are_two_powers_of_two_are_held(columns: int, parts: tuple[int, int] | None) -> None:
    assert gated.parts_of(columns) == parts


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [640, 1024, 2560, 5120])
def test_rows_are_those_of_torch(columns: int) -> None:
    from slipstream.compile_backend.rewrites.geglu_rows import geglu_rows

    y, bias = inputs(columns, "cuda")
    small, scale = geglu_rows(y, bias)
    wanted = in_torch(y, bias)
    expected = scale_of_rows(wanted, FP8)
    assert small.dtype == FP8 and small.shape == (37, columns) and scale.shape == (37, 1)
    torch.testing.assert_close(scale, expected, rtol=1e-5, atol=1e-12)
    # Of numbers between two of eight bits, a few come out as the other one.
    other = small.float() != quantised(wanted, expected, FP8).float()
    assert other.float().mean() < 1e-3
    assert ((small.float() * scale - wanted).abs() <= wanted.abs() / 16 + expected / 512 + 1e-12).all()


@needs_triton
def test_its_arithmetic_is_that_of_torch() -> None:
    """The interpreter's own eight bits are wrong where rounding carries, so it gives out float32 here."""
    code = (
        "import torch\n"
        "from slipstream.compile_backend.rewrites.geglu_rows import rows_kernel\n"
        "from slipstream.tests.unit.compile_backend.test_geglu_rows import in_torch, inputs\n"
        "y, bias = inputs(640)\n"
        "rows, scale = torch.empty(37, 640), torch.empty(37, 1)\n"
        "rows_kernel[(37,)](y, bias, rows, scale, 640, 512, 128)\n"
        "wanted = in_torch(y, bias)\n"
        "torch.testing.assert_close(rows * scale, wanted, rtol=2e-5, atol=2e-6)\n"
        "assert rows.abs().max() <= 448.001 and (rows[1] * scale[1] - wanted[1]).abs().max() < 1e-6\n"
    )
    start = f"import runpy; runpy.run_path({str(MAIN)!r}, run_name='slipstream_main')['register']()\n"
    subprocess.run([sys.executable, "-c", start + code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
