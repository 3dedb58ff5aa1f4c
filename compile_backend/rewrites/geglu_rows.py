# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""A Triton kernel for GEGLU with row-wise fp8 output: reduces memory traffic and compute.

A row has to be complete before its first element can be quantised. A compiler that works with powers of two either
pads rows of 5120 to 8192 and computes an activation for the padding, or writes the row to memory and reads it again.
Here a row is held as two powers of two, 4096 and 1024, is read once and is written once.

Needs Triton, so this module is imported where code for CUDA is compiled and nowhere else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from ...core.eight_bits import FP8, LARGEST
from .row_parts import LONGEST, parts_of

_LARGEST = tl.constexpr(LARGEST[FP8])
_WARPS = {4096: 4, 6144: 2, LONGEST: 8}
"""By the longest row: few wait for each other less, as measured on Hopper, but have room for less."""


@triton_op("slipstream::geglu_rows", mutates_args={})
def geglu_rows(y: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x * gelu(gate)` with `x, gate = (y + bias).chunk(2, -1)`, in fp8.

    Args:
        y: contiguous [samples, 2 * columns], of any floating type; `columns` as `parts_of` has it.
        bias: [2 * columns].

    Returns:
        float8_e4m3fn [samples, columns], and the scale of each row, float32 [samples, 1].
    """
    samples, columns = y.shape[0], y.shape[1] // 2
    small = torch.empty(samples, columns, dtype=FP8, device=y.device)
    scale = torch.empty(samples, 1, dtype=torch.float32, device=y.device)
    parts = parts_of(columns)
    if not y.is_contiguous():
        raise ValueError("The rows of y have to lie one behind the other")
    if parts is None:
        raise ValueError(f"Rows of {columns} are no sum of two powers of two up to {LONGEST}")
    warps = next(count for longest, count in _WARPS.items() if columns <= longest)
    wrap_triton(rows_kernel)[(samples,)](y, bias, small, scale, columns, *parts, num_warps=warps)
    return small, scale


@triton.jit
def rows_kernel(y, bias, small, scale, columns: tl.constexpr, most: tl.constexpr, rest: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    y += row * 2 * columns
    small += row * columns
    first = _geglu(y, bias, columns, 0, most)
    largest = tl.max(tl.abs(first), 0)
    if rest > 0:
        second = _geglu(y, bias, columns, most, rest)
        largest = tl.maximum(largest, tl.max(tl.abs(second), 0))
    by = tl.maximum(largest * (1 / _LARGEST), 1e-12)
    tl.store(scale + row, by)
    inverse = 1.0 / by
    tl.store(small + tl.arange(0, most), (first * inverse).to(small.dtype.element_ty))
    if rest > 0:
        tl.store(small + most + tl.arange(0, rest), (second * inverse).to(small.dtype.element_ty))


@triton.jit
def _geglu(y, bias, columns: tl.constexpr, start: tl.constexpr, many: tl.constexpr):
    at = start + tl.arange(0, many)
    x = tl.load(y + at).to(tl.float32) + tl.load(bias + at).to(tl.float32)
    gate = tl.load(y + columns + at).to(tl.float32) + tl.load(bias + columns + at).to(tl.float32)
    return x * gate * _normal_cdf(gate)


@triton.jit
def _normal_cdf(x):
    """Off by 3e-7 in fp32 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26): half the instructions of
    the library's erf, of which the time of a GEGLU consists."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    sums = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * sums * tl.exp(-z * z)
    return tl.where(x < 0, tail, 1.0 - tail)
