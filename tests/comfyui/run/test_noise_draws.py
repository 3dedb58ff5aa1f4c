"""Samplers without noise of their own draw none in their steps: it would cost time and change the random state."""

from __future__ import annotations

from typing import Any

import comfy.sample
import pytest
import torch

from slipstream.tests.comfyui.support.models import tiny

DETERMINISTIC = ("euler", "heun", "dpm_2", "lms", "dpmpp_2m", "ddim", "uni_pc", "deis", "ipndm")
DRAWING = ("randn", "rand", "randn_like", "rand_like", "normal")


def draws_of(sampler: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of torch's functions that a run asks for noise."""
    latent, model = tiny.latent()["samples"], tiny.model()
    noise = comfy.sample.prepare_noise(latent, 7)
    prompts = tiny.conditioning(seed=1), tiny.conditioning(seed=2)
    asked: list[str] = []
    for name in DRAWING:
        plain = getattr(torch, name)

        def noted(*args: Any, _name: str = name, _plain: Any = plain, **kwargs: Any) -> Any:
            asked.append(_name)
            return _plain(*args, **kwargs)

        monkeypatch.setattr(torch, name, noted)
    comfy.sample.sample(model, noise, steps, 7.0, sampler, "normal", *prompts, latent, seed=7, disable_pbar=True)
    monkeypatch.undo()
    return asked


@pytest.mark.parametrize("sampler", DETERMINISTIC)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_comfyui_draws_no_noise_where_eta_is_zero(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = draws_of(sampler, 6, monkeypatch)
    assert asked == draws_of(sampler, 3, monkeypatch)
    assert len(asked) == (sampler == "ddim"), "ddim has noise at hand for inpainting, drawn once a picture"


def test_a_stochastic_sampler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = draws_of("euler_ancestral", 6, monkeypatch)
    assert len(asked) > len(draws_of("euler_ancestral", 3, monkeypatch)) > 0, (
        "draws are not noticed: the others prove nothing"
    )
