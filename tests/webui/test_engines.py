"""Pictures of a real WebUI through engines: as the plain model makes them, or with a reason for the plain model."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from modules import scripts, sd_models, shared

from slipstream.core.errors import BuildCancelled
from slipstream.core.spec import Role
from slipstream.hosts.forge.checkpoint_builder import CheckpointBuilder
from slipstream.hosts.webui_process import provider
from slipstream.runtime.provider import HostHooks
from slipstream.runtime.requests.build_requests import Wanted
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings, parse_resolutions
from slipstream.tests.tensors import distance
from slipstream.tests.webui.support import tiny
from slipstream.tests.webui.support.pictures import ENGINE, ENGINES, OFF, Counting, picture

TOLERANCE = 1e-4


@pytest.fixture
def model() -> Any:
    return tiny.load()


def test_a_picture_by_engine_is_the_plain_one(model: Any) -> None:
    plain = picture(OFF)
    with Counting() as counted:
        fast = picture(ENGINE)
    assert (counted.engine, counted.eager) == (4, 0)
    assert distance(fast.latent, plain.latent) < TOLERANCE
    assert fast.said[ENGINES].startswith("4 calls by engine") and ENGINES in fast.info
    assert ENGINES not in plain.said


def test_each_pass_of_hires_fix_says_what_it_did(model: Any) -> None:
    hires = {"enable_hr": True, "hr_scale": 1.0, "hr_upscaler": "None", "denoising_strength": 0.75, "hr_cfg": 5.0}
    hires |= {"hr_additional_modules": ["Use same choices"]}
    plain = picture(OFF, **hires)
    with Counting() as counted:
        fast = picture(ENGINE, **hires)
    assert (counted.engine, counted.eager) == (4 + 4, 0)
    assert distance(fast.latent, plain.latent) < 0.02  # in between the picture has 256 shades
    assert fast.said[ENGINES].startswith("4 calls by engine")
    assert "calls by engine" in fast.said[f"{ENGINES} hires"]


@pytest.mark.parametrize("online", [False, True], ids=["merged", "on the fly"])
def test_a_lora_that_comes_changes_and_goes(model: Any, online: bool) -> None:
    before = picture(OFF)
    seen = []
    for seed, strength in ((5, 1.0), (5, 0.4), (6, 1.0)):
        tiny.lora(model, seed, strength, online)
        plain = picture(OFF)
        with Counting() as counted:
            fast = picture(ENGINE)
        assert (counted.engine, counted.eager) == (4, 0), counted.reasons
        assert distance(fast.latent, plain.latent) < TOLERANCE
        seen.append(fast.latent)
    assert distance(seen[0], seen[1]) > 1e-3 and distance(seen[0], seen[2]) > 1e-3
    model.forge_objects_after_applying_lora = model.forge_objects_original.shallow_copy()
    with Counting() as counted:
        after = picture(ENGINE)
    assert counted.engine == 4 and distance(after.latent, before.latent) < TOLERANCE


def test_another_checkpoint_uses_the_same_engine_with_its_own_weights() -> None:
    tiny.load(seed=1)
    first = picture(ENGINE)
    tiny.load(seed=2)
    plain = picture(OFF)
    with Counting() as counted:
        fast = picture(ENGINE)
    assert counted.engine == 4 and distance(fast.latent, plain.latent) < TOLERANCE
    assert distance(fast.latent, first.latent) > 1e-2


def test_weights_that_are_cast_at_each_call() -> None:
    tiny.load(storage=torch.bfloat16)
    plain = picture(OFF)
    with Counting() as counted:
        fast = picture(ENGINE)
    assert counted.engine == 4, counted.reasons
    assert distance(fast.latent, plain.latent) < TOLERANCE


def test_a_model_that_was_unloaded_in_between(model: Any) -> None:
    from backend import memory_management

    first = picture(ENGINE)
    memory_management.unload_all_models()
    with Counting() as counted:
        again = picture(ENGINE)
    assert counted.engine == 4 and distance(again.latent, first.latent) < TOLERANCE


class Patching(scripts.Script):
    """Another extension, which does something to each run's UNet."""

    def __init__(self, change: Any) -> None:
        self._change = change

    def title(self) -> str:
        return "patching"

    def process_before_every_sampling(self, p: Any, *_: Any, **__: Any) -> None:
        made = p.sd_model.forge_objects.unet.clone()
        self._change(made)
        p.sd_model.forge_objects.unet = made


