"""reForge and Classic: engines and skipped steps through the patcher and sampling function of their `ldm_patched`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ldm_patched.modules import model_base, model_management, supported_models
from modules_forge.forge_sampler import forge_sample, sampling_cleanup, sampling_prepare
from modules_forge.unet_patcher import UnetPatcher

from slipstream.hosts.forge.choices import Choices
from slipstream.hosts.forge.sampling import ENGINES, STEPS, lead_next_sampling
from slipstream.hosts.webui_process import module_of
from slipstream.sampling.presets import PRESETS
from slipstream.tests.tensors import distance

CONFIG: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1],
    "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1], "use_spatial_transformer": True, "context_dim": 32, "num_heads": 4,
    "adm_in_channels": None, "use_linear_in_transformer": False, "legacy": False, "use_checkpoint": False,
}  # fmt: skip
TOLERANCE = 1e-4
OFF, ENGINE = ("off", "first use", "off"), ("auto", "first use", "off")


@pytest.fixture
def patcher() -> Any:
    config = supported_models.SD15({name: _copied(value) for name, value in CONFIG.items()})
    config.unet_config.update(dtype=torch.float32, num_heads=4, num_head_channels=-1)
    for name in ("manual_cast_dtype", "custom_operations"):
        vars(config).setdefault(name, None)
    model = model_base.BaseModel(config, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.diffusion_model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            is_scale = tensor.ndim == 1 and name.endswith("weight")
            tensor.copy_(1 + 0.1 * noise if is_scale else noise * (0.5 / max(1, tensor[0].numel()) ** 0.5))
    return UnetPatcher(model, model_management.get_torch_device(), torch.device("cpu"))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


class Denoiser:
    """What the WebUI's `CFGDenoiser` is to the functions below it."""

    def __init__(self, sd_model: Any) -> None:
        self.inner_model = SimpleNamespace(inner_model=sd_model)
        self.p = SimpleNamespace(seeds=[1])
        self.mask = None
        self.calls = 0

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        text, negative = (torch.randn(1, 77, 32, generator=generator) for _ in range(2))
        given = SimpleNamespace(x=x, sigma=sigma, text_cond=text, text_uncond=negative, image_cond=None)
        return forge_sample(self, given, 5.0, [[(0, 1.0)]])


def sample_euler(denoiser: Any, x: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        denoised = denoiser(x, sigma[None])
        x = x + (x - denoised) / sigma * (following - sigma)
    return x


class Sampler:
    """What is left of the WebUI's sampler."""

    funcname = "sample_euler"
    eta = 0.0

    def __init__(self, denoiser: Denoiser) -> None:
        self.func = sample_euler
        self.model_wrap_cfg = denoiser

    def launch_sampling(self, steps: int, func: Any) -> torch.Tensor:
        return func()


def picture(patcher: Any, choices: tuple[str, ...], steps: int = 4) -> tuple[torch.Tensor, dict[str, str]]:
    """The latent, and what the info text says."""
    sd_model = SimpleNamespace(forge_objects=SimpleNamespace(unet=patcher.clone()))
    sampler = Sampler(Denoiser(sd_model))
    p = SimpleNamespace(sampler=sampler, sd_model=sd_model, extra_generation_params={}, cfg_scale=5.0, is_hr_pass=False)
    lead_next_sampling(p, Choices.of_text(*choices))
    sigmas = torch.cat([torch.linspace(10, 0.1, steps), torch.zeros(1)])
    x = 10 * torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        unet = sd_model.forge_objects.unet
        sampling_prepare(unet, x)
        latent = sampler.launch_sampling(steps, lambda: sampler.func(sampler.model_wrap_cfg, x, sigmas=sigmas))
        sampling_cleanup(unet)
    return latent, p.extra_generation_params


def engine_calls() -> int:
    return module_of(Choices.of_text(*ENGINE).settings).status.engine_calls


def test_an_engine_is_the_plain_model(patcher: Any) -> None:
    plain, _ = picture(patcher, OFF)
    before = engine_calls()
    fast, said = picture(patcher, ENGINE)
    assert engine_calls() == before + 4, said
    assert distance(fast, plain) < TOLERANCE and said[ENGINES].startswith("4 calls by engine")


def test_a_lora_comes_and_goes(patcher: Any) -> None:
    key = "diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_q.weight"
    with_lora = patcher.clone()
    difference = torch.randn(patcher.model.state_dict()[key].shape, generator=torch.Generator().manual_seed(5))
    with_lora.add_patches({key: ("diff", (difference,))}, 1.0)
    for each in (patcher, with_lora, patcher):
        plain, _ = picture(each, OFF)
        before = engine_calls()
        fast, said = picture(each, ENGINE)
        assert engine_calls() == before + 4, said
        assert distance(fast, plain) < TOLERANCE


def test_patches_run_plain_and_say_why(patcher: Any) -> None:
    patcher.set_model_attn1_patch(lambda n, context, value, options: (n * 1.1, context, value))
    plain, _ = picture(patcher, OFF)
    before = engine_calls()
    fast, said = picture(patcher, ENGINE)
    assert engine_calls() == before and torch.equal(fast, plain)
    assert "4 by your model: another extension patches the model (attn1_patch)" in said[ENGINES]


def test_a_preset_computes_the_steps_that_it_says(patcher: Any) -> None:
    seen: list[float] = []

    def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
        seen.append(float(given["timestep"][0]))
        return apply_model(given["input"], given["timestep"], **given["c"])

    patcher.set_model_unet_function_wrapper(wrapper)
    full, _ = picture(patcher, OFF, steps=20)
    every, seen[:] = list(seen), []
    made, said = picture(patcher, ("off", "first use", "balanced"), steps=20)
    computed = PRESETS["balanced"].selection.computed(20)
    assert seen == pytest.approx([every[step] for step in computed])
    assert said[STEPS].startswith(f"balanced: {len(computed)} of 20 steps computed (euler, ")
    assert 0 < distance(made, full) < 0.5


@pytest.mark.parametrize("option", ["s_min_uncond", "skip_early_cond"])
def test_steps_that_leave_the_negative_prompt_out_are_not_skipped(
    patcher: Any, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    from modules import shared

    monkeypatch.setattr(shared, "opts", SimpleNamespace(**{option: 0.5}), raising=False)
    full, _ = picture(patcher, OFF, steps=20)
    made, said = picture(patcher, ("off", "first use", "balanced"), steps=20)
    assert said[STEPS] == "every step computed: the WebUI's settings leave the negative prompt out of some steps"
    assert torch.equal(made, full)


def test_the_tiling_checkbox_runs_plain(patcher: Any) -> None:
    """It sets the padding of every convolution for a picture, and sets it back for the next one."""
    convolutions = [layer for layer in patcher.model.diffusion_model.modules() if isinstance(layer, torch.nn.Conv2d)]
    before, _ = picture(patcher, ENGINE)
    served = engine_calls()
    for layer in convolutions:
        layer.padding_mode = "circular"
    plain, _ = picture(patcher, OFF)
    tiled, said = picture(patcher, ENGINE)
    assert torch.equal(tiled, plain) and distance(tiled, before) > 0.01
    assert engine_calls() == served and "changed padding_mode of input_blocks.0.0" in said[ENGINES]
    for layer in convolutions:
        layer.padding_mode = "zeros"
    assert torch.equal(picture(patcher, ENGINE)[0], before) and engine_calls() == served + 4
