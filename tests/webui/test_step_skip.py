"""Step skipping in a real WebUI: which steps are computed, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import scripts

from slipstream.sampling.presets import PRESETS
from slipstream.tests.tensors import distance
from slipstream.tests.webui.support import tiny
from slipstream.tests.webui.support.pictures import ENGINE, OFF, STEPS, Counting, picture

STEPS_OF_RUN = 20


@pytest.fixture(autouse=True)
def model() -> Any:
    return tiny.load()


class Watching(scripts.Script):
    """Notes each call of the model."""

    def __init__(self) -> None:
        self.sigmas: list[float] = []

    def title(self) -> str:
        return "watching"

    def process_before_every_sampling(self, p: Any, *_: Any, **__: Any) -> None:
        def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
            self.sigmas.append(float(given["timestep"][0]))
            return apply_model(given["input"], given["timestep"], **given["c"])

        made = p.sd_model.forge_objects.unet.clone()
        made.set_model_unet_function_wrapper(wrapper)
        p.sd_model.forge_objects.unet = made


def skipping(preset: str, backend: str = "off") -> tuple[str, ...]:
    return backend, "first use", preset, "auto"


@pytest.mark.parametrize("preset", ["quality", "balanced", "fast"])
def test_a_preset_computes_the_steps_that_it_says(preset: str) -> None:
    every, some = Watching(), Watching()
    full = picture(OFF, every, steps=STEPS_OF_RUN)
    made = picture(skipping(preset), some, steps=STEPS_OF_RUN)
    computed = PRESETS[preset].selection.computed(STEPS_OF_RUN)
    assert some.sigmas == pytest.approx([every.sigmas[step] for step in computed])
    assert made.said[STEPS].startswith(f"{preset}: {len(computed)} of {STEPS_OF_RUN} steps computed (euler, ")
    assert 0 < distance(made.latent, full.latent) < 0.5


def test_skipped_steps_and_engines_go_together() -> None:
    plain = picture(skipping("balanced"), steps=STEPS_OF_RUN)
    with Counting() as counted:
        fast = picture(skipping("balanced", "auto"), steps=STEPS_OF_RUN)
    assert (counted.engine, counted.eager) == (len(PRESETS["balanced"].selection.computed(STEPS_OF_RUN)), 0)
    assert distance(fast.latent, plain.latent) < 1e-4


def test_multistep_and_ddim_are_known_by_their_names() -> None:
    made = picture(skipping("balanced"), steps=STEPS_OF_RUN, sampler_name="DPM++ 2M")
    assert "14 of 20 steps computed (dpmpp_2m, " in made.said[STEPS]


def test_ddim_whose_steps_are_times() -> None:
    watch = Watching()
    made = picture(skipping("fast"), watch, steps=STEPS_OF_RUN, sampler_name="DDIM")
    assert "(ddim, " in made.said[STEPS]
    assert f"{len(watch.sigmas)} of " in made.said[STEPS]


def test_a_short_run_skips_nothing_and_says_why() -> None:
    made, plain = picture(skipping("balanced")), picture(OFF)
    assert made.said[STEPS].startswith("every step computed: a run of 4 steps is short")
    assert torch.equal(made.latent, plain.latent)


def test_a_prompt_that_changes_within_the_run_is_computed_where_it_does() -> None:
    watch = Watching()
    picture(skipping("extreme"), watch, steps=STEPS_OF_RUN, prompt="[a fox:a dog:0.5]", sampler_name="Euler a")
    plain = Watching()
    picture(skipping("extreme"), plain, steps=STEPS_OF_RUN, prompt="a fox", sampler_name="Euler a")
    assert set(plain.sigmas) < set(watch.sigmas)


def test_the_options_of_the_model_are_as_before(model: Any) -> None:
    picture(skipping("fast"), steps=STEPS_OF_RUN)
    assert not model.forge_objects.unet.model_options.get("conditioning_modifiers")


def test_progress_and_engine_texts_are_gone_after_the_picture() -> None:
    from modules import shared

    picture(ENGINE)
    assert not str(shared.state.textinfo or "").startswith("Slipstream")
