"""A small UNet of diffusers', and an engine for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from slipstream.engine_cache import EngineStore, Entry
from slipstream.hosts.diffusers import AcceleratedUNet
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.tiny_unet import CONFIG

FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)


def make_unet(seed: int = 1, config: dict[str, Any] = CONFIG) -> UNet2DConditionModel:
    """A UNet in which every tensor matters: nothing is left at zero or one."""
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(**config).eval().requires_grad_(False)
    for parameter in unet.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return unet


def make_inputs(seed: int = 0, size: int = 16, batch: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(batch, 4, size, size, generator=generator),
        "timestep": torch.tensor(500 + seed),
        "encoder_hidden_states": torch.randn(batch, 77, 32, generator=generator),
    }


@dataclass
class Built:
    """A store with one engine: of `make_unet`'s architecture at `make_inputs`' shapes."""

    store: EngineStore
    entry: Entry
    first: AcceleratedUNet
