"""Digests of tensors: they tell different numbers apart, and nothing else."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.engine_cache import digest_tensors, weights


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the tensors that were really hashed."""
    sizes: list[int] = []
    original = weights._on_cpu

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(weights, "_on_cpu", count)
    yield sizes


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(8, 64, 3), torch.nn.Linear(300, 200), torch.nn.BatchNorm2d(4))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 3, 4, 5), (1021, 9)])
def test_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape).to(dtype)
    first = digest_tensors({"w": zeros})
    assert first == digest_tensors({"w": torch.zeros(shape).to(dtype)})
    if zeros.numel():
        changed = zeros.clone()
        changed.view(-1)[-1:] = torch.ones(1).to(dtype)
        assert digest_tensors({"w": changed}) != first


def test_names_dtypes_and_shapes_count_and_order_does_not() -> None:
    a, b = torch.ones(4), torch.zeros(4)
    digests = {
        digest_tensors({"a": a, "b": b}),
        digest_tensors({"a": b, "b": a}),
        digest_tensors({"a": a, "c": b}),
        digest_tensors({"a": a}),
        digest_tensors({"a": a.reshape(2, 2), "b": b}),
        digest_tensors({"a": a.view(torch.int32), "b": b}),
        digest_tensors({}),
    }
    assert len(digests) == 7
    assert digest_tensors({"b": b, "a": a}) == digest_tensors({"a": a, "b": b})


def test_it_is_the_documented_digest() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    content = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    row = f'[["w","torch.int16",[2,3],"{content}"]]'
    assert digest_tensors({"w": tensor}) == hashlib.sha256(row.encode()).hexdigest()


def test_strides_do_not_count() -> None:
    image = torch.randn(2, 8, 5, 7)
    plain = digest_tensors({"w": image})
    assert digest_tensors({"w": image.to(memory_format=torch.channels_last)}) == plain
    assert digest_tensors({"w": torch.cat([image, image])[2:]}) == plain
    assert digest_tensors({"w": image.transpose(1, 3).contiguous().transpose(1, 3)}) == plain
    assert digest_tensors({"w": torch.zeros(1).expand(5)}) == digest_tensors({"w": torch.zeros(5)})
    wide = torch.randn(6, 10)
    assert digest_tensors({"w": wide[:, ::2]}) == digest_tensors({"w": wide[:, ::2].contiguous()})


def test_views_at_odd_places_of_one_buffer() -> None:
    """As safetensors hands them out: slices of one storage, aligned to their own dtype at best."""
    buffer = torch.randn(40_001).to(torch.float16)
    for start in (0, 1, 2, 3, 4):
        view = buffer[start : start + 20_000]
        assert digest_tensors({"w": view}) == digest_tensors({"w": view.clone()})


def test_unchanged_tensors_are_hashed_once(hashed: list[int]) -> None:
    net = model()
    first = digest_tensors(net.state_dict())
    count = len(hashed)
    assert count == len(net.state_dict())
    assert digest_tensors(net.state_dict()) == first
    assert len(hashed) == count
    assert digest_tensors(model().state_dict()) == first, "equal numbers in other tensors"


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("way", ["in place", "data", "one element", "swap rows", "replace", "last element"])
def test_a_changed_tensor_is_hashed_again(hashed: list[int], way: str, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        net = torch.nn.Linear(2048, 64).half()
        before = digest_tensors(net.state_dict())
        weight = net.weight
        if way == "in place":
            weight.mul_(2)
        elif way == "data":
            weight.data += 1
        elif way == "one element":
            weight.data[17, 5] += 1
        elif way == "last element":
            weight.data[-1, -1] += 1
        elif way == "swap rows":
            weight.data[[0, 2]] = weight.data[[2, 0]]
        else:
            net.weight = torch.nn.Parameter(weight + 1)
        expected = hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest()
        hashed.clear()
        assert digest_tensors(net.state_dict()) != before
        assert hashed == [2048 * 64], "the bias did not change"
        assert weights._content("weight", net.weight) == expected


def test_inference_tensors_are_remembered_too(hashed: list[int]) -> None:
    """ComfyUI loads models in inference mode, where tensors have no version."""
    with torch.inference_mode():
        tensor = torch.randn(5000)
        first = digest_tensors({"w": tensor})
    assert digest_tensors({"w": tensor}) == first
    assert hashed == [5000]


def test_parameters_that_need_gradients() -> None:
    tensor = torch.randn(10, requires_grad=True)
    assert digest_tensors({"w": tensor}) == digest_tensors({"w": tensor.detach()})


def test_what_is_gone_is_forgotten() -> None:
    gc.collect()
    before = len(weights._memory)
    net = model()
    digest_tensors(net.state_dict())
    assert len(weights._memory) > before
    del net
    gc.collect()
    assert len(weights._memory) == before


def test_a_new_tensor_at_an_old_address_is_not_the_old_one() -> None:
    for step in range(50):
        tensor = torch.full((1000,), float(step))
        assert digest_tensors({"w": tensor}) == digest_tensors({"w": tensor.clone()})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        pytest.param(lambda: fake(), id="fake"),
    ],
)
def test_tensors_without_bytes_are_refused_by_name(tensor: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"blocks\.3\.weight"):
        digest_tensors({"blocks.3.weight": tensor() if callable(tensor) else tensor})


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


def test_device_copies_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Non-contiguous tensors take the same path as those of a GPU."""
    original = weights._bytes_of
    inside: list[int] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if weights._copying.locked():
            inside.append(1)
        return original(tensor)

    monkeypatch.setattr(weights, "_bytes_of", watch)
    digest_tensors({str(number): torch.randn(64, 65)[:, 1:] for number in range(8)})
    assert len(inside) >= 8


@pytest.mark.gpu
def test_a_gpu_gives_the_same_digest(hashed: list[int]) -> None:
    net = model().half()
    plain = digest_tensors(net.state_dict())
    net.cuda()
    assert digest_tensors(net.state_dict()) == plain
    count = len(hashed)
    assert digest_tensors(net.state_dict()) == plain and len(hashed) == count
    net[1].weight.data[0, 0] += 1
    assert digest_tensors(net.state_dict()) != plain and len(hashed) == count + 1
    assert digest_tensors(net.to(memory_format=torch.channels_last).state_dict()) != plain
