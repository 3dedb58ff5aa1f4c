"""Blocks of a model on engines of their own: pictures stay the same, and patched blocks alone run as they are."""

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

BY_BLOCKS = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS)
STEPS = 4
"""Of which the first asks for engines, and the second compares them."""


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    made = EngineProvider(EngineStore(tmp_path_factory.mktemp("blocks")))
    yield made
    made.end_builds("the tests are over", 5)


def accelerated(provider: EngineProvider, patcher: Any) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, BY_BLOCKS)
    return accelerate_model(patcher, module), module


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_sd15(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    assert distance(found, wanted) < 1e-5
    assert module.status.block_calls == STEPS - 2
