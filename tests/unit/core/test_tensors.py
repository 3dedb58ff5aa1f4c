"""Names of dtypes, and models without numbers."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.dtypes import dtype_name, dtype_named, dtype_of, precision_of
from slipstream.core.errors import UnsupportedModel
from slipstream.core.placeholder import placeholder_of
from slipstream.core.spec import Precision


def test_precisions_and_dtypes_are_one_to_one() -> None:
    assert {precision_of(dtype_of(precision)) for precision in Precision} == set(Precision)
    with pytest.raises(UnsupportedModel, match="float64"):
        precision_of(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_names_of_dtypes(dtype: torch.dtype) -> None:
    assert dtype_named(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float17", "nn", "Tensor", ""])
def test_what_is_no_dtype(name: str) -> None:
    with pytest.raises(ValueError, match="not a torch dtype"):
        dtype_named(name)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
        self.norm = torch.nn.BatchNorm1d(64)
        self.register_buffer("steps", torch.arange(7))


def test_a_hollow_model_has_every_shape_and_little_memory() -> None:
    real, bare = Net().half(), placeholder_of(Net, torch.float16, torch.device("cpu"))
    expected = {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in real.state_dict().items()}
    found = {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in bare.state_dict().items()}
    assert found == expected
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in bare.state_dict().values()}
    assert sum(storage.nbytes() for storage in storages.values()) < 3 * 64 * 64 * 2
    assert not bare.training and not any(parameter.requires_grad for parameter in bare.parameters())


def test_no_two_tensors_of_a_hollow_model_begin_at_one_address() -> None:
    tensors = list(placeholder_of(Net, torch.float32, torch.device("cpu")).state_dict().values())
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert placeholder_of(Net, torch.float32, torch.device("cpu")).layers(torch.ones(2, 64)).shape == (2, 64)
