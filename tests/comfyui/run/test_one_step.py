"""One step of each kind: every sampler takes it, whatever else hangs on the model."""

from __future__ import annotations

from typing import Any

import comfy.samplers
import pytest
import torch

from slipstream.hosts.comfy.dry_run.one_step import first_steps, one_step
from slipstream.hosts.comfy.skip.skipping_sampler import SkippingSampler
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.sampling.presets import PRESETS, Selection, custom
from slipstream.tests.comfyui.support.models import tiny

STEPS = 20
LISTED = custom(Selection(listed="0 1 2 5 9 19"))


class Calls:
    """A model whose steps are counted."""

    def __init__(self) -> None:
        from comfy.patcher_extension import WrappersMP

        self.sigmas: list[float] = []
        self.patcher = tiny.model()
        self.patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "count", self._count)

    def _count(self, executor: Any, x: Any, timestep: Any, *rest: Any, **more: Any) -> Any:
        self.sigmas.append(float(timestep.flatten()[0]))
        return executor(x, timestep, *rest, **more)


@pytest.mark.parametrize("sampler", comfy.samplers.KSampler.SAMPLERS)
def test_every_sampler_takes_it(sampler: str) -> None:
    calls = Calls()
    found = tiny.sample(one_step(calls.patcher), steps=STEPS, sampler=sampler)
    assert found.isfinite().all() and found.shape == (1, 4, 8, 8)
    most = 100 if sampler in ("dpm_fast", "dpm_adaptive") else 8  # these choose their steps by themselves
    assert 1 <= len(calls.sigmas) <= most


def test_nothing_of_it_stays_in_the_model() -> None:
    calls = Calls()
    before = tiny.sample(calls.patcher, steps=4)
    tiny.sample(one_step(calls.patcher), steps=4)
    assert torch.equal(tiny.sample(calls.patcher, steps=4), before) and len(calls.sigmas) == 9
    assert one_step("no model") == "no model"


def test_no_preview_is_shown() -> None:
    seen: list[int] = []
    patcher = tiny.model()
    for model in (patcher, one_step(patcher)):
        tiny.sample(model, steps=4, callback=lambda step, *_: seen.append(step))
        assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["before", "after", "both"])
@pytest.mark.parametrize("preset", [PRESETS["balanced"], LISTED], ids=["balanced", "listed"])
def test_step_skip_in_the_same_model_skips_nothing(order: str, preset: Any) -> None:
    calls = Calls()
    patcher = skip_steps(calls.patcher, preset) if order != "after" else calls.patcher
    patcher = one_step(patcher)
    patcher = skip_steps(patcher, preset) if order != "before" else patcher
    assert tiny.sample(patcher, steps=STEPS).isfinite().all()
    assert len(calls.sigmas) == 1


def test_a_skipping_sampler_is_the_plain_one() -> None:
    calls = Calls()
    model = skip_steps(one_step(calls.patcher), LISTED)
    sampler = SkippingSampler(comfy.samplers.sampler_object("euler"), LISTED)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "normal", STEPS)
    latent = tiny.latent()["samples"]
    comfy.samplers.sample(
        model, torch.randn_like(latent), tiny.conditioning(), tiny.conditioning(seed=2), 7.0,
        model.load_device, sampler, sigmas, latent_image=latent, seed=1,
    )  # fmt: skip
    assert len(calls.sigmas) == 1


def test_a_step_with_each_company_of_controlnets_and_prompts() -> None:
    calls = Calls()
    control = tiny.controlnet()
    control.set_cond_hint(torch.rand(1, 3, 64, 64), 1.0, (0.25, 0.7))
    positive = tiny.conditioning(control=control, control_apply_to_uncond=True)
    tiny.sample(one_step(calls.patcher), steps=STEPS, positive=positive)
    assert len(calls.sigmas) == 3, "without, with, and without control again"
    assert sorted(calls.sigmas, reverse=True) == calls.sigmas


def test_first_steps() -> None:
    sigmas = torch.tensor([10.0, 8.0, 6.0, 4.0, 0.0])
    assert first_steps(sigmas, []) == [0]
    assert first_steps(sigmas, [7.0]) == [0, 2]
    assert first_steps(sigmas, [8.0]) == [0, 1, 2], "both ends of a window belong to it"
    assert first_steps(sigmas[:1], []) == [0]
