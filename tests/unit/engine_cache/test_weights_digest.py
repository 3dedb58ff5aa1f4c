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
from slipstream.engine_cache import digest_tensors, weights_digest


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_change_of_a_whole_channel_is_seen(dtype: torch.dtype) -> None:
    """What is the highest bits of many words, and so would be lost first where sums overflow."""
    torch.manual_seed(0)
    weight = torch.randn(640, 1280).to(dtype)
    found = {digest_tensors({"w": weight})}
    for channel in range(8):
        for factor in (-1, 2, 4):
            changed = weight.clone()
            changed[:, channel] *= factor
            found.add(digest_tensors({"w": changed}))
    found |= {digest_tensors({"w": -weight}), digest_tensors({"w": weight.flip(0)}), digest_tensors({"w": 2 * weight})}
    assert len(found) == 1 + 8 * 3 + 3


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
        pytest.param(lambda: given_back(torch.ones(20)), id="given back"),
        pytest.param(lambda: given_back(torch.ones(20_000)), id="much given back"),
        pytest.param(lambda: given_back(torch.ones(6, 6).t()), id="transposed and given back"),
        pytest.param(lambda: given_back(torch.ones(99, 99)[1:, ::2]), id="part given back"),
        pytest.param(lambda: torch.nn.UninitializedParameter(), id="not yet there"),
    ],
)
def test_tensors_without_bytes_are_refused_by_name(tensor: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"blocks\.3\.weight"):
        digest_tensors({"blocks.3.weight": tensor() if callable(tensor) else tensor})


def given_back(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


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


def test_words_begin_where_processors_may_read_them() -> None:
    odd = torch.from_numpy(numpy.zeros(20_001, dtype=numpy.uint8)[1:])
    assert odd.data_ptr() % 4
    assert weights_digest._bytes_of(odd).data_ptr() % 4 == 0
    assert digest_tensors({"w": odd}) == digest_tensors({"w": torch.zeros(20_000, dtype=torch.uint8)})


class Lying(torch.Tensor):
    """As those of formats that torch does not know: bytes that say they have the weight's shape."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([7, 7])


@pytest.mark.parametrize("size", [50, 50_000])
def test_tensors_of_other_classes(size: int) -> None:
    numbers = torch.randint(0, 255, (size,), dtype=torch.uint8)
    first = digest_tensors({"w": numbers.as_subclass(Lying)})
    assert first == digest_tensors({"w": numbers.clone().as_subclass(Lying)})
    numbers[size // 2] ^= 1
    assert digest_tensors({"w": numbers.as_subclass(Lying)}) != first


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(tensors: list[torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate much")

    monkeypatch.setattr(torch, "cat", short)
    with pytest.raises(UnsupportedModel, match="tried to allocate much. Free some"):
        digest_tensors({"w": torch.zeros(3)})


def test_a_device_without_room_for_the_sums_leaves_them_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, tried, sums = torch.randn(3000, 100), [], weights_digest._sums_of_columns

    def short_at_first(words: torch.Tensor) -> torch.Tensor:
        tried.append(words)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("tried to allocate much")
        return sums(words)

    plain = digest_tensors({"w": tensor})
    monkeypatch.setattr(weights_digest, "_sums_of_columns", short_at_first)
    assert digest_tensors({"w": tensor}, torch.device("cpu")) == plain and len(tried) == 2


@pytest.mark.gpu
def test_a_gpu_gives_the_same_digest() -> None:
    net = model().half()
    net.append(torch.nn.Linear(3000, 2100))
    plain = digest_tensors(net.state_dict())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert digest_tensors(before, torch.device("cuda")) == plain
    net.cuda()
    assert digest_tensors(net.state_dict()) == plain
    some_moved = {**net.state_dict(), "1.weight": before["1.weight"]}
    assert digest_tensors(some_moved) == plain, "on two devices"
    assert digest_tensors(net.to(memory_format=torch.channels_last).state_dict()) == plain
    net[1].weight.data[0, 0] += 1
    assert digest_tensors(net.state_dict()) != plain
