"""Digests of tensors: they tell different numbers apart, and nothing else."""

from __future__ import annotations

import gc
import hashlib
import weakref
from typing import Any

import numpy
import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.engine_cache import digest_tensors


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


def odd_numbers(count: int) -> list[int]:
    """SplitMix64 in Python's own numbers."""
    found = []
    for state in range(1, count + 1):
        mixed = state * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        found.append((mixed ^ mixed >> 31) | 1)
    return found


@pytest.mark.parametrize("shape", [(2, 3), (1024, 2), (1023, 17), (3, 1024, 1500)])
def test_it_is_the_documented_digest(shape: tuple[int, ...]) -> None:
    tensor = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    raw = tensor.numpy().tobytes()
    whole = len(raw) // 4096 * 4096
    words = numpy.frombuffer(raw[:whole], dtype=numpy.int32).reshape(-1, 1024)
    factors = numpy.array(odd_numbers(len(words)), dtype=numpy.uint64)[:, None]
    sums = (words.astype(numpy.uint64) * factors).sum(0, dtype=numpy.uint64).tobytes() if whole else b""
    row = f'[["w","torch.int16",[{",".join(map(str, shape))}]]]'
    assert digest_tensors({"w": tensor}) == hashlib.sha256(row.encode() + sums + raw[whole:]).hexdigest()


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


def test_equal_numbers_in_other_tensors() -> None:
    assert digest_tensors(model().state_dict()) == digest_tensors(model().state_dict())
    assert digest_tensors(model(1).state_dict()) != digest_tensors(model().state_dict())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "way", ["in place", "data", "one element", "one bit", "swap rows", "swap far rows", "replace", "last element"]
)
def test_a_changed_tensor_is_seen(way: str, inference: bool) -> None:
    """Also in inference mode, in which ComfyUI loads models and where tensors count no changes."""
    with torch.inference_mode(inference), torch.no_grad():
        net = torch.nn.Linear(2048, 2100).half()
        before = digest_tensors(net.state_dict())
        weight = net.weight
        if way == "in place":
            weight.mul_(2)
        elif way == "data":
            weight.data += 1
        elif way == "one element":
            weight.data[17, 5] += 1
        elif way == "one bit":
            weight.data.view(torch.int16)[1700, 5] ^= -(2**15)
        elif way == "last element":
            weight.data[-1, -1] += 1
        elif way == "swap rows":
            weight.data[[0, 2]] = weight.data[[2, 0]]
        elif way == "swap far rows":  # as far apart as words that are multiplied by the same number could be
            weight.data[[0, 2048]] = weight.data[[2048, 0]]
        else:
            net.weight = torch.nn.Parameter(weight + 1)
        assert digest_tensors(net.state_dict()) != before


def test_what_balances_in_a_plain_sum_is_seen() -> None:
    words = torch.zeros(8, 1024, dtype=torch.int32)
    found = {digest_tensors({"w": words})}
    for rows in ([0, 1], [3, 2], [7, 0]):
        moved = words.clone()
        moved[rows[0], 9], moved[rows[1], 9] = 2**20, -(2**20)
        found.add(digest_tensors({"w": moved}))
    assert len(found) == 4


def test_signs_of_numbers_beside_each_other() -> None:
    """They are the highest bits of words, so a product modulo 2^64 leaves the fewest of them."""
    tensor = torch.zeros(4096, 2, dtype=torch.float16)
    found = set()
    for one in range(0, 4096, 128):
        for other in range(one + 128, 4096, 128):
            changed = tensor.clone()
            changed[[one, other], 1] = -0.0
            found.add(digest_tensors({"w": changed}))
    assert len(found) == 32 * 31 / 2


def test_parameters_that_need_gradients() -> None:
    tensor = torch.randn(10, requires_grad=True)
    assert digest_tensors({"w": tensor}) == digest_tensors({"w": tensor.detach()})


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


def test_nothing_of_a_model_is_kept() -> None:
    tensor = torch.randn(3000, 1000)
    storage = weakref.ref(tensor.untyped_storage())
    digest_tensors({"w": tensor})
    del tensor
    gc.collect()
    assert storage() is None


@pytest.mark.gpu
def test_a_gpu_gives_the_same_digest() -> None:
    net = model().half()
    net.append(torch.nn.Linear(3000, 2100))
    plain = digest_tensors(net.state_dict())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.cuda()
    assert digest_tensors(net.state_dict()) == plain
    some_moved = {**net.state_dict(), "1.weight": before["1.weight"]}
    assert digest_tensors(some_moved) == plain, "on two devices"
    assert digest_tensors(net.to(memory_format=torch.channels_last).state_dict()) == plain
    net[1].weight.data[0, 0] += 1
    assert digest_tensors(net.state_dict()) != plain
