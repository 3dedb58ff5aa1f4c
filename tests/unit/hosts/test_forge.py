"""What of the Forge host needs no WebUI: choices, words, the sampler's task, and how calls are led."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.core.spec import Role
from slipstream.hosts.forge.calls import calls_led
from slipstream.hosts.forge.checkpoint_builder import CheckpointBuilder
from slipstream.hosts.forge.choices import NO_PRESET, Choices, preset_names
from slipstream.hosts.forge.fallback_reasons import why_not_this_call, why_not_this_run
from slipstream.hosts.forge.families import family_of, scaled_dot_product_attention
from slipstream.hosts.forge.sampling import lead_next_sampling
from slipstream.hosts.forge.task import task_of
from slipstream.hosts.info_text import of_engines
from slipstream.runtime.provider import HostHooks
from slipstream.runtime.requests.build_requests import Wanted
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings
from slipstream.sampling.presets import PRESETS


def test_choices_are_the_nodes_own_words() -> None:
    chosen = Choices.of_text("compiled", "first use", "balanced", "512x512")
    assert chosen.settings.backend is BackendChoice.COMPILED
    assert chosen.settings.policy is BuildPolicy.FIRST_USE
    assert chosen.preset is not None and chosen.preset.name == "balanced"
    assert Choices.of_text("off", preset=NO_PRESET).is_idle
    assert Choices.of_text().is_idle  # a picture that another extension makes, which knows of no choices


@pytest.mark.parametrize(
    "wrong", [("fastest",), ("auto", "never"), ("auto", "manual", "tiny"), ("auto", "manual", "off", "5")]
)
def test_a_choice_that_is_not_offered(wrong: tuple[str, ...]) -> None:
    with pytest.raises(ValueError):
        Choices.of_text(*wrong)


def test_every_preset_can_be_chosen() -> None:
    assert all(Choices.of_text(preset=name) for name in preset_names())


def test_words_of_a_run() -> None:
    engine = {"calls": 3, "digest": "0123456789abcdef", "label": "SD15 512×512 batch 2"}
    said = of_engines({"engines": [engine], "reasons": {"no engine yet": 1}})
    assert said == "3 calls by engine 0123456789ab (SD15 512×512 batch 2); 1 by your model: no engine yet"
    assert of_engines({"engines": [], "reasons": {}}) == "no call of the model"


def sampler(name: str, **more: Any) -> Any:
    denoiser = SimpleNamespace(mask=None, **more)
    return SimpleNamespace(funcname=name, func=SimpleNamespace(__name__=name), eta=0.0, model_wrap_cfg=denoiser)


def processing(**more: Any) -> Any:
    return SimpleNamespace(**{"cfg_scale": 5.0, "is_hr_pass": False, "extra_generation_params": {}, **more})


def test_the_task_of_a_run_by_sigmas() -> None:
    task = task_of(processing(), sampler("sample_dpmpp_2m"), {"sigmas": torch.tensor([3.0, 1.0, 0.0])})
    assert not isinstance(task, str)
    assert (task.sampler, task.steps, task.guided, task.sigmas) == ("dpmpp_2m", 2, True, (3.0, 1.0, 0.0))


def test_models_for_few_steps_are_known_by_their_names() -> None:
    given = {"sigmas": torch.tensor([3.0, 1.0, 0.0])}
    for more in ({"sd_model_name": "sdxl_turbo"}, {"prompt": "a fox <lora:sdxl_lightning_8step:1>"}):
        task = task_of(processing(**more), sampler("sample_euler"), given)
        assert (
            not isinstance(task, str)
            and task.is_distilled
            and task.distilled_by in ("sdxl_turbo", "sdxl_lightning_8step")
        )
    task = task_of(processing(sd_model_name="base", prompt="turbo <lora:detail:1>"), sampler("sample_euler"), given)
    assert not isinstance(task, str) and not task.is_distilled


def test_the_historical_preset_is_taken_and_not_offered() -> None:
    assert "hackathon" not in preset_names() and "balanced" in preset_names()
    assert Choices.of_text(preset="hackathon").preset is PRESETS["hackathon"]


def test_the_task_of_a_hires_pass_has_its_own_guidance() -> None:
    task = task_of(processing(is_hr_pass=True, hr_cfg=1.0), sampler("sample_euler"), {"sigmas": torch.tensor([1.0, 0])})
    assert not isinstance(task, str) and not task.guided


def test_the_task_of_a_run_by_times() -> None:
    alphas = torch.linspace(0.99, 0.01, 10)
    model = SimpleNamespace(inner_model=SimpleNamespace(alphas_cumprod=alphas))
    task = task_of(processing(), sampler("ddim", inner_model=model), {"timesteps": torch.tensor([0, 3, 6, 9])})
    assert not isinstance(task, str)
    assert task.steps == 3 and list(task.sigmas) == sorted(task.sigmas, reverse=True)


def test_a_sampler_that_chooses_its_steps() -> None:
    assert task_of(processing(), sampler("sample_dpm_adaptive"), {"sigma_min": 0.1}) == (
        "the sampler dpm_adaptive chooses its steps as it goes"
    )


def test_a_sampler_of_an_unknown_kind_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    p = processing(sampler=SimpleNamespace())
    lead_next_sampling(p, Choices.of_text("auto"))
    assert p.extra_generation_params == {"Slipstream": "plain model: the sampler SimpleNamespace is of an unknown kind"}


class Sampler:
    def launch_sampling(self, steps: int, func: Any) -> Any:
        return func()


def test_the_last_call_of_a_script_counts_and_each_leads_one_run() -> None:
    sampler, runs = Sampler(), []
    p = processing(sampler=sampler)
    sampler.func = lambda *_, **__: runs.append(1)  # type: ignore[attr-defined]
    p.sd_model = None
    for _ in range(2):
        lead_next_sampling(p, Choices.of_text("off", preset="balanced"))
    for _ in range(2):
        sampler.launch_sampling(4, lambda: runs.append(2))
        assert "launch_sampling" not in vars(sampler)
    assert runs == [2, 2]


def test_steps_of_an_unknown_webui_are_not_skipped_and_that_is_said() -> None:
    sampler = Sampler()
    unet = SimpleNamespace()
    p = processing(sampler=sampler, sd_model=SimpleNamespace(forge_objects=SimpleNamespace(unet=unet)))
    sampler.__dict__.update(funcname="sample_euler", eta=0.0, model_wrap_cfg=SimpleNamespace(mask=None))
    sampler.__dict__.update(func=lambda *_, **__: "plain")
    lead_next_sampling(p, Choices.of_text("off", preset="balanced"))
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    assert sampler.launch_sampling(2, lambda: sampler.func(None, sigmas=sigmas)) == "plain"  # type: ignore[attr-defined]
    said = "every step computed: SimpleNamespace is of no WebUI that Slipstream knows"
    assert p.extra_generation_params == {"Slipstream steps": said}


def test_what_another_extension_put_there_stays() -> None:
    sampler = Sampler()
    theirs = lambda steps, func: "theirs"  # noqa: E731
    sampler.launch_sampling = theirs  # type: ignore[method-assign]
    p = processing(sampler=sampler)
    lead_next_sampling(p, Choices.of_text("off", preset="balanced"))
    sampler.func = print  # type: ignore[attr-defined]
    assert sampler.launch_sampling(4, print) == "theirs"
    assert sampler.launch_sampling is theirs


def test_what_an_earlier_batch_said_is_forgotten() -> None:
    p = processing(extra_generation_params={"Slipstream": "x", "Slipstream hires": "y", "Eta": 1})
    lead_next_sampling(p, Choices.of_text("off"))
    assert p.extra_generation_params == {"Eta": 1}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = torch.nn.Linear(2, 2)

    def apply_model(self, x: torch.Tensor) -> torch.Tensor:
        return self.diffusion_model(x)


def test_calls_are_led_and_nothing_stays_behind() -> None:
    model, x = Model(), torch.ones(1, 2)

    def compute(module: Any, plain: Any, args: Any, kwargs: Any) -> torch.Tensor:
        assert module is model.diffusion_model is model._modules["diffusion_model"]
        return 2 * plain(*args, **kwargs)

    with calls_led(model, compute):
        assert torch.equal(model.apply_model(x), 2 * model.diffusion_model(x))
    assert "apply_model" not in vars(model) and torch.equal(model.apply_model(x), model.diffusion_model(x))


def test_a_wrapper_of_before_is_there_again() -> None:
    model, x = Model(), torch.ones(1, 2)
    before = model.apply_model
    model.apply_model = lambda x: 3 * before(x)  # type: ignore[method-assign]
    own = model.apply_model
    with calls_led(model, lambda module, plain, args, kwargs: plain(*args)):
        assert torch.equal(model.apply_model(x), 3 * model.diffusion_model(x))
    assert model.apply_model is own


def test_who_keeps_a_call_that_was_led_gets_the_plain_model() -> None:
    model, x = Model(), torch.ones(1, 2)
    with calls_led(model, lambda *_: torch.zeros(1, 2)):
        kept = model.apply_model
    assert torch.equal(kept(x), model.diffusion_model(x))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patches": {"attn1_patch": [print]}}, "another extension patches the model (attn1_patch)"),
        ({"block_modifiers": [print]}, "between its blocks"),
        ({"group_norm_wrapper": print}, "replaces a normalisation"),
        ({"wrappers": {"diffusion_model": {"x": [print]}}}, "another extension wraps the model"),
    ],
)
def test_vetoes_of_a_call(options: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not_this_call({"transformer_options": options}))
    assert why_not_this_call({"transformer_options": {"patches": {}}, "control_model": object()}) is None


def test_vetoes_of_a_run() -> None:
    patcher = SimpleNamespace(model=SimpleNamespace(), object_patches={})
    assert why_not_this_run(processing(), patcher) is None
    assert "refiner" in str(why_not_this_run(processing(refiner_checkpoint_info=1, refiner_switch_at=0.8), patcher))
    compiled = SimpleNamespace(model=SimpleNamespace(_torch_compile_config=("dynamic",)), object_patches={})
    assert "torch.compile" in str(why_not_this_run(processing(), compiled))
    replaced = SimpleNamespace(model=SimpleNamespace(), object_patches={"diffusion_model.out": 1})
    assert "diffusion_model.out" in str(why_not_this_run(processing(), replaced))


def test_a_patcher_of_nobody_we_know() -> None:
    assert family_of(object()) is None


def test_attention_is_the_usual_one() -> None:
    q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
    parts = [part.view(2, 6, 2, 4).transpose(1, 2) for part in (q, k, v)]
    weights = torch.softmax(parts[0] @ parts[1].transpose(-1, -2) / 2, dim=-1)
    wanted = (weights @ parts[2]).transpose(1, 2).reshape(2, 6, 8)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, 2), wanted)


def test_an_engine_that_no_picture_would_ask_for_is_not_built() -> None:
    wanted = Wanted("loaded", Role.UNET, Settings.of_text(resolutions="64x64", bake=True), 1, 77)
    with pytest.raises(UnsupportedModel, match="build without baking"):
        list(CheckpointBuilder(provider=None).make(wanted, HostHooks()))  # type: ignore[arg-type]