def _attention(unet: Any) -> None:
    unet.set_model_attn1_patch(lambda n, context, value, options: (n * 1.1, context, value))


def _replaced(unet: Any) -> None:
    unet.set_model_attn2_replace(lambda q, k, v, options: v[:, :1].expand_as(q) * 0.1 + q, "middle", 0)


def _modifier(unet: Any) -> None:
    unet.add_block_modifier(lambda h, when, options: h * 1.01)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_attention, "another extension patches the model (attn1_patch)"),
        (_replaced, "another extension replaces parts of the model (attn2)"),
        (_modifier, "another extension changes the model between its blocks"),
    ],
)
def test_what_engines_cannot_honour_runs_plain_and_says_why(model: Any, change: Any, reason: str) -> None:
    plain = picture(OFF, Patching(change))
    with Counting() as counted:
        fast = picture(ENGINE, Patching(change))
    assert (counted.engine, counted.eager) == (0, 4)
    assert torch.equal(fast.latent, plain.latent)
    assert f"4 by your model: {reason}" in fast.said[ENGINES]


def test_another_extensions_wrapper_stays_outside_of_the_engine(model: Any) -> None:
    seen: list[int] = []

    def wrap(unet: Any) -> None:
        def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
            seen.append(len(given["input"]))
            return apply_model(given["input"], given["timestep"], **given["c"]) * 0.99

        unet.set_model_unet_function_wrapper(wrapper)

    plain = picture(OFF, Patching(wrap))
    with Counting() as counted:
        fast = picture(ENGINE, Patching(wrap))
    assert counted.engine == 4 and seen == [2] * 8
    assert distance(fast.latent, plain.latent) < TOLERANCE


