"""A VAE's blocks on engines of their own: pictures and latents stay the same, and no other size needs another build."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import pytest
import torch

from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.blocks.block_architecture import block_digest
from slipstream.hosts.comfy.models.vae import ComfyVaeHalf
from slipstream.runtime.blocks.block_engines import BlockOffer
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, ByBlocks, Levers, Settings
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.models.test_accelerate_vae import latents, pictures
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

BY_BLOCKS = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS)
COLD = 2
"""Calls of which the first waits for engines where there are none, and the next one compares them."""
KINDS = {"vae": tiny.vae, "without convolutions around latents": lambda: tiny.vae(quantised=False), "taesd": tiny.taesd}
Vae = Any


pytestmark = pytest.mark.usefixtures("as_comfyui_runs_nodes")


@pytest.fixture
def provider(shared_provider: EngineProvider) -> EngineProvider:
    return shared_provider


def accelerated(provider: EngineProvider, vae: Vae, settings: Settings = BY_BLOCKS) -> tuple[Vae, AcceleratedModule]:
    module = AcceleratedModule(provider, settings)
    return accelerate_vae(vae, module), module


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert wanted.std() > 0.02 and distance(found, wanted) < 1e-5


def share_of(module: AcceleratedModule) -> tuple[int, int]:
    """Calls of blocks that engines computed in the last call of the VAE, and all of them."""
    words = module.status.standing.blocks.split()
    return int(words[0]), int(words[2])


def warmed(provider: EngineProvider, vae: Vae, do: Callable[[Vae], Any]) -> tuple[Vae, AcceleratedModule]:
    """Accelerated, and its engines are trusted."""
    fast, module = accelerated(provider, vae)
    for _ in range(COLD):
        do(fast)
    return fast, module


@pytest.mark.parametrize("kind", KINDS)
def test_decode_and_encode(kind: str, provider: EngineProvider) -> None:
    vae = KINDS[kind]()
    for do in (lambda vae: vae.decode(latents()), lambda vae: vae.encode(pictures())):
        fast, module = warmed(provider, vae, do)
        assert_same(do(fast), do(vae))
        on_engines, total = share_of(module)
        assert on_engines == total >= 4, module.status.to_json()
        assert module.status.block_calls + module.status.eager_calls == COLD + 1
    assert not [name for name, layer in vae.first_stage_model.named_modules() if "forward" in vars(layer)]


def test_other_sizes_batches_and_tiles_need_no_other_build(provider: EngineProvider) -> None:
    vae = tiny.vae()
    cases: dict[Callable[[Vae], Any], list[Callable[[Vae], Any]]] = {
        lambda vae: vae.decode(latents()): [
            lambda vae: vae.decode(latents(size=12)),
            lambda vae: vae.decode(latents(3)),
            lambda vae: vae.decode_tiled(latents(size=14), tile_x=8, tile_y=8, overlap=2),
        ],
        lambda vae: vae.encode(pictures()): [
            lambda vae: vae.encode(pictures(size=96)),
            lambda vae: vae.encode(pictures(2)),
            lambda vae: vae.encode_tiled(pictures(size=112), tile_x=64, tile_y=64, overlap=16),
        ],
    }
    for first, others in cases.items():
        fast, module = warmed(provider, vae, first)
        known = set(provider.store.digests())
        for do in others:
            for _ in range(COLD):  # engines that are there are looked up, and compared, for each size
                do(fast)
            before, runs = module.status.block_calls, provider.blocks.backend.calls
            assert_same(do(fast), do(vae))
            on_engines, total = share_of(module)
            assert module.status.block_calls > before and provider.blocks.backend.calls > runs
            assert on_engines == total
        assert set(provider.store.digests()) == known


def hook_a_layer(vae: Vae) -> None:
    vae.first_stage_model.decoder.mid.block_1.conv2.register_forward_hook(lambda layer, args, out: 0.5 * out)


def replace_a_layer(vae: Vae) -> None:
    """As an object patch."""
    layer = torch.nn.Dropout(0.0).eval()
    layer.forward = lambda x: 0.5 * x
    vae.patcher.add_object_patch("decoder.mid.block_1.dropout", layer)


def replace_attention(vae: Vae) -> None:
    vae.first_stage_model.decoder.mid.attn_1.optimized_attention = lambda q, k, v: 0.5 * v


def make_one_layer_circular(vae: Vae) -> None:
    layer = vae.first_stage_model.decoder.mid.block_2.conv2
    layer.padding_mode = "circular"
    layer._reversed_padding_repeated_twice = [layer.padding[0]] * 4


CHANGES = {hook_a_layer: "hooks into", replace_a_layer: "replaces decoder", replace_attention: "changed",
           make_one_layer_circular: "is not as ComfyUI makes it"}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), CHANGES.items())
def test_only_the_block_that_is_changed_runs_as_it_is(
    change: Callable[[Vae], None], reason: str, provider: EngineProvider
) -> None:
    vae = tiny.vae()
    change(vae)
    fast, module = warmed(provider, vae, lambda vae: vae.decode(latents()))
    found, wanted = fast.decode(latents()), vae.decode(latents())
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.vae().decode(latents()))
    on_engines, total = share_of(module)
    assert on_engines == total - 1 >= 4, module.status.to_json()
    assert any(reason in each for each in module.status.to_json()["reasons"])


def test_a_patch_of_weights_reaches_engines(provider: EngineProvider) -> None:
    def patched() -> Vae:
        vae = tiny.vae()
        name = "decoder.mid.block_1.conv1.weight"
        weight = vae.first_stage_model.state_dict()[name]
        assert vae.patcher.add_patches({name: ("diff", (torch.ones_like(weight) * 0.05,))})
        return vae

    fast, module = warmed(provider, patched(), lambda vae: vae.decode(latents()))
    wanted = patched().decode(latents())
    assert_same(fast.decode(latents()), wanted)
    assert distance(wanted, tiny.vae().decode(latents())) > 1e-3
    on_engines, total = share_of(module)
    assert on_engines == total


def test_weights_that_comfyui_stages_reach_engines(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic VRAM."""
    kind = staging.switch_on(monkeypatch)
    vae = tiny.vae()
    wanted = vae.decode(latents())
    comfy.model_management.archive_model_dtypes(vae.first_stage_model)
    vae.patcher = kind(vae.first_stage_model, staging.DEVICE, torch.device("cpu"))
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        fast, module = warmed(provider, vae, lambda vae: vae.decode(latents()))
        assert_same(fast.decode(latents()), wanted)
        on_engines, total = share_of(module)
        assert on_engines == total >= 4, module.status.to_json()


