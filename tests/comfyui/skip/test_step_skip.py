"""Step skipping inside ComfyUI's samplers: what is computed, what comes of it, and what stays behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import comfy.controlnet
import comfy.hooks
import comfy.model_management
import comfy.samplers
import node_helpers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_custom_sampler import Guider_Basic, Guider_DualCFG
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete, ModelSamplingSD3

import nodes
from slipstream.core.errors import UnsupportedModel
from slipstream.hosts.comfy.models.demo_model import encode_demo_prompt, load_demo_controlnet, load_demo_model
from slipstream.hosts.comfy.run.call_wrappers import put_innermost, wrappers_of
from slipstream.hosts.comfy.run.wrapper_keys import ACCELERATE, STEP_SKIP
from slipstream.hosts.comfy.skip.sampling_task import foreseen_steps, sampler_name, task_of
from slipstream.hosts.comfy.skip.skipping_sampler import SkippingSampler
from slipstream.hosts.comfy.skip.step_skip import skip_steps, without_skipping
from slipstream.sampling.presets import PRESETS, Preset, Selection, custom
from slipstream.sampling.reuse import History, Reuse
from slipstream.sampling.samplers import SamplerKind, kind_of
from slipstream.sampling.saved_preset import SavedPreset
from slipstream.sampling.schedule import shortened
from slipstream.tests.comfyui.support.skipping import (
    empty,
    noise_of,
    prompts,
    sampled,
    schedule_of,
    watched,
)
from slipstream.tests.tensors import distance

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:comfy.k_diffusion.deis"),
    pytest.mark.filterwarnings("ignore:Should have tb:UserWarning"),
]

Patcher = Any

ALL = custom(Selection(share=1.0))
BALANCED, HACKATHON = PRESETS["balanced"], PRESETS["hackathon"]
ANYWHERE = custom(BALANCED.selection)
"""As `balanced`, with samplers for which that computes every step too."""
ENDS = custom(Selection(listed="0 19"), Reuse.HOLD)
"""All but the first and the last step are skipped, unless something forces one."""
WHOLE_HACKATHON = [0, 1, 2, 3, 4, 5, 6, 8, 11, 15]
SAMPLERS = ("euler", "ddim", "dpmpp_2m", "uni_pc", "deis", "euler_ancestral", "dpmpp_2m_sde")
KEPT = ("euler", "dpmpp_2m", "uni_pc", "euler_ancestral")


@pytest.fixture(scope="module")
def model() -> Patcher:
    """That has sampled before: on a GPU, the plain model's first picture of a process is not the bits of its second."""
    found = load_demo_model()
    sampled(found, "euler")
    return found


@pytest.fixture(scope="module")
def controlnet() -> Any:
    return load_demo_controlnet()


def holding(preset: Preset) -> Preset:
    return custom(preset.selection, Reuse.HOLD)


def velocity(model: Patcher) -> Patcher:
    return ModelSamplingDiscrete().patch(model, "v_prediction", False)[0]


def flow(model: Patcher) -> Patcher:
    return ModelSamplingSD3().patch(model, 3.0)[0]


def same(model: Patcher) -> Patcher:
    return model


# ---- what comes of it


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_with_every_step_computed_nothing_differs(model: Patcher, sampler: str) -> None:
    seen = watched(model, ALL)
    assert torch.equal(sampled(seen.patcher, sampler), sampled(model, sampler))
    assert seen.steps(schedule_of(model, sampler=sampler)) == list(range(20))
    assert (seen.said[0].computed, seen.said[0].skipped, seen.said[0].reason) == (20, 0, "")


@pytest.mark.parametrize("kind", [same, velocity, flow])
@pytest.mark.parametrize("sampler", ["euler", "ddim"])
def test_holding_is_a_shortened_schedule(model: Patcher, sampler: str, kind: Callable[[Patcher], Patcher]) -> None:
    model = kind(model)
    sigmas = schedule_of(model)
    for preset in (HACKATHON, holding(BALANCED), ENDS):
        wanted = sampled(model, sampler, shortened(sigmas, preset.selection.computed(20)))
        found = sampled(skip_steps(model, preset), sampler, sigmas)
        assert found.isfinite().all() and distance(found, wanted) < 1e-5
    extrapolated = sampled(skip_steps(model, custom(BALANCED.selection, Reuse.LINEAR)), sampler, sigmas)
    assert distance(extrapolated, sampled(skip_steps(model, holding(BALANCED)), sampler, sigmas)) > 1e-3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_skipped_run_is_near_the_whole_one(model: Patcher, sampler: str) -> None:
    seen = watched(model, ANYWHERE)
    found, wanted = sampled(seen.patcher, sampler), sampled(model, sampler)
    assert 0 < distance(found, wanted) < (0.7 if sampler == "dpmpp_2m_sde" else 0.5)
    assert len(seen.steps(schedule_of(model, sampler=sampler))) == seen.said[0].computed == 14
    assert seen.said[0].skipped == 6
    assert seen.said[0].sampler == ("euler" if sampler == "ddim" else sampler), "ComfyUI has one method for both"


