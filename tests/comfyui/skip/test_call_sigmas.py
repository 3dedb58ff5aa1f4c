"""Sigmas that lie on a GPU are taken for granted, and looked at afterwards."""

from __future__ import annotations

import functools
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
    for module in (call_sigmas, step_skip):
        monkeypatch.setattr(module, "is_waited_for", lambda device: True)
    monkeypatch.setattr(step_skip, "_out_of_order", set())


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


def waiting(monkeypatch: pytest.MonkeyPatch, sample: Callable[[], Any]) -> Any:
    """What comes of it where each call's sigma is read."""
    with monkeypatch.context() as now:
        now.setattr(step_skip, "is_waited_for", lambda device: False)
        return sample()


def at(sigma: float) -> torch.Tensor:
    return torch.full((2,), sigma)


def test_it_takes_what_the_schedule_says_and_finds_out() -> None:
    calls = CallSigmas(LEVELS, in_order=True)
    assert [calls.of(at(8.0)), calls.of(at(4.0))] == [8.0, 4.0] and calls.were_right()
    assert calls.of(at(1.999)) == 2.0 and not calls.were_right(), "a prompt may begin between the two"


def test_the_first_may_be_a_little_off_and_none_is_wider_than_32_bits() -> None:
    calls = CallSigmas([8.001, 4.0 + 2e-8, 0.0], in_order=True)
    calls.of(at(8.0))
    assert calls.of(at(4.0)) == 4.0 and calls.were_right()


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


def sampled_by(model: Any, by_sampler: bool, predict: Any = None, **options: float) -> tuple[torch.Tensor, Any]:
    """And what was noted of it."""
    seen = watched(model, None if by_sampler else HALF)
    if predict is not None:
        seen.patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "other", predict)
    euler = comfy.samplers.ksampler("euler", options)
    sampler = SkippingSampler(euler, HALF, seen.said.append) if by_sampler else euler
    torch.manual_seed(3)
    return sampled(seen.patcher, sampler, steps=8), seen


@pytest.mark.parametrize("by_sampler", [False, True])
def test_a_run_with_sigmas_of_its_own_is_sampled_again_once(
    model: Any, by_sampler: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    churned = functools.partial(sampled_by, model, by_sampler, s_churn=2.0)
    wanted, read = waiting(monkeypatch, churned)
    with caplog.at_level(logging.INFO):
        found, twice = churned()
    assert torch.equal(found, wanted) and "sampled again" in caplog.text
    assert len(twice.said) == 1 == len(read.said) and len(twice.sigmas) > len(read.sigmas)
    found, once = churned()
    assert torch.equal(found, wanted) and len(once.sigmas) == len(read.sigmas), "it is known now"


@pytest.mark.parametrize("by_sampler", [False, True])
def test_where_another_node_is_around_the_steps_each_is_read(
    model: Any, by_sampler: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may count them, or ask for them as often as it likes."""

    def predict(executor: Any, x: torch.Tensor, timestep: torch.Tensor, *rest: Any) -> torch.Tensor:
        executor(x, 0.9 * timestep, *rest)
        result: torch.Tensor = executor(x, timestep.clone(), *rest)
        return result

    wanted, read = waiting(monkeypatch, lambda: sampled_by(model, by_sampler, predict))
    with caplog.at_level(logging.INFO):
        found, seen = sampled_by(model, by_sampler, predict)
    assert torch.equal(found, wanted) and seen.sigmas == read.sigmas and "again" not in caplog.text
