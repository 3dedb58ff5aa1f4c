"""Sigmas that lie on a GPU are taken for granted, and looked at afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP

from slipstream.hosts.comfy.models.demo_model import load_demo_model
from slipstream.hosts.comfy.skip import call_sigmas, step_skip
from slipstream.hosts.comfy.skip.call_sigmas import IN_ORDER, CallSigmas
from slipstream.hosts.comfy.skip.sampling_task import sampler_name
from slipstream.hosts.comfy.skip.skipping_sampler import SkippingSampler
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.sampling.presets import Selection, custom
from slipstream.sampling.samplers import kind_of
from slipstream.tests.comfyui.support.skipping import sampled, watched

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_a_gpu")]

HALF = custom(Selection(share=0.5))
LEVELS = [8.0, 4.0, 2.0, 0.0]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_sigmas, "_is_at_hand", lambda timestep: False)
    monkeypatch.setattr(step_skip, "_out_of_order", set())


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


def waiting(monkeypatch: pytest.MonkeyPatch, sample: Callable[[], Any]) -> Any:
    """What comes of it where each call's sigma is read."""
    with monkeypatch.context() as now:
        now.setattr(call_sigmas, "_is_at_hand", lambda timestep: True)
        return sample()


def at(sigma: float) -> torch.Tensor:
    return torch.full((2,), sigma)


def test_it_takes_what_the_schedule_says_and_finds_out() -> None:
    calls = CallSigmas(LEVELS, in_order=True)
    assert [calls.of(at(8.0)), calls.of(at(4.0))] == [8.0, 4.0] and calls.were_right()
    assert calls.of(at(3.0)) == 2.0 and not calls.were_right()


def test_the_same_tensor_is_the_same_step() -> None:
    calls, first = CallSigmas(LEVELS, in_order=True), at(8.0)
    assert [calls.of(first), calls.of(first), calls.of(at(4.0))] == [8.0, 8.0, 4.0] and calls.were_right()
    changed = at(2.0)
    calls.of(changed)
    changed.mul_(0.5)
    calls.of(changed)
    assert not calls.were_right()


def test_more_calls_than_steps_are_read() -> None:
    calls = CallSigmas(LEVELS, in_order=True)
    assert [calls.of(at(sigma)) for sigma in (8.0, 4.0, 2.0, 1.0, 0.5)] == [8.0, 4.0, 2.0, 1.0, 0.5]
    assert calls.were_right()


def test_out_of_order_each_is_read() -> None:
    calls = CallSigmas(LEVELS, in_order=False)
    assert [calls.of(at(sigma)) for sigma in (3.0, 7.0)] == [3.0, 7.0] and calls.were_right()


def test_comfyui_s_samplers_are_expected_rightly(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in comfy.samplers.SAMPLER_NAMES:
        if kind_of(sampler_name(comfy.samplers.sampler_object(name))) in IN_ORDER:
            seen = watched(model, HALF)
            found = sampled(seen.patcher, name, steps=8)
            assert len(seen.said) == 1 and seen.said[0].skipped, name
            wanted = waiting(monkeypatch, lambda: sampled(skip_steps(model, HALF), name, steps=8))  # noqa: B023
            assert torch.equal(found, wanted), name
    assert not step_skip._out_of_order


@pytest.mark.parametrize("by_sampler", [False, True])
def test_a_run_in_an_order_of_its_own_is_sampled_again_once(
    model: Any, by_sampler: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def predict(executor: Any, x: torch.Tensor, timestep: torch.Tensor, *rest: Any) -> torch.Tensor:
        executor(x, 0.9 * timestep, *rest)
        result: torch.Tensor = executor(x, timestep.clone(), *rest)
        return result

    def sample() -> tuple[torch.Tensor, int]:
        """And how many runs there were."""
        seen = watched(model, None if by_sampler else HALF)
        seen.patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "other", predict)
        euler = comfy.samplers.sampler_object("euler")
        sampler = SkippingSampler(euler, HALF, seen.said.append) if by_sampler else euler
        found = sampled(seen.patcher, sampler, steps=8)
        return found, len(seen.said)

    wanted, runs = waiting(monkeypatch, sample)
    assert runs == 1
    with caplog.at_level(logging.INFO):
        found, runs = sample()
    assert torch.equal(found, wanted) and runs == 2 and "sampled again" in caplog.text
    found, runs = sample()
    assert torch.equal(found, wanted) and runs == 1, "it is known now"