def test_the_hackathon_preset_computes_the_published_list(model: Patcher) -> None:
    seen = watched(model, HACKATHON)
    sampled(seen.patcher)
    assert seen.steps(schedule_of(model)) == [19 - n for n in (19, 18, 17, 16, 15, 14, 13, 11, 8, 4)]
    assert str(seen.said[0]) == "hackathon: 10 of 20 steps computed (euler, hold)"


def test_a_list_is_computed_as_written(model: Patcher) -> None:
    for listed in ("0 3 4 19", "19,16,15,0"):
        seen = watched(model, custom(Selection(listed=listed)))
        sampled(seen.patcher)
        assert seen.steps(schedule_of(model)) == [0, 3, 4, 19]


def test_a_list_for_another_number_of_steps_is_refused(model: Patcher) -> None:
    for listed, why in (("0 25", "Step 25"), ("10 5 0", "first step")):
        with pytest.raises(ValueError, match=why):
            sampled(skip_steps(model, custom(Selection(listed=listed))))


# ---- nothing stays behind


@pytest.mark.parametrize("sampler", KEPT)
def test_runs_do_not_know_of_each_other(model: Patcher, sampler: str) -> None:
    skipping = skip_steps(model, ANYWHERE)
    other = encode_demo_prompt("a black star on a white background")
    first = sampled(skipping, sampler)
    between = sampled(skipping, sampler, positive=other)
    assert torch.equal(sampled(skipping, sampler), first)
    assert torch.equal(between, sampled(skip_steps(model, ANYWHERE), sampler, positive=other))
    assert distance(between, first) > 0.05
    assert no_tensors_are_kept()


def test_a_cancel_inside_a_skipped_stretch_is_prompt_and_leaves_nothing(model: Patcher) -> None:
    seen, steps = watched(model, HACKATHON), []
    wanted = sampled(seen.patcher)
    seen.sigmas.clear()

    def cancel_at_11(step: int, *rest: Any) -> None:
        steps.append(step)
        if step == 11:
            comfy.model_management.interrupt_current_processing()

    with pytest.raises(comfy.model_management.InterruptProcessingException) as cancelled:
        sampled(seen.patcher, callback=cancel_at_11)
    assert steps == list(range(12)), "step 12 is a skipped one"
    assert seen.steps(schedule_of(model)) == WHOLE_HACKATHON[:9]
    assert no_tensors_are_kept(), f"they would be held as long as {cancelled} is"
    assert torch.equal(sampled(seen.patcher), wanted)


def no_tensors_are_kept() -> bool:
    return all(each.is_empty for each in gc.get_objects() if type(each) is History)


def test_items_of_a_batch_do_not_mix(model: Patcher) -> None:
    skipping, noise = skip_steps(model, ANYWHERE), noise_of(batch=2)
    both = sampled(skipping, noise=noise)
    for item in range(2):
        assert distance(both[item : item + 1], sampled(skipping, noise=noise[item : item + 1])) < 1e-4
    assert distance(both[:1], both[1:]) > 0.05


def test_the_model_without_the_node_stays_as_it_was(model: Patcher) -> None:
    before, options = sampled(model), repr(model.model_options)
    skipping = skip_steps(model, BALANCED)
    wrapped = repr(skipping.model_options), repr(skipping.wrappers)
    sampled(skipping)
    assert (repr(skipping.model_options), repr(skipping.wrappers)) == wrapped
    assert STEP_SKIP not in repr(model.wrappers) and repr(model.model_options) == options
    assert torch.equal(sampled(model), before)
    assert torch.equal(sampled(without_skipping(skipping)), before)


# ---- which calls are left out