class Control:
    """What a ControlNet is to the WebUI's sampling, with residuals that need no network."""

    def __init__(self) -> None:
        self.previous_controlnet = None
        self.transformer_options: dict[str, Any] = {}

    def get_control(self, x: torch.Tensor, *_: Any) -> dict[str, list[Any]]:
        middle = torch.full((len(x), 64, x.shape[2] // 2, x.shape[3] // 2), 0.3)
        return {"input": [], "middle": [middle], "output": []}

    def pre_run(self, *_: Any) -> None:
        pass

    def cleanup(self) -> None:
        pass

    def get_models(self) -> list[Any]:
        return []

    def inference_memory_requirements(self, dtype: Any) -> int:
        return 0

    def set_previous_controlnet(self, control: Any) -> Any:
        self.previous_controlnet = control
        return self


def test_a_controlnet_goes_through_an_engine_of_its_own(model: Any) -> None:
    def control(unet: Any) -> None:
        unet.add_patched_controlnet(Control())

    without = picture(OFF)
    plain = picture(OFF, Patching(control))
    with Counting() as counted:
        fast = picture(ENGINE, Patching(control))
    assert counted.engine == 4, counted.reasons
    assert distance(fast.latent, plain.latent) < TOLERANCE
    assert distance(fast.latent, without.latent) > 1e-3


def test_an_error_in_the_midst_leaves_the_model_as_it_was(model: Any) -> None:
    def fail(unet: Any) -> None:
        def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
            raise RuntimeError("another extension's fault")

        unet.set_model_unet_function_wrapper(wrapper)

    with pytest.raises(RuntimeError, match="another extension's fault"):
        picture(ENGINE, Patching(fail))
    kmodel = model.forge_objects_original.unet.model
    assert "apply_model" not in vars(kmodel) and "diffusion_model" not in vars(kmodel)
    with Counting() as counted:
        picture(ENGINE)
    assert counted.engine == 4


def test_a_model_without_engines_says_so(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(model.forge_objects.unet.model.diffusion_model)
    monkeypatch.setattr(model.forge_objects.unet.model.diffusion_model, "__class__", type("Flux", (kind,), {}))
    assert "Flux models have no engines in this WebUI" in picture(ENGINE).said[ENGINES]


def test_a_refiner_keeps_the_run_plain(model: Any) -> None:
    class Refining(Patching):
        def process(self, p: Any, *_: Any) -> None:
            p.refiner_checkpoint_info, p.refiner_switch_at = model.sd_checkpoint_info, 1e-9

    with Counting() as counted:
        made = picture(ENGINE, Refining(lambda unet: None))
    assert counted.engine == 0 and "a refiner takes over" in made.said[ENGINES]


def test_a_size_without_engine_runs_plain_where_none_is_to_be_built(model: Any) -> None:
    manual = ("auto", "manual", "off", "auto")
    plain = picture(OFF, width=128)
    with Counting(manual) as counted:
        made = picture(manual, width=128)
    assert (counted.engine, counted.eager) == (0, 4) and torch.equal(made.latent, plain.latent)
    assert "4 by your model: " in made.said[ENGINES]


def test_a_choice_that_nobody_offers_runs_plain_and_says_so(model: Any) -> None:
    made = picture(("fastest", "first use", "off", "auto"))
    assert made.said[ENGINES].startswith("plain model: 'fastest' is not offered here")


def test_interrupt_ends_the_wait_for_a_build(model: Any) -> None:
    def interrupt() -> None:
        shared.state.interrupted = True

    timer = threading.Timer(3.0, interrupt)
    began = time.monotonic()
    timer.start()
    try:
        picture(ENGINE, width=192)
    finally:
        timer.cancel()
        shared.state.interrupted = False
    assert 2.5 < time.monotonic() - began < 30
    for ticket in provider().queue.pending():
        assert ticket.wait(10)
    assert not str(shared.state.textinfo or "").startswith("Slipstream")
    kmodel = model.forge_objects_original.unet.model
    assert "apply_model" not in vars(kmodel) and "diffusion_model" not in vars(kmodel)


def test_an_order_that_was_cancelled_while_pictures_were_made_ends_at_once() -> None:
    from modules.call_queue import queue_lock

    def check() -> None:
        assert not queue_lock.acquire(False)  # from here on pictures wait for it
        raise BuildCancelled("enough")

    settings = Settings(policy=BuildPolicy.FIRST_USE, resolutions=parse_resolutions("64x64"))
    wanted = Wanted("exchanged meanwhile", Role.UNET, settings, 2, 77)
    hooks = HostHooks(check_interrupted=check, interruptions=(BuildCancelled,))
    with pytest.raises(BuildCancelled, match="enough"):
        list(CheckpointBuilder(provider()).make(wanted, hooks))


def test_the_page_loads_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        pytest.fail("it was loaded")

    monkeypatch.setattr(sd_models.model_data, "sd_model", None)
    monkeypatch.setattr(sd_models.model_data, "get_sd_model", load)
    assert CheckpointBuilder(provider()).models() == []


def test_the_page_orders_engines_for_the_loaded_checkpoint(model: Any) -> None:
    builder = CheckpointBuilder(provider())
    settings = Settings(policy=BuildPolicy.FIRST_USE, resolutions=parse_resolutions("64x64"))
    assert builder.models() == ["tiny"] and (builder.parameter_count("tiny", Role.UNET) or 0) > 100_000
    (line,) = builder.make(Wanted("tiny", Role.UNET, settings, 2, 77), HostHooks())
    assert line.endswith("ready") and "SD15 64×64 batch 2" in line
    with Counting() as counted:
        picture(ENGINE)
    assert counted.engine == 4
