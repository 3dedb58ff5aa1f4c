"""Whether a model computes with other numbers than those that its digest names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.hosts.comfy.models.vae import ComfyVaeSource
from slipstream.tests.comfyui.support.models import tiny

LAYER = "diffusion_model.out.2.weight"


def with_lora(patcher: Any) -> Any:
    clone = patcher.clone()
    assert clone.add_patches({LAYER: ("diff", (torch.ones_like(patcher.model.state_dict()[LAYER]),))}, 0.5)
    return clone


def merged(patcher: Any) -> Any:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    return ModelMergeSimple().merge(patcher, tiny.model(seed=9), 0.3)[0]


def wrapped(patcher: Any) -> Any:
    clone = patcher.clone()
    clone.add_weight_wrapper(LAYER, lambda weight: 2 * weight)
    return clone


@pytest.mark.parametrize("change", [with_lora, merged, wrapped])
def test_what_changes_weights_patches_a_unet(change: Any) -> None:
    plain = tiny.model()
    changed = ComfyUNetSource(change(plain))
    assert changed.is_patched and not ComfyUNetSource(plain).is_patched
    assert changed.weights_digest() == ComfyUNetSource(plain).weights_digest()


def test_a_patch_of_a_vae() -> None:
    vae = tiny.vae()
    assert not ComfyVaeSource(vae).is_patched
    name, weight = next(iter(vae.first_stage_model.state_dict().items()))
    assert vae.patcher.add_patches({name: ("diff", (torch.ones_like(weight),))}, 0.5)
    assert ComfyVaeSource(vae).is_patched


def test_parameters_are_counted() -> None:
    source = ComfyUNetSource(tiny.model())
    assert source.architecture.fingerprint.parameters == sum(weight.numel() for weight in source.unet.parameters())