def edges(size: int = 64) -> torch.Tensor:
    """A hint: [1, size, size, 3]."""
    hint = torch.zeros(1, size, size, 3)
    hint[:, size // 4 : -size // 4, size // 4] = hint[:, size // 4, size // 4 : -size // 4] = 1
    return hint


def controlled(controlnet: Any, start: float = 0.0, end: float = 1.0) -> dict[str, Any]:
    apply = nodes.ControlNetApplyAdvanced().apply_controlnet
    positive, negative = apply(*prompts(), controlnet, edges(), 0.9, start, end)
    return {"positive": positive, "negative": negative}


@pytest.fixture
def hinted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sigma of each call of a ControlNet."""
    sigmas: list[float] = []
    plain = comfy.controlnet.ControlNet.get_control

    def noted(self: Any, x: torch.Tensor, sigma: torch.Tensor, *args: Any) -> Any:
        sigmas.append(float(sigma.flatten()[0]))
        return plain(self, x, sigma, *args)

    monkeypatch.setattr(comfy.controlnet.ControlNet, "get_control", noted)
    return sigmas


def test_a_skipped_step_calls_no_controlnet(model: Patcher, controlnet: Any, hinted: list[float]) -> None:
    seen = watched(model, BALANCED)
    found = sampled(seen.patcher, **controlled(controlnet))
    assert len(set(hinted)) == 14 and set(hinted) == set(seen.sigmas)
    assert distance(found, sampled(seen.patcher)) > 0.02, "the hint changes nothing"


def test_with_a_lora_before_and_after(model: Patcher) -> None:
    weight = "diffusion_model.out.2.weight"
    shape = model.model.state_dict()[weight].shape
    patch = {weight: ("diff", (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05,))}

    def with_lora(patcher: Patcher) -> Patcher:
        clone = patcher.clone()
        assert clone.add_patches(patch, 1.0)
        return clone

    before, after = watched(with_lora(model), BALANCED), watched(model, BALANCED)
    found = sampled(before.patcher), sampled(with_lora(after.patcher))
    assert torch.equal(*found) and distance(found[0], sampled(skip_steps(model, BALANCED))) > 1e-3
    assert before.steps(schedule_of(model)) == after.steps(schedule_of(model)) == list(BALANCED.selection.computed(20))


def test_inpainting_keeps_what_lies_outside_the_mask(model: Patcher) -> None:
    seen, mask = watched(model, ANYWHERE), torch.zeros(1, 8, 8)
    mask[:, :, :4] = 1
    picture = sampled(model, "ddim", positive=encode_demo_prompt("a green ring"))
    found = sampled(seen.patcher, "ddim", latent=picture, noise_mask=mask)
    assert distance(found[..., 4:], picture[..., 4:]) < 1e-4 and distance(found[..., :4], picture[..., :4]) > 0.05
    assert len(set(seen.sigmas)) == 14
    assert str(seen.said[0]) == "custom: 14 of 20 steps computed (euler, measured with bend)"


@pytest.mark.parametrize("by_sampler", [False, True], ids=["Step Skip", "Step Skip Sampler"])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
def test_the_kept_part_of_an_inpainted_picture_has_no_say(model: Patcher, sampler: str, by_sampler: bool) -> None:
    """The painted part is the same, whatever is kept beside it would have become."""
    mask = torch.zeros(1, 1, 64, 64)  # of pixels, as nodes give it
    mask[..., 32:] = 1.0
    sigmas = schedule_of(model, sampler=sampler)
    painted = {}
    for name, loud in (("loud", 30.0), ("quiet", 0.0)):
        method = comfy.samplers.sampler_object(sampler)

        def predict(executor: Any, x: torch.Tensor, sigma: torch.Tensor, *rest: Any) -> torch.Tensor:
            denoised = executor(x, sigma, *rest)
            denoised[..., :4] += loud / (1 + float(sigma.flatten()[0]))  # noqa: B023  where it is kept
            return denoised

        seen = watched(model, None if by_sampler else ANYWHERE)
        put_innermost(wrappers_of(seen.patcher.model_options, WrappersMP.PREDICT_NOISE), ACCELERATE, predict)
        skipping = SkippingSampler(method, ANYWHERE, seen.said.append) if by_sampler else method
        painted[name] = sampled(seen.patcher, skipping, sigmas, latent=sampled(model), noise_mask=mask)[..., 4:]
        assert (seen.said[0].computed, seen.said[0].skipped, len(set(seen.sigmas))) == (14, 6, 14)
    assert torch.equal(painted["loud"], painted["quiet"])


@pytest.mark.parametrize("by_sampler", [False, True], ids=["Step Skip", "Step Skip Sampler"])
def test_inpainting_computes_every_step_by_preset(model: Patcher, by_sampler: bool) -> None:
    seen, mask = watched(model, None if by_sampler else BALANCED), torch.ones(1, 8, 8)
    mask[:, 4:] = 0
    sampler = comfy.samplers.sampler_object("euler")
    skipping = SkippingSampler(sampler, BALANCED, seen.said.append) if by_sampler else sampler
    inpainted = {"sigmas": schedule_of(model), "latent": sampled(model), "noise_mask": mask}
    assert torch.equal(sampled(seen.patcher, skipping, **inpainted), sampled(model, sampler, **inpainted))
    assert str(seen.said[0]).startswith("every step computed: with a mask for inpainting, balanced was measured ahead")


def test_with_areas(model: Patcher) -> None:
    there = node_helpers.conditioning_set_values(encode_demo_prompt("a green ring"), {"area": (8, 4, 0, 0)})
    seen = watched(model, BALANCED)
    found = sampled(seen.patcher, positive=prompts()[0] + there)
    assert len(set(seen.sigmas)) == 14 and len(seen.sigmas) > 14
    assert distance(found, sampled(model, positive=prompts()[0] + there)) < 0.5


def basic_guider(patcher: Patcher) -> Any:
    guider = Guider_Basic(patcher)
    guider.set_conds(prompts()[0])
    return guider


def cfg_guider(patcher: Patcher) -> Any:
    guider = comfy.samplers.CFGGuider(patcher)
    guider.set_conds(*prompts())
    guider.set_cfg(4.0)
    return guider


def dual_guider(patcher: Patcher) -> Any:
    guider = Guider_DualCFG(patcher)
    guider.set_conds(prompts()[0], encode_demo_prompt("a green ring"), prompts()[1])
    guider.set_cfg(4.0, 2.0)
    return guider


@pytest.mark.parametrize("guided", [basic_guider, cfg_guider, dual_guider])
@pytest.mark.parametrize("by_sampler", [False, True], ids=["Step Skip", "Step Skip Sampler"])
def test_with_any_guider(model: Patcher, guided: Callable[[Patcher], Any], by_sampler: bool) -> None:
    seen = watched(model, None if by_sampler else BALANCED)
    sampler = comfy.samplers.sampler_object("euler")
    if by_sampler:
        sampler = SkippingSampler(sampler, BALANCED, seen.said.append)
    sigmas = schedule_of(model)
    guider = guided(seen.patcher)
    found = guider.sample(noise_of(), empty(), sampler, sigmas, disable_pbar=True, seed=1)
    assert seen.steps(sigmas) == list(BALANCED.selection.computed(20))
    assert [str(each) for each in seen.said] == ["balanced: 14 of 20 steps computed (euler, measured with bend)"]
    plain = comfy.samplers.sampler_object("euler")
    whole = guided(model).sample(noise_of(), empty(), plain, sigmas, disable_pbar=True, seed=1)
    assert 0 < distance(found, whole) < 0.5
    assert torch.equal(guider.sample(noise_of(), empty(), sampler, sigmas, disable_pbar=True, seed=1), found)


def test_the_sampler_and_the_model_skip_alike(model: Patcher) -> None:
    for sampler in KEPT:
        by_sampler = SkippingSampler(comfy.samplers.sampler_object(sampler), ANYWHERE)
        found = sampled(model, by_sampler, schedule_of(model, sampler=sampler))
        assert torch.equal(found, sampled(skip_steps(model, ANYWHERE), sampler))


# ---- steps that are computed in any case


def sigma_at(model: Patcher, percent: float) -> float:
    return float(model.get_model_object("model_sampling").percent_to_sigma(percent))


def begins(model: Patcher, percent: float) -> int:
    """The first step that something with this start is part of."""
    levels = schedule_of(model)[:-1].tolist()
    return next(step for step, sigma in enumerate(levels) if sigma <= sigma_at(model, percent))


def ends(model: Patcher, percent: float) -> int:
    """The first step that something with this end is no longer part of."""
    levels = schedule_of(model)[:-1].tolist()
    return next(step for step, sigma in enumerate(levels) if sigma < sigma_at(model, percent))


def forced(model: Patcher, expected: list[int], **conditions: Any) -> None:
    """Only the first, the last and the expected steps are computed, and the result is right."""
    seen, sigmas = watched(model, ENDS), schedule_of(model)
    assert 0 < expected[0] and expected[-1] < 19
    found = sampled(seen.patcher, **conditions)
    assert seen.steps(sigmas) == [0, *expected, 19]
    same_steps = shortened(sigmas, [0, *expected, 19])
    wanted = sampled(model, sigmas=same_steps, **conditions)
    assert distance(found, wanted) < 1e-5
    assert distance(sampled(model, sigmas=same_steps), wanted) > 0.01, "the conditions change nothing"


def test_where_a_controlnet_begins_and_ends(model: Patcher, controlnet: Any) -> None:
    windowed = controlled(controlnet, 0.3, 0.7)
    forced(model, [begins(model, 0.3), ends(model, 0.7)], **windowed)


def test_where_prompts_change(model: Patcher) -> None:
    first = node_helpers.conditioning_set_values(prompts()[0], {"start_percent": 0.0, "end_percent": 0.4})
    other = encode_demo_prompt("a green ring")
    then = node_helpers.conditioning_set_values(other, {"start_percent": 0.4, "end_percent": 1.0})
    assert begins(model, 0.4) == ends(model, 0.4)
    forced(model, [begins(model, 0.4)], positive=first + then)


def test_where_a_hook_changes(model: Patcher) -> None:
    hook = comfy.hooks.WeightHook()
    weight = "diffusion_model.out.2.weight"
    shape = model.model.state_dict()[weight].shape
    hook.weights = {weight: ("diff", (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05,))}
    hook.need_weight_init = False
    for strength, start in ((0.2, 0.0), (1.0, 0.5)):
        hook.hook_keyframe.add(comfy.hooks.HookKeyframe(strength, start))
    group = comfy.hooks.HookGroup()
    group.add(hook)
    positive = node_helpers.conditioning_set_values(prompts()[0], {"hooks": group})
    forced(model, [begins(model, 0.5)], positive=positive)


Predict = Callable[..., torch.Tensor]


def predicting(model: Patcher, predict: Predict) -> Patcher:
    """A clone of `model` with another node's wrapper around the prediction of a step."""
    clone = model.clone()
    clone.add_wrapper(WrappersMP.PREDICT_NOISE, predict)
    return clone


def cfg_within(model: Patcher, cfg: float, start: float, end: float) -> Patcher:
    """As CFG Override of ComfyUI does it, which older ones do not have."""
    high, low = sigma_at(model, start), sigma_at(model, end)

    def predict(executor: Any, x: torch.Tensor, timestep: torch.Tensor, *rest: Any) -> torch.Tensor:
        guider, before = executor.class_obj, executor.class_obj.cfg
        guider.cfg = cfg if low <= float(timestep.flatten()[0]) <= high else before
        try:
            return executor(x, timestep, *rest)
        finally:
            guider.cfg = before

    return predicting(model, predict)


def cfg_override(model: Patcher, cfg: float, start: float, end: float) -> Patcher:
    node = pytest.importorskip("comfy_extras.nodes_custom_sampler")
    if not hasattr(node, "CFGOverride"):
        pytest.skip("this ComfyUI has no CFG Override")
    return node.CFGOverride.execute(model, cfg, start, end).result[0]


@pytest.mark.parametrize("override", [cfg_within, cfg_override])
@pytest.mark.parametrize("comes_first", [False, True], ids=["behind Step Skip", "before Step Skip"])
def test_where_another_node_changes_the_guidance(
    model: Patcher, override: Callable[..., Patcher], comes_first: bool
) -> None:
    seen, sigmas = watched(model, None if comes_first else ENDS), schedule_of(model)
    overridden = override(seen.patcher, 1.0, 0.3, 0.7)
    found = sampled(skip_steps(overridden, ENDS) if comes_first else overridden)
    computed = [0, begins(model, 0.3), ends(model, 0.7), 19]
    assert seen.steps(sigmas) == computed
    wanted = sampled(override(model, 1.0, 0.3, 0.7), sigmas=shortened(sigmas, computed))
    assert distance(found, wanted) < 1e-5
    assert distance(sampled(model, sigmas=shortened(sigmas, computed)), wanted) > 0.01, "the guidance changes nothing"


def test_what_another_node_asks_for_twice_in_a_step_does_not_mix(model: Patcher) -> None:
    def predict(executor: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return 1.5 * executor(x, *rest) - 0.5 * executor(0.9 * x, *rest)

    seen = watched(predicting(model, predict), ENDS)
    assert torch.equal(sampled(seen.patcher), sampled(predicting(model, predict)))
    assert (seen.said[0].computed, seen.said[0].skipped) == (40, 0)


@pytest.mark.parametrize("comes_first", [False, True], ids=["behind Step Skip", "before Step Skip"])
def test_outside_of_an_accelerated_model_and_inside_of_other_nodes(model: Patcher, comes_first: bool) -> None:
    """An accelerated model puts itself around the prediction at the beginning of each run, as `graphed_steps` does."""
    asked: dict[str, int] = {"accelerated": 0, "other": 0}

    def counting(name: str) -> Predict:
        def predict(executor: Any, *args: Any) -> torch.Tensor:
            asked[name] += 1
            return executor(*args)

        return predict

    def accelerated(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrappers = wrappers_of(executor.class_obj.model_options, WrappersMP.PREDICT_NOISE)
        put_innermost(wrappers, ACCELERATE, counting("accelerated"))
        return executor(*args, **kwargs)

    def with_accelerate(patcher: Patcher) -> Patcher:
        clone = patcher.clone()
        clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, ACCELERATE, accelerated)
        return clone

    other = predicting(model, counting("other"))
    both = skip_steps(with_accelerate(other), BALANCED) if comes_first else with_accelerate(skip_steps(other, BALANCED))
    found = sampled(both)
    assert asked == {"accelerated": 14, "other": 20}
    assert torch.equal(found, sampled(skip_steps(model, BALANCED)))


# ---- what is refused, and what computes every step


def easy_cache(model: Patcher) -> Patcher:
    return EasyCacheNode.execute(model, 0.2, 0.15, 0.95, False).result[0]


def lazy_cache(model: Patcher) -> Patcher:
    return LazyCacheNode.execute(model, 0.2, 0.15, 0.95, False).result[0]


@pytest.mark.parametrize("cache, name", [(easy_cache, "EasyCache"), (lazy_cache, "LazyCache")])
def test_caches_in_the_same_model_are_refused(model: Patcher, cache: Callable[[Patcher], Patcher], name: str) -> None:
    why = f"{name} and step skipping are in the same model.*Remove one"
    with pytest.raises(UnsupportedModel, match=why):
        skip_steps(cache(model), BALANCED)
    with pytest.raises(UnsupportedModel, match=why):
        sampled(cache(skip_steps(model, BALANCED)))
    with pytest.raises(UnsupportedModel, match=why):
        sampled(cache(model), SkippingSampler(comfy.samplers.sampler_object("euler"), BALANCED))
    sampled(cache(model))


def test_model_and_sampler_do_not_both_skip(model: Patcher) -> None:
    by_sampler = SkippingSampler(comfy.samplers.sampler_object("euler"), BALANCED)
    skipping = skip_steps(model, BALANCED)
    with pytest.raises(UnsupportedModel, match="Step Skip and Step Skip Sampler. Remove one"):
        sampled(skipping, by_sampler)
    assert torch.equal(sampled(model, by_sampler), sampled(skipping))
    assert no_tensors_are_kept()


def test_a_second_node_takes_the_place_of_the_first(model: Patcher) -> None:
    seen = watched(model, BALANCED)
    again = skip_steps(seen.patcher, HACKATHON, seen.said.append)
    sampled(again)
    assert seen.steps(schedule_of(model)) == WHOLE_HACKATHON
    sampler = SkippingSampler(comfy.samplers.sampler_object("euler"), BALANCED, seen.said.append)
    sampled(model, SkippingSampler(sampler, HACKATHON, seen.said.append))
    assert [each.preset for each in seen.said] == ["hackathon", "hackathon"]


@pytest.mark.parametrize("preset", [BALANCED, ENDS], ids=["balanced", "custom"])
@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpm_fast"])
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_samplers_with_several_calls_compute_every_step(model: Patcher, sampler: str, preset: Preset) -> None:
    seen = watched(model, preset)
    assert torch.equal(sampled(seen.patcher, sampler), sampled(model, sampler))
    (said,) = seen.said
    assert (said.sampler, said.computed, said.skipped) == (sampler, 20, 0)
    assert str(said).startswith("every step computed: this sampler calls the model several times a step")


def test_samplers_that_were_not_measured_take_custom_alone(model: Patcher) -> None:
    stale = "CFG++ samplers go on from the negative prompt's part too, which a skipped step leaves as it was"
    for sampler, why, remark in (("lcm", "not measured with this sampler", ""), ("euler_cfg_pp", stale, f"; {stale}")):
        seen = watched(model, BALANCED)
        assert torch.equal(sampled(seen.patcher, sampler), sampled(model, sampler))
        assert f"{why}; choose custom to skip steps all the same" in str(seen.said[0])
        seen = watched(model, ANYWHERE)
        sampled(seen.patcher, sampler)
        assert str(seen.said[0]) == f"custom: 14 of 20 steps computed ({sampler}, hold){remark}"
        assert len(seen.sigmas) == 14


def test_distilled_models_take_custom_alone(model: Patcher) -> None:
    distilled = ModelSamplingDiscrete().patch(model, "lcm", False)[0]
    seen = watched(distilled, BALANCED)
    assert torch.equal(sampled(seen.patcher), sampled(distilled))
    assert str(seen.said[0]).startswith("every step computed: this is a distilled model")
    seen = watched(distilled, ANYWHERE)
    sampled(seen.patcher)
    assert seen.said[0].computed == 14
    seen = watched(model, BALANCED)
    sampled(seen.patcher)
    assert seen.said[0].computed == 14, "the model itself is as it was"


def calibrated(sampler: str = "euler", cfg: float = 4.0) -> Preset:
    computed = BALANCED.selection.computed(20)
    return SavedPreset("mine", 20, computed, "SD15", sampler, "karras", cfg, 40.0, "2025-11-30", sigmas=(2.0,)).preset()


def test_a_calibrated_preset_is_for_its_own_sampler_and_guidance(model: Patcher) -> None:
    for preset, cfg, why in (
        (calibrated("dpmpp_2m"), 4.0, "mine was calibrated with dpmpp_2m, and this is euler"),
        (calibrated(cfg=1.0), 4.0, "mine was calibrated at CFG 1, and this is above"),
        (calibrated(), 1.0, "mine was calibrated at CFG above 1, and this is CFG 1"),
    ):
        seen = watched(model, preset)
        sampled(seen.patcher, cfg=cfg)
        assert str(seen.said[0]).startswith(f"every step computed: {why}")
    seen = watched(model, calibrated("ddim"))
    sampled(seen.patcher, "euler")
    assert seen.said[0].computed == 14, "the same method"


def test_a_calibrated_preset_says_what_else_is_not_as_it_was(model: Patcher, caplog: pytest.LogCaptureFixture) -> None:
    seen = watched(model, calibrated(cfg=2.5))
    for _ in range(2):
        sampled(seen.patcher)
    differs = "calibrated with another schedule (karras) and CFG 2.5"
    told = f"mine: 14 of 20 steps computed (euler, measured with bend); {differs}"
    assert [str(said) for said in seen.said] == [told] * 2
    assert caplog.text.count(differs) == 1, "said once"


class Bends(comfy.samplers.CFGGuider):
    """Predicts something of latents of any shape."""

    def predict_noise(self, x: torch.Tensor, timestep: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x / (1 + timestep[0]))


@pytest.mark.parametrize("by_sampler", [False, True], ids=["Step Skip", "Step Skip Sampler"])
def test_latents_of_several_parts_take_custom_alone(model: Patcher, by_sampler: bool) -> None:
    NestedTensor = pytest.importorskip("comfy.nested_tensor", reason="no packed latents").NestedTensor
    noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    parts = NestedTensor([noise[0], noise[1, :, :, :2]])
    for preset, computed in ((BALANCED, 20), (ANYWHERE, 14)):
        seen = watched(model, None if by_sampler else preset)
        sampler = comfy.samplers.sampler_object("euler")
        skipping = SkippingSampler(sampler, preset, seen.said.append) if by_sampler else sampler
        guider = Bends(seen.patcher)
        guider.calls = 0
        guider.set_cfg(4.0)
        nothing = NestedTensor([torch.zeros_like(part) for part in parts.unbind()])
        guider.sample(parts, nothing, skipping, schedule_of(model), disable_pbar=True, seed=1)
        assert guider.calls == seen.said[0].computed == computed and seen.said[0].rule == "hold"
        assert ("latents of several parts" in seen.said[0].reason) == (computed == 20)


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_how_often_comfyui_s_samplers_call_the_model_is_known(model: Patcher) -> None:
    for name in comfy.samplers.SAMPLER_NAMES:
        seen = watched(model)
        sampled(seen.patcher, name, steps=4)
        kind = kind_of(sampler_name(comfy.samplers.sampler_object(name)))
        several = len(seen.sigmas) != 4 or name == "dpm_fast"
        assert (kind is SamplerKind.SEVERAL_CALLS) == several, name


def test_of_a_foreign_sampler_calls_are_counted(model: Patcher) -> None:
    def sample_twice(model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any, **_: Any) -> torch.Tensor:
        for sigma, after in itertools.pairwise(sigmas):
            middle = (sigma + after) / 2
            for at, to in ((sigma, middle), (middle, after)):
                denoised = model(x, at * x.new_ones(len(x)), **extra_args)
                x = denoised + (x - denoised) * to / at
        return x

    seen = watched(model, ENDS)
    found = sampled(seen.patcher, comfy.samplers.KSAMPLER(sample_twice))
    assert found.isfinite().all() and len(seen.sigmas) == 22
    assert str(seen.said[0]) == "custom: 22 calls of the model computed and 18 skipped in 20 steps (twice, hold)"
    seen = watched(model, BALANCED)
    sampled(seen.patcher, comfy.samplers.KSAMPLER(sample_twice))
    assert len(seen.sigmas) == 40 and seen.said[0].reason


def test_short_runs_compute_every_step(model: Patcher) -> None:
    for preset, steps in itertools.product(PRESETS.values(), (11, 19)):
        seen = watched(model, preset)
        assert torch.equal(sampled(seen.patcher, steps=steps), sampled(model, steps=steps))
        assert str(seen.said[0]).startswith(f"every step computed: a run of {steps} steps is short: the presets were")
    seen = watched(model, custom(Selection(listed="0 2 4")))
    sampled(seen.patcher, steps=5)
    assert seen.steps(schedule_of(model, 5)) == [0, 2, 4]
    assert seen.said[0].remark == "a run of 5 steps is short: the presets were measured with 20 and more"


@pytest.mark.parametrize(
    ("scheduler", "cfg", "computed"),
    [("normal", 4.0, 14), ("normal", 8.0, 20), ("karras", 4.0, 14), ("karras", 8.0, 17), ("karras", 1.0, 14)],
)
def test_a_preset_computes_more_or_all_steps_where_it_was_too_far_off(
    model: Patcher, scheduler: str, cfg: float, computed: int
) -> None:
    seen = watched(model, BALANCED)
    sigmas = comfy.samplers.KSampler(model, 20, torch.device("cpu"), "dpmpp_2m", scheduler, 1.0).sigmas
    found = sampled(seen.patcher, "dpmpp_2m", sigmas, cfg=cfg)
    assert (len(set(seen.sigmas)), seen.said[0].computed, seen.said[0].skipped) == (computed, computed, 20 - computed)
    whole = sampled(model, "dpmpp_2m", sigmas, cfg=cfg)
    assert torch.equal(found, whole) == (computed == 20)
    if computed == 20:
        assert "balanced was measured too far from the picture of all steps: 35.0 dB" in seen.said[0].reason


# ---- parts of a schedule, and what is shown meanwhile


def test_what_is_foreseen_of_a_runs_steps_is_what_the_run_has(model: Patcher) -> None:
    """ddim_uniform makes 20 steps where 19 are asked for."""
    guider, euler = comfy.samplers.CFGGuider(model), comfy.samplers.sampler_object("euler")
    for scheduler, steps, denoise in itertools.product(
        ("normal", "karras", "simple", "ddim_uniform", "beta"), (12, 15, 19, 20), (0.7, 1.0)
    ):
        sigmas = comfy.samplers.KSampler(model, steps, torch.device("cpu"), "euler", scheduler, denoise).sigmas
        run = task_of(guider, euler, sigmas, None, False)
        assert foreseen_steps("euler", scheduler, steps, denoise) == run.steps, (scheduler, steps, denoise)
    assert foreseen_steps("euler", "ddim_uniform", 19) == 20
    assert foreseen_steps("euler", "normal", 20, start_at_step=8) == 12
    assert foreseen_steps("euler", "of another pack", 20, end_at_step=15) == 15


def test_img2img_skips_in_its_own_steps(model: Patcher) -> None:
    seen, picture = watched(model, BALANCED), sampled(model)
    sigmas = schedule_of(model, denoise=0.5)
    assert len(sigmas) == 21 and sigmas[0] < schedule_of(model)[0] / 2
    found = sampled(seen.patcher, sigmas=sigmas, latent=picture)
    assert seen.steps(sigmas) == list(BALANCED.selection.computed(20))
    assert distance(found, sampled(model, sigmas=sigmas, latent=picture)) < 0.3


def test_short_img2img_computes_every_step(model: Patcher) -> None:
    """12 steps at denoise 0.6 are as small as those of a run of 20, and were not measured."""
    seen, picture = watched(model, BALANCED), sampled(model)
    sigmas = schedule_of(model, 12, denoise=0.6)
    found = sampled(seen.patcher, sigmas=sigmas, latent=picture)
    assert torch.equal(found, sampled(model, sigmas=sigmas, latent=picture))
    assert seen.said[0].reason.startswith("a run of 12 steps is short") and seen.said[0].computed == 12


@pytest.mark.parametrize("start, end, computed", [(8, 30, 15), (0, 20, 14), (2, 22, 14), (12, 30, 18), (0, 14, 14)])
def test_a_part_of_a_run_counts_its_own_steps(model: Patcher, start: int, end: int, computed: int) -> None:
    seen, latent = watched(model, BALANCED), {"samples": sampled(model)}
    (made,) = nodes.KSamplerAdvanced().sample(
        seen.patcher, "enable", 1, 30, 4.0, "euler", "normal", *prompts(), latent, start, end, "enable"
    )
    own, said = end - start, seen.said[0]
    assert made["samples"].isfinite().all() and (said.steps, said.computed) == (own, computed)
    assert said.reason.startswith(f"a run of {own} steps is short" if own < 20 else "") and bool(said.reason) == (
        own < 20
    )
    steps = range(own) if own < 20 else BALANCED.selection.computed(own)
    assert seen.steps(schedule_of(model, 30)) == [start + step for step in steps]


@pytest.mark.parametrize("sampler", KEPT)
def test_a_preview_comes_for_every_step(model: Patcher, sampler: str) -> None:
    shown: list[int] = []

    def callback(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> None:
        assert denoised.isfinite().all() and denoised.shape == x.shape and total == 20
        shown.append(step)

    sampled(skip_steps(model, BALANCED), sampler, callback=callback)
    assert shown == list(range(20))
