"""The demo model through diffusers, where no ComfyUI is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.engine_cache import WeightsMemo
from slipstream.hosts.comfy.building import without_server
from slipstream.hosts.standalone.model_by_file import load_model
from slipstream.runtime.checking.sentinel import Sentinel
from slipstream.runtime.provider import Offer
from slipstream.runtime.settings.model_settings import Resolution

pytestmark = pytest.mark.diffusers


def test_its_engine_is_the_one_that_a_pipeline_asks_for(tmp_path: Path, monkeypatch) -> None:
    from slipstream.hosts.diffusers import accelerate_unet

    monkeypatch.setattr(without_server, "CACHE", tmp_path)
    model = load_model("demo", None, WeightsMemo(tmp_path))
    assert model.host.startswith("diffusers ")
    asked = []

    def offer(source, call, *_) -> Offer:
        asked.append((source.architecture.fingerprint, call))
        return Offer(reason="only asked")

    provider = SimpleNamespace(
        offer=offer, run_began=lambda: None, run_ended=lambda: None, with_preferences=lambda settings: settings,
        sentinel=Sentinel(),
    )  # fmt: skip
    unet = model.source.unet
    context = torch.zeros(2, 77, unet.config.cross_attention_dim, dtype=unet.dtype, device=unet.device)
    latent = torch.zeros(2, 4, 8, 16, dtype=unet.dtype, device=unet.device)
    with torch.no_grad():
        accelerate_unet(unet, provider)(latent, torch.tensor(999), encoder_hidden_states=context)
    built = model.source.architecture.fingerprint, model.call(Resolution(128, 64), 2, 77)
    assert asked == [built]
