"""Sigmas that the host asks the GPU for once."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from slipstream.hosts.comfy.run import asked_once
from slipstream.hosts.comfy.run.asked_once import AskedOnce, sigmas_asked_once

WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "IP-Adapter": lambda sigmas: sigmas.detach().cpu()[0].item(),
    "NAG": lambda sigmas: bool(1 < sigmas[0] <= 3),
    "bleh": lambda sigmas: sigmas.max().item(),
    "core": lambda sigmas: sigmas[0].item(),
    "to the CPU": lambda sigmas: sigmas.to("cpu").tolist(),
    "to the CPU as a device": lambda sigmas: sigmas[1].to(torch.device("cpu")).item(),
    "a float": lambda sigmas: float(sigmas[-1]),
    "a word": lambda sigmas: f"{sigmas[0]:.3f}",
    "the SUPIR patch": lambda sigmas: sigmas[0].item() if sigmas.dim() > 0 and len(sigmas) == sigmas.shape[0] else 0,
    "branches": lambda sigmas: 5 if sigmas[0] > 3 else 6,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Grows each time that numbers are asked for."""
    times: list[None] = []

    class Numbers(asked_once._Numbers):
        @functools.cached_property
        def found(self) -> torch.Tensor:
            times.append(None)
            return super().found

    monkeypatch.setattr(asked_once, "_Numbers", Numbers)
    monkeypatch.setattr(asked_once, "is_waited_for", lambda device: True)
    with torch.inference_mode():  # as ComfyUI has it: no tensor knows whether it was written to
        yield times


def test_each_way_of_asking_gives_what_the_tensor_gives_and_all_together_wait_once(asked: list[None]) -> None:
    plain = torch.tensor([3.0, 4.0])
    standing = AskedOnce.of(plain)
    assert [ask(standing) for ask in WAYS.values()] == [ask(plain) for ask in WAYS.values()]
    assert len(asked) == 1


def test_in_all_else_it_is_the_tensor(asked: list[None]) -> None:
    plain = torch.tensor([3.0, 4.0])
    standing = AskedOnce.of(plain)
    for found in (
        standing * 2,
        torch.cat([standing, plain]),
        standing.view(2, 1),
        copy.deepcopy(standing),
        plain + standing,
    ):
        assert type(found) is torch.Tensor
    assert torch.equal(torch.stack([standing, plain])[0], plain) and torch.equal(
        torch.where(standing > 3, standing, 0), torch.tensor([0.0, 4.0])
    )
    assert (standing.shape, standing.dtype, standing.device) == (plain.shape, plain.dtype, plain.device)
    assert torch.equal(pickle.loads(pickle.dumps(standing)), plain)


@pytest.mark.parametrize(
    "write",
    [
        lambda sigmas: sigmas.mul_(2),
        lambda sigmas: sigmas.detach().mul_(2),
        lambda sigmas: sigmas.view(-1).mul_(2),
        lambda sigmas: sigmas.detach()[0].fill_(9),
        lambda sigmas: sigmas.__setitem__(0, 9.0),
        lambda sigmas: torch.mul(sigmas, 3, out=sigmas),
        lambda sigmas: torch._foreach_mul_([sigmas], 5),
    ],
)
def test_what_is_written_to_it_is_seen(write: Callable[[torch.Tensor], Any], asked: list[None]) -> None:
    plain = torch.tensor([3.0, 4.0])
    standing = AskedOnce.of(plain)
    assert standing.tolist() == [3, 4]
    write(standing)
    assert standing.tolist() == plain.tolist() != [3, 4]


def test_what_is_written_to_a_part_of_it_is_seen_there(asked: list[None]) -> None:
    standing = AskedOnce.of(torch.tensor([3.0, 4.0]))
    part, compared, copied = standing[1], standing > 3, standing.cpu()
    copied.zero_()
    compared.logical_not_()
    part.fill_(7)
    assert part.item() == 7 and standing.tolist() == [3, 7] and compared.tolist() == [True, False]


def test_what_was_made_of_it_stays_what_it_is_when_it_is_written_to(asked: list[None]) -> None:
    standing = AskedOnce.of(torch.tensor([3.0, 4.0]))
    compared, most, seen = standing[0] > 2, standing.max(), standing.view(-1)
    standing.mul_(0)
    assert bool(compared) and most.item() == 4
    seen.add_(5)
    assert standing.tolist() == [5, 5]


def test_functions_take_it_as_they_take_a_tensor(asked: list[None]) -> None:
    class Pair(NamedTuple):
        one: torch.Tensor
        other: torch.Tensor

    plain = torch.tensor([3.0, 4.0])
    for call in (
        lambda sigmas: sigmas.max(0).values,
        lambda sigmas: sigmas.max(0, keepdim=True)[0],
        lambda sigmas: sigmas.to(),
        lambda sigmas: sigmas.to(torch.float64),
        lambda sigmas: sigmas.to("cpu", torch.float64),
        lambda sigmas: torch.cat(Pair(sigmas, sigmas)),
        lambda sigmas: torch.eq(plain, sigmas[0]),
        lambda sigmas: sigmas[torch.tensor([1])],
        lambda sigmas: sigmas[None, :1],
        lambda sigmas: torch.maximum(sigmas, sigmas),
    ):
        found, wanted = call(AskedOnce.of(plain)), call(plain)
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype


def test_nothing_is_known_while_a_graph_is_captured(asked: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """There the question fails on a GPU, and so the capture does: a number would be true for one step alone."""
    plain = torch.tensor([3.0])
    standing = AskedOnce.of(plain)
    assert standing.item() == 3
    plain.fill_(4)
    assert standing.item() == 3
    monkeypatch.setattr(asked_once, "is_capturing", lambda device: True)
    assert standing.item() == standing.detach().cpu()[0].item() == 4


def test_they_stand_in_the_options_for_one_call(asked: list[None]) -> None:
    plain = torch.tensor([3.0])
    options: dict[str, Any] = {"sigmas": plain}
    with pytest.raises(KeyError), sigmas_asked_once(options):
        assert type(options["sigmas"]) is AskedOnce
        raise KeyError
    assert options == {"sigmas": plain} and options["sigmas"] is plain
    with sigmas_asked_once(options):
        kept = options["sigmas"]
        assert kept.item() == 3
    plain.fill_(4)
    assert kept.item() == 4
    other = torch.tensor([5.0])
    with sigmas_asked_once(options):
        options["sigmas"] = other
    assert options["sigmas"] is other


@pytest.mark.parametrize(
    "options", [{}, {"sigmas": None}, {"sigmas": 3.0}, {"sigmas": torch.nn.Parameter(torch.ones(1))}]
)
def test_other_options_are_left_alone(options: dict[str, Any]) -> None:
    before = dict(options)
    with sigmas_asked_once(options):
        assert options.keys() == before.keys() and all(options[name] is before[name] for name in before)
