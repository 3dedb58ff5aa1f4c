"""Equal bytes have equal fingerprints, and nothing else has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.trt_backend.fingerprint import fingerprints

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int64)
BOUNDARY = 8 * 4096
SIZES = sorted(
    {BOUNDARY * times + more for times in (0, 1, 2, 3) for more in (-9, -8, -7, -1, 0, 1, 4, 7, 8, 9)}
    - set(range(-9, 1))
)
"""In bytes, around those at which another row begins."""


def of(tensor: torch.Tensor) -> int:
    (found,) = fingerprints([tensor])
    return found


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes, as numbers of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def flipped(tensor: torch.Tensor, *bits: int) -> torch.Tensor:
    raw = tensor.clone().view(torch.uint8)
    for bit in bits:
        raw[bit // 8] ^= 1 << bit % 8
    return raw.view(tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 320, 4095, 4096, 4097, 16384, 16385, 100_003])
def test_equal_bytes_have_equal_numbers(dtype: torch.dtype, count: int) -> None:
    assert of(drawn(count, dtype)) == of(drawn(count, dtype))
    assert of(drawn(count, dtype)) != of(drawn(count, dtype, seed=1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_every_single_bit_counts(size: int, kind: str) -> None:
    tensor = drawn(size, torch.uint8) if kind == "random" else torch.zeros(size, dtype=torch.uint8)
    bits = {bit for end in (0, size // 2, max(0, size - 16)) for bit in range(8 * end, min(8 * end + 128, 8 * size))}
    bits |= set(torch.randint(0, 8 * size, (64,), generator=torch.Generator().manual_seed(size)).tolist())
    found = [of(flipped(tensor, bit)) for bit in sorted(bits)]
    assert len({of(tensor), *found}) == len(bits) + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_of_a_small_weight_counts(dtype: torch.dtype) -> None:
    tensor = drawn(11, dtype)
    found = [of(flipped(tensor, bit)) for bit in range(8 * tensor.nbytes)]
    assert len({of(tensor), *found}) == 8 * tensor.nbytes + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [64, 40_000])
def test_two_signs_do_not_cancel_out(dtype: torch.dtype, count: int) -> None:
    tensor = torch.linspace(1, 2, count).to(dtype)
    pairs = [(first, second) for first in range(8) for second in range(first + 1, 16)] + [
        (5, count - 3),
        (7, count - 1),
    ]
    found = set()
    for pair in pairs:
        other = tensor.clone()
        other[list(pair)] *= -1
        found.add(of(other))
    assert len(found | {of(tensor)}) == len(pairs) + 1


@pytest.mark.parametrize("factor", [-1.0, 0.5, 2.0, 4.0])
def test_two_values_times_a_power_of_two(factor: float) -> None:
    tensor = torch.linspace(1, 2, 320).half()
    found = set()
    for first in range(0, 32):
        for second in range(first + 1, 32):
            other = tensor.clone()
            other[[first, second]] *= factor
            found.add(of(other))
    assert len(found | {of(tensor)}) == 32 * 31 // 2 + 1


def test_swapped_rows_and_values() -> None:
    weight = drawn(64 * 4096, torch.float16).view(64, 4096)  # each row of it several of the hash's
    swapped = weight.clone()
    swapped[[0, 63]] = weight[[63, 0]]
    values = weight.clone()
    values.view(-1)[[10, 11]] = weight.view(-1)[[11, 10]]
    assert len({of(weight), of(swapped), of(values), of(weight.flip(0))}) == 4
    assert of(torch.arange(40_000)) != of(torch.arange(40_000).flip(0))
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0])
    assert of(signs) != of(signs.flip(0).roll(2))


def test_views_count_by_their_values() -> None:
    weight = drawn(64 * 96, torch.float16).view(64, 96)
    assert of(weight.T) == of(weight.T.contiguous()) != of(weight)
    assert of(weight[:, 1:]) == of(weight[:, 1:].clone())
    assert of(weight.to(memory_format=torch.contiguous_format)[::2]) == of(weight[::2].clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", range(1, 8))
def test_parts_of_a_larger_tensor(dtype: torch.dtype, start: int) -> None:
    """Fused projections are cut up, and files are mapped as one piece."""
    whole = drawn(1001, dtype)
    assert of(whole[start:]) == of(whole[start:].clone())


def test_odd_shapes() -> None:
    assert of(torch.tensor(2.5)) == of(torch.tensor([2.5])) != of(torch.tensor(2.0))
    assert fingerprints([]) == [] and fingerprints([torch.zeros(0)]) == fingerprints([torch.zeros(0)])
    assert of(torch.tensor([True, False])) != of(torch.tensor([False, True]))
    assert of(torch.nn.Parameter(torch.ones(3))) == of(torch.ones(3))


def test_several_at_once_keep_their_order() -> None:
    tensors = [drawn(count, dtype, count) for count in (5, 1000, 40_000) for dtype in DTYPES]
    assert fingerprints(tensors) == [of(tensor) for tensor in tensors]


def test_in_inference_mode_too() -> None:
    tensor = drawn(70_000, torch.float16)
    with torch.inference_mode():
        inside = of(tensor)
    assert of(tensor) == inside


def test_the_same_in_every_process() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import conftest, torch\n"
        "from slipstream.trt_backend.fingerprint import fingerprints\n"
        "torch.manual_seed(7)\n"
        "print(*fingerprints([torch.arange(n) for n in (3, 4096, 70_000, 1_000_000)]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    here = fingerprints([torch.arange(count) for count in (3, 4096, 70_000, 1_000_000)])
    assert [int(number) for number in found.stdout.split()] == here


def test_megabytes() -> None:
    weight = drawn(2_500_000, torch.float16)
    before = of(weight)
    for bit in (0, 8 * 1_234_567 + 7, 8 * weight.nbytes - 1):
        assert of(flipped(weight, bit)) != before
    weight.view(torch.int16)[1_999_999] += 1
    assert of(weight) != before
