"""Packages of blocks as the compiler makes them, in build processes of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.spec import Optimize, Role
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.accelerate_text_encoder import accelerate_text_encoder
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.blocks import block_classes
from slipstream.hosts.comfy.blocks.block_classes import BLOCK_CLASSES
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import eight_bits, tiny, tiny_controlnets, tiny_text
from slipstream.tests.tensors import distance

STEPS = 4


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    made = EngineProvider(EngineStore(tmp_path_factory.mktemp("blocks")))
    yield made
    made.end_builds("the tests are over", 5)


def accelerated(
    provider: EngineProvider, patcher: Any, policy: BuildPolicy = BuildPolicy.FIRST_USE
) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, Settings(policy=policy, optimize=Optimize.BLOCKS))
    return accelerate_model(patcher, module), module


def test_two_packages_serve_a_transformer_at_all_sizes_and_lengths(provider: EngineProvider) -> None:
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    sizes = {"size": tiny.size_of("flux"), "cfg": 2.0, "steps": STEPS}
    others = (
        {},
        {"size": 2 * tiny.size_of("flux")},
        {"positive": tiny.conditioning("flux", tokens=19), "negative": tiny.conditioning("flux", 2, tokens=19)},
        {"cfg": 1.0},  # a batch of one, of an engine that takes two for the least
    )
    for more in others:
        before = module.status.block_calls
        found = tiny.sample(fast, "flux", **{**sizes, **more})
        assert 0 < distance(found, tiny.sample(model, "flux", **{**sizes, **more})) < 1e-5
        assert module.status.block_calls >= before + STEPS - 2, module.status.to_json()
    engines = provider.store.list()
    assert [entry.manifest.role for entry in engines] == 2 * [Role.BLOCK.value]
    assert all(entry.manifest.details["open_sizes"] for entry in engines)


def test_another_process_finds_them(provider: EngineProvider) -> None:
    again = EngineProvider(EngineStore(provider.store.root))
    model = tiny.transformer("flux", seed=2)
    fast, module = accelerated(again, model, BuildPolicy.MANUAL)
    deadline = time.monotonic() + 240
    while not module.status.block_calls and time.monotonic() < deadline:
        found = tiny.sample(fast, "flux", cfg=2.0, steps=STEPS)
    assert module.status.block_calls
    assert distance(found, tiny.sample(model, "flux", cfg=2.0, steps=STEPS)) < 1e-5


def test_a_build_that_is_cancelled_leaves_nothing_and_the_picture_goes_on(tmp_path: Any) -> None:
    provider = EngineProvider(EngineStore(tmp_path))
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    queue = provider.blocks.queue

    def cancel() -> None:
        while not any(ticket.progress.phase in ("export", "compile") for ticket in queue.pending()):
            time.sleep(0.05)
        while queue.pending():
            queue.cancel_all("the test ends it")
            time.sleep(0.05)

    canceller = threading.Thread(target=cancel, daemon=True)
    canceller.start()
    found = tiny.sample(fast, "flux", cfg=2.0, steps=STEPS)
    canceller.join(60)
    assert not canceller.is_alive()
    assert torch.equal(found, tiny.sample(model, "flux", cfg=2.0, steps=STEPS))
    assert not provider.store.list() and not module.status.block_calls


def test_a_package_calls_attention_out(provider: EngineProvider) -> None:
    """Compiled code, a C++ operator in it, and Python that it calls: no cheaper test has all of them."""

    class Failed(Exception):
        pass

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    calls: list[int] = []

    def override(chosen: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == fails_at:
            raise Failed("in the override")
        kept.extend((tensor, tensor.clone()) for tensor in (q, k, v))
        return 0.5 * chosen(q, k, v, *args, **kwargs)

    fails_at = 0
    model = tiny.transformer("wan")
    fast, module = accelerated(provider, model)
    for patcher in (fast, model):
        patcher.model_options["transformer_options"]["optimized_attention_override"] = override
    sizes = {"cfg": 2.0, "steps": STEPS}
    for size in (tiny.size_of("wan"), 2 * tiny.size_of("wan")):
        before = module.status.block_calls
        found = tiny.sample(fast, "wan", **sizes, size=size)
        assert 0 < distance(found, tiny.sample(model, "wan", **sizes, size=size)) < 1e-5
        assert module.status.block_calls >= before + STEPS - 2, module.status.to_json()
    calls.clear()
    tiny.sample(fast, "wan", **sizes)
    here, _ = len(calls), calls.clear()
    tiny.sample(model, "wan", **sizes)
    assert len(calls) == here > STEPS
    assert all(torch.equal(tensor, clone) for tensor, clone in kept)  # what an override keeps stays as it is
    calls.clear()
    fails_at = here // 2
    with pytest.raises(Failed, match="in the override"):
        tiny.sample(fast, "wan", **sizes)
    assert len(calls) == fails_at
    assert distance(tiny.sample(fast, "wan", **sizes), tiny.sample(model, "wan", **sizes)) < 1e-5


def test_a_package_calls_functions_of_other_nodes_out(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As IP-Adapter and NAG have them; these write into what they are given, and keep it."""
    only = {row.place: row for row in BLOCK_CLASSES if row.name == "BasicTransformerBlock"}
    monkeypatch.setattr(block_classes, "_BLOCKS", only)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        q.mul_(1 + v.mean(1, keepdim=True))
        k.zero_()
        kept.extend((tensor, tensor.clone()) for tensor in (q, k, v))
        return q

    def follow(n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        kept.append((n, n.mul_(0.5).clone()))
        return n

    model = tiny.model()
    fast, module = accelerated(provider, model)
    for patcher in (fast, model):
        for place in (("input", 1), ("middle", 0), ("output", 3)):
            patcher.set_model_attn2_replace(attend, *place)
        patcher.set_model_attn1_output_patch(follow)
    for size in (64, 128):
        before = module.status.to_json()
        found = tiny.sample(fast, steps=STEPS, size=size)
        assert 0 < distance(found, tiny.sample(model, steps=STEPS, size=size)) < 1e-5
        assert module.status.since(before)["blocks_on_engines"] >= 3 * (STEPS - 2), module.status.to_json()
    assert all(torch.equal(tensor, clone) for tensor, clone in kept) and len(kept) > 50
    assert any("attn1_output_patch attn2 outside" in entry.manifest.label for entry in provider.store.list())


@pytest.mark.slow
def test_packages_cast_weights_that_are_stored_in_eight_bits(provider: EngineProvider) -> None:
    known = set(provider.store.digests())
    model = eight_bits.scaled_fp8()
    for name, layer in model.model.diffusion_model.named_modules():  # some without a scale, in both kinds of 8 bits
        if name.endswith("adaLN_modulation.1") and layer.bias is not None:
            layer.bias = torch.nn.Parameter(layer.bias.to(torch.float8_e5m2), requires_grad=False)
    fast, module = accelerated(provider, model)
    found = tiny.sample(fast, "sd3", cfg=2.0, steps=STEPS)
    assert 0 < distance(found, tiny.sample(model, "sd3", cfg=2.0, steps=STEPS)) < 1e-5
    assert module.status.block_calls >= STEPS - 2, module.status.to_json()
    made = (provider.store.lookup(digest) for digest in set(provider.store.digests()) - known)
    assert all(entry is not None and "float8_e4m3fn and float8_e5m2" in entry.manifest.label for entry in made)


@pytest.mark.slow
def test_one_package_of_each_kind_serves_a_vae_at_all_sizes(provider: EngineProvider) -> None:
    """Those of the attention block and of TAESD's: what goes through their builds is what differs from a UNet's."""
    for vae, kinds in ((tiny.taesd(), {"Block"}), (tiny.vae(), {"AttnBlock"})):
        only = {row.place: row for row in BLOCK_CLASSES if row.name in kinds}
        module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS))
        fast, before = accelerate_vae(vae, module), len(provider.store.digests())
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(block_classes, "_BLOCKS", only)
            for size in (8, 12):
                z = torch.randn(1, 4, size, size, generator=torch.Generator().manual_seed(1))
                for _ in range(3):
                    found = fast.decode(z)
                assert 0 < distance(found, vae.decode(z)) < 1e-5
                words = module.status.standing.blocks.split()
                assert int(words[0]) == int(words[2]) > 0, module.status.to_json()
        assert len(provider.store.digests()) == before + 1