def test_numbers_too_large_for_an_engine_give_the_plain_picture(tmp_path: Any) -> None:
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        vae = tiny.vae()
        fast, module = warmed(provider, vae, lambda vae: vae.decode(latents()))
        provider.blocks.backend.factor = float("inf")
        wanted = vae.decode(latents(seed=2))
        for _ in range(2):
            runs = provider.blocks.backend.calls
            assert torch.equal(fast.decode(latents(seed=2)), wanted)
        assert provider.blocks.backend.calls == runs, "it is not tried twice"
        assert not module.status.block_calls and "NaN or Inf" in module.status.standing.reason


def test_no_picture_waits_for_blocks_that_were_not_asked_for(tmp_path: Any) -> None:
    """While an engine of the whole is on its way, blocks serve where theirs are there already."""
    settings = Settings(policy=BuildPolicy.BACKGROUND, levers=Levers(by_blocks=ByBlocks.ON))
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.backends = []
        vae = tiny.vae()
        hurried: list[Any] = []
        coming = lambda block, dtypes, precision, *_: BlockOffer(block, (), precision)  # noqa: E731
        provider.blocks.offer = coming  # type: ignore[method-assign]
        provider.blocks.wait_for = lambda offers, *_: hurried.extend(offers)  # type: ignore[method-assign]
        wanted = vae.decode(latents())
        fast, _ = accelerated(provider, vae, settings)
        assert torch.equal(fast.decode(latents()), wanted) and not hurried
        fast, _ = accelerated(provider, vae, replace(settings, policy=BuildPolicy.FIRST_USE))
        assert torch.equal(fast.decode(latents()), wanted) and not hurried
        fast, _ = accelerated(provider, tiny.vae())  # which has other blocks, that no offers are kept for
        assert torch.equal(fast.decode(latents()), wanted) and hurried


def test_the_attention_that_comfyui_chose_is_no_part_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build processes choose for themselves."""
    layers = "comfy.ldm.modules.diffusionmodules.model"
    architecture = ComfyVaeHalf.of(tiny.vae().first_stage_model)
    found = set()
    for chosen in ("normal_attention", "pytorch_attention"):
        function = getattr(importlib.import_module(layers), chosen)
        monkeypatch.setattr(f"{layers}.vae_attention", lambda function=function: function)
        block = architecture.new_meta_module().get_submodule("decoder.mid.attn_1")
        assert block.optimized_attention is function
        found.add(block_digest(block))
    assert len(found) == 1


def test_the_button_builds_all_that_a_vae_needs(tmp_path: Any) -> None:
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        vae = tiny.vae()
        module = AcceleratedModule(provider, BY_BLOCKS, by_hand=True)
        assert_same(accelerate_vae(vae, module).decode(latents()), vae.decode(latents()))
        on_engines, total = share_of(module)
        assert on_engines == total >= 4, module.status.to_json()
        known = set(provider.store.digests())
        fast, module = warmed(provider, vae, lambda vae: vae.decode(latents(size=12)))
        assert module.status.block_calls and set(provider.store.digests()) == known
