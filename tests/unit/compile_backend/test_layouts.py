"""Weights in the layout that kernels want: one copy for all engines, right whatever happens to the host's."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from slipstream.compile_backend import layouts
from slipstream.compile_backend.layouts import LaidOutWeights, TensorLayout, use_channels_last
from slipstream.core.placeholder import placeholder_of

CPU = torch.device("cpu")


def weight(value: float = 0.0) -> torch.Tensor:
    return torch.arange(2 * 3 * 3 * 3).float().view(2, 3, 3, 3) + value


WANTED = TensorLayout.of(weight().to(memory_format=torch.channels_last))


def filled(weights: LaidOutWeights, host: torch.Tensor) -> torch.Tensor:
    found = weights.of("w", host, WANTED)
    weights.write({"w": host})
    return found


def test_a_skeleton_in_channels_last_takes_no_memory_and_keeps_its_shapes() -> None:
    module = placeholder_of(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(16, 4)), torch.float16, CPU)
    before = {name: tensor.shape for name, tensor in module.state_dict().items()}
    storage = module[0].weight.untyped_storage().data_ptr()
    use_channels_last(module)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last) and module[1].weight.is_contiguous()
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == before
    assert module[0].weight.untyped_storage().data_ptr() == storage


def test_a_copy_stays_where_it_is_and_follows_the_host() -> None:
    weights, host = LaidOutWeights(), weight()
    first = filled(weights, host)
    address = first.data_ptr()
    host.mul_(2)
    assert not torch.equal(first, host)
    second = filled(weights, host)
    assert second.data_ptr() == address and torch.equal(second, host) and second.stride() == WANTED.stride
    assert weights.bytes == host.nbytes


def test_engines_share_a_copy() -> None:
    one, other, host = LaidOutWeights(), LaidOutWeights(), weight()
    assert one.of("w", host, WANTED).data_ptr() == other.of("w", host.detach(), WANTED).data_ptr()
    assert one.bytes + other.bytes == host.nbytes, "counted once"
    one.clear()
    assert torch.equal(filled(other, host), host) and other.bytes == host.nbytes


def test_an_engine_that_was_never_closed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy is gone with it, and another comes to lie in its place."""
    places = torch.empty(weight().numel())
    monkeypatch.setattr(layouts, "_empty", lambda device, wanted: places.as_strided(wanted.shape, wanted.stride))
    for _ in range(3):
        one, host = LaidOutWeights(), weight()
        one.of("w", host, WANTED)
        assert one.bytes == host.nbytes
        del one


def test_models_do_not_share_even_at_the_same_address() -> None:
    """A host's temporary copy is freed, and another model's comes to lie in its place, while an engine still runs."""
    one, other = LaidOutWeights(), LaidOutWeights()
    memory = torch.empty(weight().numel())

    def host(value: float) -> torch.Tensor:
        return torch.frombuffer(memory.numpy(), dtype=torch.float32).view(2, 3, 3, 3).copy_(weight(value))

    first = host(0.0)
    running = filled(one, first)
    address = first.data_ptr()
    assert one.are_sources_alive
    del first
    second = host(100.0)
    assert second.data_ptr() == address and not one.are_sources_alive
    assert torch.equal(filled(other, second), weight(100.0))
    assert torch.equal(running, weight(0.0))


def test_a_copy_goes_when_the_last_engine_lets_go() -> None:
    one, other, host = LaidOutWeights(), LaidOutWeights(), weight()
    one.of("w", host, WANTED)
    other.of("w", host, WANTED)
    for weights in (one, other):
        weights.clear()
        assert weights.bytes == 0
    assert not LaidOutWeights._shared


def test_a_copy_stays_where_it_is_when_other_weights_come() -> None:
    """A LoRA gives the model new ones; graphs read the copy's address."""
    weights, host = LaidOutWeights(), weight()
    address = filled(weights, host).data_ptr()
    del host
    host = weight(1.0)
    found = filled(weights, host)
    assert torch.equal(found, host) and found.data_ptr() == address and weights.bytes == host.nbytes
    assert LaidOutWeights().of("w", host, WANTED).data_ptr() == address, "others find it by what it is a copy of now"
    other = LaidOutWeights()
    shared = filled(other, host)
    changed = weight(2.0)
    assert torch.equal(filled(weights, changed), changed) and torch.equal(shared, host), "not one that others read"
    weights.clear()
    other.clear()
    assert not LaidOutWeights._shared


def test_a_copy_goes_before_a_successor_of_another_form_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, empty, host = LaidOutWeights(), layouts._empty, weight()
    before = weakref.ref(filled(weights, host).untyped_storage())

    def checked(device: torch.device, wanted: TensorLayout) -> torch.Tensor:
        assert before() is None
        return empty(device, wanted)

    monkeypatch.setattr(layouts, "_empty", checked)
    halved = host.half()
    found = weights.of("w", halved, TensorLayout.of(halved.to(memory_format=torch.channels_last)))
    weights.write({"w": halved})
    assert torch.equal(found, halved)


def test_a_weight_that_lies_right_is_no_copy() -> None:
    weights, host = LaidOutWeights(), weight().to(memory_format=torch.channels_last)
    assert weights.of("w", host, WANTED) is host and weights.bytes == 0


def test_copies_made_in_inference_mode_serve_outside_of_it() -> None:
    weights, host = LaidOutWeights(), weight()
    with torch.inference_mode():
        filled(weights, host)
    assert torch.equal(filled(weights, host), host)
