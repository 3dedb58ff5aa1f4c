"""What the account of a live model overlooks is found by comparisons: at load, and in the midst of use.

The account is switched off here; a hook stands for whatever it may overlook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.models import controlnet, vae
from slipstream.hosts.comfy.run import model_calls
from slipstream.runtime.checking import sentinel
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider

FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)


@pytest.fixture
def provider(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProvider]:
    for module in (model_calls, controlnet, vae):
        monkeypatch.setattr(module, "why_changed", lambda *_, **__: None)
    with quick_provider(EngineStore(tmp_path)) as made:
        yield made


def hook(network: Any, factor: float = 1.05) -> Any:
    layer = network.middle_block[0]
    return layer.register_forward_hook(lambda layer, args, result: factor * result)


def said(module: AcceleratedModule) -> str:
    return " ".join(module.status.to_json()["reasons"])


# ------------------------------------------------------------------------------------------------- when loaded


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_check_is_of_the_loaded_unet(family: str, provider: EngineProvider) -> None:
    model = tiny.model(family)
    hook(model.model.diffusion_model)
    module = AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_model(model, module)
    assert torch.equal(tiny.sample(fast, family), tiny.sample(model, family))
    assert module.status.engine_calls == 0 and "the loaded model computes something else" in said(module)


def test_the_check_of_an_engine_that_was_right_before(provider: EngineProvider) -> None:
    """As in the next process: the engine is known, the model that it is loaded for is another."""
    model = tiny.model()
    tiny.sample(accelerate_model(model, AcceleratedModule(provider, FIRST_USE)))
    hook(model.model.diffusion_model)
    module = AcceleratedModule(EngineProvider(provider.store, provider.backends), FIRST_USE)
    fast = accelerate_model(model, module)
    assert torch.equal(tiny.sample(fast), tiny.sample(model))
    assert module.status.engine_calls == 0 and "was right when it was built, but differs" in said(module)


def test_the_check_is_of_the_loaded_controlnet(provider: EngineProvider) -> None:
    control = tiny.controlnet()
    hook(control.control_model, 3.0)
    module = AcceleratedModule(provider, FIRST_USE)
    model = tiny.model()
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))

    def picture(control: Any) -> torch.Tensor:
        copied = control.copy().set_cond_hint(hint, 1.0, (0.0, 1.0))
        return tiny.sample(model, positive=tiny.conditioning(seed=1, control=copied, control_apply_to_uncond=True))

    assert torch.equal(picture(accelerate_controlnet(control, module)), picture(control))
    assert module.status.engine_calls == 0 and "the loaded model computes something else" in said(module)


def test_the_check_is_of_the_loaded_vae(provider: EngineProvider) -> None:
    plain = tiny.vae()
    plain.first_stage_model.decoder.mid.register_forward_hook(lambda layer, args, result: 1.2 * result)
    plain.first_stage_model.decoder.conv_in.register_forward_hook(lambda layer, args, result: 1.2 * result)
    module = AcceleratedModule(provider, FIRST_USE)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(accelerate_vae(plain, module).decode(latent), plain.decode(latent))
    assert module.status.engine_calls == 0 and "the loaded model computes something else" in said(module)


# ---------------------------------------------------------------------------------------------- when in use


def test_the_first_call_of_a_vae_after_a_while(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "EVERY", 3)
    plain, module = tiny.vae(), AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_vae(plain, module)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    fast.decode(latents)
    fast.decode(latents[:1])
    assert module.status.engine_calls == 3
    plain.first_stage_model.decoder.conv_in.register_forward_hook(lambda layer, args, result: 1.2 * result)
    before, found, wanted = fast.decode(latents[:1]), fast.decode(latents), plain.decode(latents)
    assert torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(before, wanted[:1], atol=1e-2)
    assert (module.status.engine_calls, module.status.eager_calls) == (5, 2)
    assert "gave another result than the model in the midst of use" in said(module)


def test_the_first_call_with_other_patches(provider: EngineProvider) -> None:
    model = tiny.model()
    module = AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_model(model, module)
    tiny.sample(fast)
    assert module.status.engine_calls == 3
    hook(model.model.diffusion_model)
    wrapped = fast.clone()
    wrapped.set_model_unet_function_wrapper(lambda apply, given: apply(given["input"], given["timestep"], **given["c"]))
    assert torch.equal(tiny.sample(wrapped), tiny.sample(model))
    assert module.status.engine_calls == 4  # the call that was computed both ways
    assert "gave another result than the model in the midst of use" in said(module)
    assert torch.equal(tiny.sample(fast), tiny.sample(model)) and module.status.engine_calls == 4


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "dpmpp_2m_sde"])
@pytest.mark.parametrize("with_control", [False, True])
def test_sampling_begins_anew(
    sampler: str, with_control: bool, provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model changes in the midst of a picture, and is found to have changed three calls later."""
    model, control = tiny.model(), tiny.controlnet()
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    module = AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_model(model, module)
    seen: list[int] = []
    handles: list[Any] = []

    def callback(step: int, *_: Any) -> None:
        seen.append(step)
        if step == 1 and not handles:
            handles.append(hook(model.model.diffusion_model))

    def picture(patcher: Any, **more: Any) -> torch.Tensor:
        extras = {}
        if with_control:
            extras["control"] = control.copy().set_cond_hint(hint, 1.0, (0.0, 1.0))
            extras["control_apply_to_uncond"] = True
        return tiny.sample(patcher, sampler=sampler, steps=8, positive=tiny.conditioning(seed=1, **extras), **more)

    before = picture(fast)
    assert module.status.engine_calls == 8
    monkeypatch.setattr(sentinel, "EVERY", 12)
    found = picture(fast, callback=callback)
    assert handles and seen == [0, 1, 2, 3, 4, *range(8)]
    wanted = picture(model)
    assert torch.equal(found, wanted) and not torch.allclose(found, before, rtol=1e-3)
    assert module.status.engine_calls == 8 + 6 and module.status.eager_calls == 8
    assert "gave another result than the model in the midst of use" in said(module)


def test_a_model_that_did_not_change_is_left_alone(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "EVERY", 1)
    module = AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_model(tiny.model(), module)
    first, second = tiny.sample(fast), tiny.sample(fast)
    assert torch.equal(first, second)
    assert (module.status.engine_calls, module.status.eager_calls) == (6, 0)


@pytest.mark.slow
def test_two_of_two_thousand_calls_are_computed_both_ways(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred pictures of 20 steps: below 1 % of their time while the model takes less than ten calls of an engine
    for one of its own."""
    module, compared = AcceleratedModule(provider, FIRST_USE), 0
    why_wrong = provider.why_wrong

    def counted(*args: Any) -> str | None:
        nonlocal compared
        compared += 1
        return why_wrong(*args)

    monkeypatch.setattr(provider, "why_wrong", counted)
    fast = accelerate_model(tiny.model(), module)
    for seed in range(100):
        tiny.sample(fast, steps=20, seed=seed)
    assert (module.status.engine_calls, module.status.eager_calls, compared) == (2000, 0, 2)
