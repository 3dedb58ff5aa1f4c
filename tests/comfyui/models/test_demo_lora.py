"""The demo model's LoRA, added by ComfyUI's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.core.errors import UnsupportedModel
from slipstream.demo.model import WEIGHTS
from slipstream.hosts.comfy.models.demo_lora import add_demo_lora
from slipstream.hosts.comfy.models.demo_model import load_demo_model
from slipstream.tests.comfyui.support.models import tiny

KEY = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight"
KOHYA = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"


def weight_of(patcher) -> torch.Tensor:
    """What the model computes with, patches included."""
    import comfy.lora

    original, *patches = patcher.get_key_patches()[KEY]
    return comfy.lora.calculate_weight(patches, original[0].float().clone(), KEY) if patches else original[0].float()


def test_every_weight_of_the_file_is_taken() -> None:
    model = load_demo_model()
    changed = add_demo_lora(model, 1.0)
    layers = {key.rsplit(".", 2)[0] for key in load_file(WEIGHTS / "night.safetensors") if "lora_up" in key}
    assert len(changed.patches) == len(layers) > 50
    assert not model.patches, "the model that came in is left as it was"


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_strength_scales_what_is_added(strength: float) -> None:
    model, stored = load_demo_model(), load_file(WEIGHTS / "night.safetensors")
    added = stored[f"{KOHYA}.lora_up.weight"].float() @ stored[f"{KOHYA}.lora_down.weight"].float()
    difference = weight_of(add_demo_lora(model, strength)) - weight_of(model)
    torch.testing.assert_close(difference, strength * added, rtol=1e-3, atol=1e-5)


def test_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="For other models use Load LoRA"):
        add_demo_lora(tiny.model(), 1.0)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="The demo LoRA is missing"):
        add_demo_lora(load_demo_model(), 1.0, tmp_path)


def test_the_node_gives_the_changed_model() -> None:
    from slipstream.nodes.demo import SlipstreamDemoLora

    (changed,) = SlipstreamDemoLora.execute(load_demo_model(), 0.5).args
    assert changed.patches