@pytest.mark.slow
def test_packages_serve_texts_of_all_lengths_and_cast_weights_in_16_bits(provider: EngineProvider) -> None:
    """T5's layers hand on an input beside what they compute."""
    clip = tiny_text.text_encoder("t5", dtype=torch.float16)
    fast = accelerate_text_encoder(clip, module := AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE)))
    known = set(provider.store.digests())
    for words in (7, 19):
        text = tiny_text.tokens("t5", words)
        with torch.inference_mode():
            for _ in range(3):
                found = fast.encode_from_tokens(text)
            assert 0 < distance(found, clip.encode_from_tokens(text)) < 1e-5
        on_engines, _, total, *_ = module.status.standing.blocks.split()
        assert on_engines == total, module.status.to_json()
    made = [provider.store.lookup(digest) for digest in set(provider.store.digests()) - known]
    assert made and all(entry is not None and "weights in float16" in entry.manifest.label for entry in made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "sd35", "qwen"])
def test_a_package_serves_a_controlnet_of_a_transformer_at_all_sizes(
    name: str, provider: EngineProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, control = tiny_controlnets.model(name), tiny_controlnets.controlnet(name, tmp_path, monkeypatch)
    module, known = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE)), set(provider.store.digests())
    fast, family = accelerate_controlnet(control, module), tiny_controlnets.KINDS[name].family
    for size in (64, 96):
        before, options = module.status.block_calls, {"cfg": 2.0, "steps": STEPS, "size": size}
        found, wanted = (
            tiny.sample(
                model, family, **tiny_controlnets.prompts(tiny_controlnets.applied(each, name), name), **options
            )
            for each in (fast, control)
        )
        assert 0 < distance(found, wanted) < 1e-5
        assert module.status.block_calls >= before + STEPS - 2, module.status.to_json()
    (entry,) = (each for each in provider.store.list() if each.digest not in known)
    assert entry.manifest.details["open_sizes"]
