"""A text encoder's layers on engines of their own: conditioning stays the same, whatever the length of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate_text_encoder import accelerate_text_encoder
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support.models import tiny_text
from slipstream.tests.comfyui.support.models.tiny_text import text_encoder, tokens
from slipstream.tests.tensors import distance

COLD = 2
"""Texts of which the first waits for engines where there are none, and the next one compares them."""
Clip = Any


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_block_provider(EngineStore(tmp_path_factory.mktemp("blocks"))) as made:
        yield made


@pytest.fixture(autouse=True)
def _as_comfyui_runs_nodes() -> Iterator[None]:
    with torch.inference_mode():
        yield


def accelerated(provider: EngineProvider, clip: Clip) -> tuple[Clip, AcceleratedModule]:
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE))
    return accelerate_text_encoder(clip, module), module


def encoded(clip: Clip, text: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As CLIP Text Encode has it."""
    (found,) = clip.encode_from_tokens_scheduled(text)
    return found[0], found[1]["pooled_output"]


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.shape == other.shape and one.dtype == other.dtype
        assert other.std() > 0.02 and distance(one, other) < 1e-5


def share_of(module: AcceleratedModule) -> tuple[int, int]:
    """Calls of layers that engines computed in the last text, and all of them."""
    words = module.status.standing.blocks.split()
    assert words, module.status.to_json()
    return int(words[0]), int(words[2])


def warmed(provider: EngineProvider, clip: Clip, text: Any) -> tuple[Clip, AcceleratedModule]:
    """Accelerated, and its engines are trusted."""
    fast, module = accelerated(provider, clip)
    for _ in range(COLD):
        encoded(fast, text)
    return fast, module


@pytest.mark.parametrize("kind", tiny_text.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_engine_takes_texts_of_any_length(kind: str, dtype: torch.dtype, provider: EngineProvider) -> None:
    clip = text_encoder(kind, dtype=dtype)
    fast, module = warmed(provider, clip, tokens(kind))
    known = set(provider.store.digests())
    for words in (12, 31):
        text = tokens(kind, words, seed=words)
        for _ in range(COLD):
            encoded(fast, text)
        runs = provider.blocks.backend.calls
        assert_same(encoded(fast, text), encoded(clip, text))
        on_engines, total = share_of(module)
        assert on_engines == total == (6 if kind == "clip" else 3), module.status.to_json()
        assert provider.blocks.backend.calls == runs + total
    assert set(provider.store.digests()) == known
