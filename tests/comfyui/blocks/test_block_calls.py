"""Blocks of a model on engines of their own: pictures stay the same, and what other nodes reach into runs as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick_blocks import quick_block_provider

BY_BLOCKS = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS)
STEPS = 5
"""Of which the first asks for engines where there are none, and the next one compares them."""


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_block_provider(EngineStore(tmp_path_factory.mktemp("blocks"))) as made:
        yield made


def accelerated(provider: EngineProvider, patcher: Any) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, BY_BLOCKS)
    return accelerate_model(patcher, module), module


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def forwards(model: Any) -> list[str]:
    """Layers that have a `forward` of their own."""
    return [name for name, layer in model.model.diffusion_model.named_modules() if "forward" in vars(layer)]


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd2"])
def test_a_unet_by_blocks_makes_the_same_picture(family: str, provider: EngineProvider) -> None:
    model = tiny.model(family)
    fast, module = accelerated(provider, model)
    found, wanted = tiny.sample(fast, family, steps=STEPS), tiny.sample(model, family, steps=STEPS)
    assert distance(found, wanted) < 1e-5
    assert module.status.block_calls >= STEPS - 2, module.status.to_json()
    assert module.status.block_calls + module.status.eager_calls == STEPS
    assert not forwards(model)


@pytest.mark.parametrize("family", ["flux", "wan", "qwen", "pixart"])
def test_a_transformer_by_blocks_makes_the_same_picture(family: str, provider: EngineProvider) -> None:
    model = tiny.transformer(family)
    fast, module = accelerated(provider, model)
    options = {"steps": STEPS, "cfg": 2.0}
    found, wanted = tiny.sample(fast, family, **options), tiny.sample(model, family, **options)
    assert distance(found, wanted) < 1e-5
    assert module.status.block_calls >= STEPS - 2, module.status.to_json()
