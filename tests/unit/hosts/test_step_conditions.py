"""Between which steps a prompt, a ControlNet or a hook begins or ends, without ComfyUI."""

from __future__ import annotations

import itertools
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.hosts.step_conditions import StepConditions

SIGMAS = [14.6, 10.0, 7.0, 5.0, 4.999, 3.0, 1.0, 0.5, 0.03]


def guider(cfg: float | None = 7.0, **conds: Any) -> Any:
    return SimpleNamespace(cfg=cfg, conds=conds)


def prompt(**more: Any) -> dict[str, Any]:
    return {"uuid": uuid.uuid4(), **more}


def control(begin: float, end: float, previous: Any = None) -> Any:
    return SimpleNamespace(timestep_range=(begin, end), previous_controlnet=previous)


def hooks(*starts: float) -> Any:
    keyframes = [SimpleNamespace(start_t=start) for start in starts]
    return SimpleNamespace(hooks=[SimpleNamespace(hook_keyframe=SimpleNamespace(keyframes=keyframes))])


def parted(conditions: StepConditions, sigmas: list[float]) -> list[list[float]]:
    """Neighbouring sigmas with the same conditions together."""
    return [list(group) for _, group in itertools.groupby(sigmas, conditions.at)]


def test_where_nothing_begins_or_ends_all_steps_are_one_situation() -> None:
    assert parted(StepConditions(guider(positive=[prompt()], negative=[prompt()])), SIGMAS) == [SIGMAS]
    assert parted(StepConditions(guider(positive=[], negative=None)), SIGMAS) == [SIGMAS]
    assert parted(StepConditions(guider()), SIGMAS) == [SIGMAS]


@pytest.mark.parametrize(
    "windowed",
    [
        lambda begin, end: prompt(timestep_start=begin, timestep_end=end),
        lambda begin, end: prompt(control=control(begin, end)),
        lambda begin, end: prompt(control=control(999999999.9, 0.0, control(begin, end))),
    ],
    ids=["prompt", "ControlNet", "second ControlNet"],
)
@pytest.mark.parametrize("name", ["positive", "negative"])
def test_both_ends_of_a_window_belong_to_it(windowed: Any, name: str) -> None:
    conds: Any = {"positive": [prompt()], name: [prompt(), windowed(10.0, 5.0)]}
    conditions = StepConditions(guider(**conds))
    assert parted(conditions, SIGMAS) == [[14.6], [10.0, 7.0, 5.0], [4.999, 3.0, 1.0, 0.5, 0.03]]


def test_a_window_with_one_end() -> None:
    assert parted(StepConditions(guider(positive=[prompt(timestep_start=5.0)])), SIGMAS) == [SIGMAS[:3], SIGMAS[3:]]
    assert parted(StepConditions(guider(positive=[prompt(timestep_end=5.0)])), SIGMAS) == [SIGMAS[:4], SIGMAS[4:]]


def test_a_window_of_the_whole_run() -> None:
    whole = prompt(timestep_start=999999999.9, timestep_end=0.0, control=control(999999999.9, 0.0))
    assert parted(StepConditions(guider(positive=[whole])), SIGMAS) == [SIGMAS]


def test_hooks_begin_at_their_keyframes() -> None:
    conditions = StepConditions(guider(positive=[prompt(hooks=hooks(999999999.9, 7.0, 1.0))]))
    assert parted(conditions, SIGMAS) == [SIGMAS[:2], SIGMAS[2:6], SIGMAS[6:]]


def test_a_controlnet_without_a_window_and_hooks_without_keyframes() -> None:
    bare = SimpleNamespace(previous_controlnet=SimpleNamespace(timestep_range=None, previous_controlnet=None))
    empty = SimpleNamespace(hooks=[SimpleNamespace(), SimpleNamespace(hook_keyframe=None)])
    conditions = StepConditions(guider(positive=[prompt(control=bare, hooks=empty), prompt(control=None, hooks=None)]))
    assert parted(conditions, SIGMAS) == [SIGMAS]


