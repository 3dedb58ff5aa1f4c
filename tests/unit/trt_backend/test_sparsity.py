"""Which weights count as 2:4 sparse."""

from __future__ import annotations

import pytest
import torch

from slipstream.trt_backend.sparsity import is_2_4_sparse, sparse_share


def pruned(*shape: int) -> torch.Tensor:
    """Two of every four along axis 1 are 0."""
    weight = torch.rand(shape) + 0.5
    weight[:, 0::4] = 0
    weight[:, 3::4] = 0
    return weight


@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 3, 3), (1, 4)])
def test_two_zeros_in_every_four_inputs(shape: tuple[int, ...]) -> None:
    weight = pruned(*shape)
    assert is_2_4_sparse(weight)
    assert is_2_4_sparse(torch.zeros(shape)) and not is_2_4_sparse(torch.ones(shape))
    weight.view(-1)[0] = 1.0  # a third number in the first four
    assert not is_2_4_sparse(weight)


def test_zeros_along_another_axis_do_not_count() -> None:
    assert not is_2_4_sparse(pruned(16, 8).T)


@pytest.mark.parametrize("weight", [torch.zeros(16), torch.zeros(8, 6), torch.zeros(8, 8, dtype=torch.int64)])
def test_weights_that_never_are(weight: torch.Tensor) -> None:
    assert not is_2_4_sparse(weight)


def test_the_share_is_of_numbers() -> None:
    assert sparse_share([]) == 0.0 and sparse_share([torch.zeros(4)]) == 0.0
    assert sparse_share([pruned(8, 16), torch.ones(8, 48), torch.zeros(999)]) == 0.25
    assert sparse_share([pruned(8, 16)]) == 1.0
