"""Bytes of GGUF files, read as ggml's own package for Python reads them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from slipstream.compile_backend.blocks.ggml_types import TYPES

ROWS, COLUMNS = 8, 512
SCALES = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
"""Where numbers in fp16 begin in a block; at its first byte in the other types."""


def stored(name: str) -> Any:
    """Random bytes, whose scales are near 0.01."""
    random, kind = np.random.default_rng(1), TYPES[name]
    found = random.integers(0, 256, (ROWS, COLUMNS // kind.block_size, kind.type_size), dtype=np.uint8)
    for place in SCALES.get(name, (0,)):
        scale = random.uniform(-0.01, 0.01, (*found.shape[:2], 1)).astype(np.float16)
        found[:, :, place : place + 2] = scale.view(np.uint8)
    return found.reshape(ROWS, -1)


@pytest.mark.parametrize(
    ("name", "is_compiled"), [*((name, False) for name in TYPES), ("Q8_0", True), ("Q5_0", True), ("Q4_K", True)]
)
def test_numbers_are_those_that_ggml_reads(name: str, is_compiled: bool) -> None:
    kind = gguf.GGMLQuantizationType[name]
    assert (TYPES[name].block_size, TYPES[name].type_size) == gguf.GGML_QUANT_SIZES[kind]
    given = stored(name)
    assert given.shape == TYPES[name].stored_shape((ROWS, COLUMNS))
    read = torch.compile(TYPES[name].dequantised) if is_compiled else TYPES[name].dequantised
    found = read(torch.from_numpy(given), torch.float32).numpy()
    wanted = gguf.quants.dequantize(given, kind)
    assert found.shape == wanted.shape == (ROWS, COLUMNS)
    assert np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max()  # products are rounded to fp16


@pytest.mark.parametrize("shape", [(4, 100), (64,), (4, 32, 3, 3)])
def test_what_cannot_be_stored_so_is_told(shape: tuple[int, ...]) -> None:
    assert TYPES["Q8_0"].stored_shape(shape) is None
