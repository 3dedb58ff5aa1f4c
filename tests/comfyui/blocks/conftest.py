"""Engines of blocks that take no compiler; a file of tests traces each kind once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider


@pytest.fixture(scope="module")
def shared_provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_block_provider(EngineStore(tmp_path_factory.mktemp("blocks"))) as made:
        yield made


@pytest.fixture
def as_comfyui_runs_nodes() -> Iterator[None]:
    with torch.inference_mode():
        yield
