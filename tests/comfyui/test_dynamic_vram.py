"""With DynamicVRAM, ComfyUI builds layers that have no weights yet: engines are still those of the same model."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from slipstream.core.spec import Precision
from slipstream.hosts.comfy.autoencoders import HALVES, KINDS
from slipstream.hosts.comfy.diffusion_model import ComfyDiffusionModel
from slipstream.hosts.comfy.vae import ComfyVaeHalf
from slipstream.tests.comfyui.support import tiny

CPU = torch.device("cpu")


@pytest.fixture
def dynamic_vram(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What switches the layers' construction; the rest of DynamicVRAM needs a GPU."""
    try:
        memory = importlib.import_module("comfy.memory_management")
    except ImportError:
        pytest.skip("this ComfyUI has no DynamicVRAM")

    def switch_on() -> None:
        monkeypatch.setattr(memory, "aimdo_enabled", True)

    switch_on.memory = memory  # type: ignore[attr-defined]
    return switch_on


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3"])
def test_a_model_is_the_same_with_and_without(family: str, dynamic_vram: Any) -> None:
    model = tiny.transformer(family) if family == "sd3" else tiny.model(family)
    without = ComfyDiffusionModel.of(model.model)
    wanted = without.fingerprint, without.weight_names
    dynamic_vram()
    found = ComfyDiffusionModel.of(model.model)
    assert (found.fingerprint, found.weight_names) == wanted
    skeleton = found.skeleton(Precision.FP32, CPU)
    assert {name.removeprefix("model.") for name, _ in skeleton.named_parameters()} <= found.weight_names
    assert any(isinstance(layer, torch.nn.Linear) and layer.weight is not None for layer in skeleton.modules())
    assert dynamic_vram.memory.aimdo_enabled, "ComfyUI's own models are built as before"


@pytest.mark.parametrize("half", HALVES.values(), ids=lambda half: half.part)
def test_a_vae_is_the_same_with_and_without(half: Any, dynamic_vram: Any) -> None:
    layers = {
        "ch": 32, "widths": [32, 64], "num_res_blocks": 1, "out_ch": 3, "in_channels": 3, "z_channels": 4,
        "attn_resolutions": [], "resolution": 64, "double_z": True,
    }  # fmt: skip
    config = {"layers": layers, "embed_dim": 4}
    wanted = ComfyVaeHalf(KINDS["VAE"], half, config).fingerprint
    dynamic_vram()
    assert ComfyVaeHalf(KINDS["VAE"], half, config).fingerprint == wanted
