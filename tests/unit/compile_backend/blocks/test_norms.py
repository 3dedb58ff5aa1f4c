"""Group norm by rows of pixels."""

from __future__ import annotations

import pytest
import torch

from slipstream.compile_backend.blocks.norms import NormsByRows


@pytest.mark.parametrize("shape", [(2, 64, 8, 8), (1, 32, 5, 7), (3, 96, 16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=generator) + 3).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], generator=generator).to(dtype) for _ in range(2))
    wanted = torch.nn.functional.group_norm(x.double(), 32, weight.double(), bias.double(), 1e-6)
    with NormsByRows():
        found = torch.nn.functional.group_norm(x, 32, weight, bias, 1e-6)
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() / wanted.norm() < (1e-6 if dtype == torch.float32 else 1e-3)