def test_steps_are_alike_where_no_boundary_lies_between() -> None:
    windows = [(14.6, 7.0), (10.0, 4.0), (5.0, 5.0), (3.0, 0.03), (999999999.9, 0.5), (6.0, 0.0)]
    conds = [prompt(timestep_start=begin, timestep_end=end) for begin, end in windows]
    conditions = StepConditions(guider(positive=conds[:3], negative=conds[3:]))
    for one, other in itertools.product(SIGMAS, repeat=2):
        same = all((one > begin, one < end) == (other > begin, other < end) for begin, end in windows)
        assert (conditions.at(one) == conditions.at(other)) == same, (one, other)


@pytest.mark.parametrize("boundary", [0.1, 0.3, 0.6, 0.7, 0.9, 1 / 3])
def test_a_boundary_at_a_steps_own_sigma_is_where_comfyui_sees_it(boundary: float) -> None:
    """A flow model's windows are Python's floats, its sigmas float32, and ComfyUI compares them as float32."""
    sigma = torch.tensor([boundary])
    before, at, after = float(sigma) * 1.1, float(sigma), float(sigma) * 0.9
    begins = StepConditions(guider(positive=[prompt(timestep_start=boundary)]))
    assert not sigma[0] > boundary, "not before its beginning"
    assert begins.at(before) != begins.at(at) == begins.at(after)
    ends = StepConditions(guider(positive=[prompt(timestep_end=boundary)]))
    assert not sigma[0] < boundary, "not after its end"
    assert ends.at(before) == ends.at(at) != ends.at(after)


def test_exchanged_prompts_are_another_situation() -> None:
    one, other = prompt(), prompt()
    led = guider(positive=[one], negative=[other])
    conditions = StepConditions(led)
    first = conditions.at(5.0)
    assert conditions.at(5.0) == first
    led.conds = {"negative": [dict(other)], "positive": [dict(one)]}
    assert conditions.at(4.0) == first, "the same prompts in other containers"
    for conds in (
        {"positive": [other], "negative": [one]},
        {"positive": [one, other], "negative": []},
        {"positive": [one]},
        {"positive": [one], "middle": [other]},
    ):
        led.conds = conds
        assert conditions.at(3.0) != first
    led.conds = {"positive": [one], "negative": [other]}
    assert conditions.at(2.0) == first


def test_windows_of_exchanged_prompts_count() -> None:
    led = guider(positive=[prompt()])
    conditions = StepConditions(led)
    assert conditions.at(14.6) == conditions.at(10.0)
    led.conds = {"positive": [prompt(timestep_end=5.0)]}
    assert conditions.at(7.0) != conditions.at(3.0)


def test_prompts_without_an_id_are_told_apart() -> None:
    one, other = {"cross_attn": 1}, {"cross_attn": 1}
    led = guider(positive=[one])
    conditions = StepConditions(led)
    first = conditions.at(5.0)
    led.conds = {"positive": [other]}
    assert conditions.at(5.0) != first


def test_windows_are_looked_at_when_the_first_step_begins() -> None:
    """ComfyUI works them out in sigmas after the run was set up."""
    late = SimpleNamespace(timestep_range=None, previous_controlnet=None)
    led = guider(positive=[prompt(control=late)])
    conditions = StepConditions(led)
    late.timestep_range = (999999999.9, 5.0)
    assert conditions.at(7.0) != conditions.at(3.0)


def test_a_step_that_is_asked_for_twice_is_two_situations() -> None:
    conditions = StepConditions(guider(positive=[prompt()]))
    first, second, third = (conditions.next(5.0) for _ in range(3))
    assert len({first, second, third}) == 3
    assert conditions.next(3.0) == conditions.next(1.0) == first


def test_another_cfg_is_another_situation() -> None:
    led = guider(cfg=7.0, positive=[prompt()])
    conditions = StepConditions(led)
    first = conditions.at(5.0)
    led.cfg = 1.0
    assert conditions.at(5.0) != first
    led.cfg = 7
    assert conditions.at(5.0) == first


@pytest.mark.parametrize("cfg", [None, "seven", [7.0, 3.0], torch.tensor(7.0)])
def test_a_cfg_that_is_no_number_is_left_out(cfg: Any) -> None:
    conditions = StepConditions(guider(cfg=cfg, positive=[prompt()]))
    assert conditions.at(5.0) == conditions.at(3.0)
    assert isinstance(hash(conditions.at(5.0)), int)


def test_a_guider_without_a_cfg() -> None:
    conditions = StepConditions(SimpleNamespace(conds={"positive": [prompt()]}))
    assert conditions.at(5.0) == conditions.at(3.0)
