"""A text encoder's layers on engines of their own: conditioning stays the same, whatever the length of a text."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sd
import pytest
import torch

import nodes
from slipstream.core.errors import UnsupportedModel
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate_text_encoder import accelerate_text_encoder
from slipstream.hosts.comfy.blocks.block_architecture import block_digest
from slipstream.hosts.comfy.blocks.block_classes import block_class_of
from slipstream.hosts.comfy.models.text_stacks import ComfyTextStack, stacks_of
from slipstream.runtime.checking.step_times import StepTimes
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.models import tiny_text
from slipstream.tests.comfyui.support.models.tiny_text import text_encoder, tokens
from slipstream.tests.fakes import FakeClock
from slipstream.tests.tensors import distance

COLD = 2
"""Texts of which the first waits for engines where there are none, and the next one compares them."""
Clip = Any


pytestmark = pytest.mark.usefixtures("as_comfyui_runs_nodes")


@pytest.fixture
def provider(shared_provider: EngineProvider) -> EngineProvider:
    return shared_provider


def accelerated(provider: EngineProvider, clip: Clip, by_hand: bool = False) -> tuple[Clip, AcceleratedModule]:
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE), by_hand)
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
    for words, cold in ((12, COLD), (31, 0)):  # the third length is served unseen
        text = tokens(kind, words, seed=words)
        for _ in range(cold):
            encoded(fast, text)
        runs = provider.blocks.backend.calls
        assert_same(encoded(fast, text), encoded(clip, text))
        on_engines, total = share_of(module)
        assert on_engines == total == (6 if kind == "clip" else 3), module.status.to_json()
        assert provider.blocks.backend.calls == runs + total
    assert set(provider.store.digests()) == known


def lora(clip: Clip, seed: int, strength: float = 1.0) -> Clip:
    """As nodes for LoRAs do it."""
    made, generator = clip.clone(), torch.Generator().manual_seed(seed)
    weights = clip.cond_stage_model.state_dict()
    changes = {
        name: ("diff", (0.05 * torch.randn(weight.shape, generator=generator),))
        for name, weight in weights.items()
        if name.endswith(("q_proj.weight", "fc1.weight", "SelfAttention.q.weight"))
    }
    assert made.add_patches(changes, strength)
    return made


def skip_two_layers(clip: Clip) -> Clip:
    (made,) = nodes.CLIPSetLastLayer().set_last_layer(clip, -3)
    return made


VARIANTS: dict[str, tuple[Callable[[Clip], Clip], Any]] = {
    "a LoRA": (lambda clip: lora(clip, 1), tokens()),
    "another LoRA": (lambda clip: lora(lora(clip, 2), 3, 0.5), tokens()),
    "no LoRA again": (lambda clip: clip, tokens()),
    "CLIP skip": (skip_two_layers, tokens()),
    "words that count more": (lambda clip: clip, tokens(weight=1.4)),
    "a long text": (lambda clip: clip, tokens(words=100)),
}


def test_loras_skipped_layers_weights_and_long_texts_reach_engines(provider: EngineProvider) -> None:
    """Each behind one node, in turn."""
    clip = text_encoder()
    fast, module = warmed(provider, clip, tokens())
    plain = encoded(clip, tokens())
    for name, (change, text) in VARIANTS.items():
        for _ in range(COLD):  # another batch needs engines of its own
            encoded(change(fast), text)
        found, wanted = encoded(change(fast), text), encoded(change(clip), text)
        assert_same(found, wanted)
        on_engines, total = share_of(module)
        assert on_engines == total == 6, (name, module.status.to_json())
        is_other = name != "no LoRA again"
        assert is_other == (wanted[0].shape != plain[0].shape or distance(wanted[0], plain[0]) > 1e-3), name


def test_unprojected_and_plain_calls(provider: EngineProvider) -> None:
    """As other nodes call it."""
    clip = text_encoder()
    fast, module = warmed(provider, clip, tokens())
    for options in ({"return_pooled": True}, {"return_pooled": "unprojected"}, {"return_dict": True}, {}):
        runs = provider.blocks.backend.calls
        found, wanted = (each.encode_from_tokens(tokens(), **options) for each in (fast, clip))
        if isinstance(wanted, dict):
            found, wanted = found["cond"], wanted["cond"]
        assert_same(*((each if isinstance(each, tuple) else (each,)) for each in (found, wanted)))
        assert provider.blocks.backend.calls == runs + 6, module.status.to_json()


def layers_of_clip_l(clip: Clip) -> Any:
    return clip.cond_stage_model.clip_l.transformer.text_model.encoder.layers


def hook_a_layer(clip: Clip) -> None:
    layers_of_clip_l(clip)[1].mlp.fc1.register_forward_hook(lambda layer, args, out: 0.5 * out)


def replace_a_layer(clip: Clip) -> None:
    layer = torch.nn.Linear(64, 64)
    layer.forward = lambda x: 0.5 * x  # type: ignore[method-assign]
    clip.patcher.add_object_patch("clip_l.transformer.text_model.encoder.layers.1.self_attn.out_proj", layer)


def give_a_layer_another_activation(clip: Clip) -> None:
    layers_of_clip_l(clip)[1].mlp.activation = torch.nn.functional.silu


@pytest.mark.parametrize("change", [hook_a_layer, replace_a_layer, give_a_layer_another_activation])
def test_only_the_layer_that_is_changed_runs_as_it_is(change: Callable[[Clip], None], provider: EngineProvider) -> None:
    clip = text_encoder()
    change(clip)
    fast, module = warmed(provider, clip, tokens())
    found, wanted = encoded(fast, tokens()), encoded(clip, tokens())
    assert_same(found, wanted)
    assert distance(wanted[0], encoded(text_encoder(), tokens())[0]) > 1e-3
    assert share_of(module) == (5, 6), module.status.to_json()


def test_attention_of_another_extension_is_called_in_the_midst_of_engines(provider: EngineProvider) -> None:
    clip, calls = text_encoder(), []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: Any = None) -> torch.Tensor:
        calls.append(heads)
        return 0.5 * v

    def forward(x: torch.Tensor, mask: Any = None, intermediate_output: Any = None) -> Any:
        for layer in layers_of_clip_l(clip):
            x = layer(x, mask, attention)
        return x, x

    clip.cond_stage_model.clip_l.transformer.text_model.encoder.forward = forward
    fast, module = warmed(provider, clip, tokens())
    wanted = encoded(clip, tokens())
    calls.clear()
    assert_same(encoded(fast, tokens()), wanted)
    assert len(calls) == 3 and share_of(module) == (6, 6), module.status.to_json()


def test_weights_that_comfyui_stages_reach_engines(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic VRAM."""
    kind = staging.switch_on(monkeypatch)
    clip = text_encoder("t5", dtype=torch.float16)
    wanted = encoded(clip, tokens("t5"))
    comfy.model_management.archive_model_dtypes(clip.cond_stage_model)
    clip.patcher = kind(clip.cond_stage_model, staging.DEVICE, torch.device("cpu"))
    clip.patcher.set_model_compute_dtype(torch.float32)
    fast, module = warmed(provider, clip, tokens("t5"))
    assert_same(encoded(fast, tokens("t5")), wanted)
    assert share_of(module) == (3, 3), module.status.to_json()


def test_nothing_is_left_in_the_text_encoder_or_kept_of_it(provider: EngineProvider) -> None:
    clip = text_encoder("t5")
    fast, module = warmed(provider, clip, tokens("t5"))
    encoded(fast, tokens("t5"))
    assert share_of(module) == (3, 3)
    found = clip.cond_stage_model.named_modules()
    assert not [name for name, layer in found if {"forward", "encode_token_weights"} & vars(layer).keys()]
    comfy.model_management.unload_all_models()
    gone = weakref.ref(clip.cond_stage_model)
    del clip, fast, found
    gc.collect()
    assert gone() is None


def test_an_extension_that_takes_its_method_away_again_ends_no_text(provider: EngineProvider) -> None:
    clip = text_encoder("t5")
    fast, module = warmed(provider, clip, tokens("t5"))
    model, inner = clip.cond_stage_model, clip.cond_stage_model.t5xxl
    forward = inner.forward

    def replacing(*args: Any, **kwargs: Any) -> Any:
        vars(model)["encode_token_weights"] = type(model).encode_token_weights.__get__(model)
        del vars(model)["encode_token_weights"]
        return forward(*args, **kwargs)

    wanted = encoded(clip, tokens("t5"))
    inner.forward = replacing
    try:
        assert_same(encoded(fast, tokens("t5")), wanted)
    finally:
        del inner.forward
    assert_same(encoded(fast, tokens("t5")), wanted)
    assert share_of(module) == (3, 3)


def test_engines_that_are_slower_are_not_used_any_more(tmp_path: Any) -> None:
    class Clock(FakeClock):
        """Each call of an engine takes 10 ms, and each text 8 besides."""

        def mark(self) -> float:
            self.now += 8
            return self.now + 10 * provider.blocks.backend.calls

    clock = Clock()
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.step_times = StepTimes(provider.store, clock_of=lambda device: clock)
        clip = text_encoder("qwen")
        fast, module = warmed(provider, clip, tokens("qwen"))
        wanted = encoded(clip, tokens("qwen"))
        for _ in range(40):
            assert_same(encoded(fast, tokens("qwen")), wanted)
        assert "engines of blocks take" in module.status.standing.reason, module.status.to_json()
        assert module.status.block_calls >= 10
        runs = provider.blocks.backend.calls
        encoded(fast, tokens("qwen"))
        assert provider.blocks.backend.calls == runs


def test_the_button_builds_all_that_a_text_needs(tmp_path: Any) -> None:
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        clip = text_encoder("qwen")
        fast, module = accelerated(provider, clip, by_hand=True)
        assert_same(encoded(fast, tokens("qwen")), encoded(clip, tokens("qwen")))
        assert share_of(module) == (3, 3) and len(provider.store.digests()) == 1


@pytest.mark.parametrize(
    ("backend", "reason"), [(BackendChoice.OFF, "switched off"), (BackendChoice.TENSORRT, "choose compiled")]
)
def test_what_the_user_chose_is_honoured(backend: BackendChoice, reason: str, provider: EngineProvider) -> None:
    clip, module = text_encoder("t5"), AcceleratedModule(provider, Settings(backend=backend))
    runs = provider.blocks.backend.calls
    found, _ = encoded(accelerate_text_encoder(clip, module), tokens("t5"))
    assert torch.equal(found, encoded(clip, tokens("t5"))[0]) and provider.blocks.backend.calls == runs
    assert reason in module.status.standing.reason


def test_a_text_encoder_of_another_kind_says_why_it_runs_as_it_is(provider: EngineProvider) -> None:
    clip = text_encoder("t5")
    clip.cond_stage_model.t5xxl.transformer.encoder = None
    fast, module = accelerated(provider, clip)
    with pytest.raises(TypeError):
        encoded(clip, tokens("t5"))
    with pytest.raises(TypeError):
        encoded(fast, tokens("t5"))
    assert "have no engines yet" in module.status.standing.reason


def test_layers_that_keep_what_they_compute_run_as_they_are() -> None:
    """Those of a text encoder that writes a text by itself, in newer ComfyUIs."""
    stack = next(stacks_of(text_encoder("qwen").cond_stage_model))
    layer = stack.layers[0]  # type: ignore[index,union-attr]
    kind = block_class_of(layer)
    assert kind is not None
    given = {"x": torch.zeros(1, 2, 64), "optimized_attention": print}
    assert kind.arguments(type(layer).forward, (), given)[0] == given
    with pytest.raises(UnsupportedModel):
        kind.arguments(type(layer).forward, (), {**given, "past_key_value": []})


def test_activations_without_a_name_are_told_apart() -> None:
    """CLIP-L's and SigLIP's are functions of the same module, both called <lambda>."""
    found = set()
    for activation in ("quick_gelu", "gelu_pytorch_tanh", "gelu"):
        stack = next(stacks_of(tiny_text.ClipPart(activation)))
        owner = ComfyTextStack.of(stack)
        found |= {block_digest(owner.fresh.get_submodule("layers.0")), owner.fingerprint.architecture}
    assert len(found) == 6


def test_an_extension_that_encodes_in_its_own_way_has_its_layers_on_engines(provider: EngineProvider) -> None:
    clip, calls = text_encoder("t5"), []
    method = clip.cond_stage_model.encode_token_weights

    def encode(text: Any) -> Any:
        calls.append(text)
        found, pooled = method(text)
        return 2 * found, pooled

    clip.cond_stage_model.encode_token_weights = encode
    fast, module = warmed(provider, clip, tokens("t5"))
    wanted = encoded(clip, tokens("t5"))
    calls.clear()
    assert_same(encoded(fast, tokens("t5")), wanted)
    assert len(calls) == 1 and share_of(module) == (3, 3)
    assert clip.cond_stage_model.encode_token_weights is encode


def test_weight_hooks_that_change_the_text_encoder_in_the_midst_of_a_text(provider: EngineProvider) -> None:
    """A LoRA with a schedule: ComfyUI encodes the text once for each of its strengths."""
    clip = text_encoder("t5")
    name = "t5xxl.transformer.encoder.block.1.layer.0.SelfAttention.q.weight"
    change = {name: ("diff", (torch.ones(64, 64) * 0.05,))}
    hooks = comfy.hooks.HookGroup()
    hook = comfy.hooks.WeightHook()
    hooks.add(hook)
    hook.weights, hook.weights_clip, hook.need_weight_init = {}, change, False
    frames = comfy.hooks.HookKeyframeGroup()
    frames.add(comfy.hooks.HookKeyframe(strength=1.0))
    frames.add(comfy.hooks.HookKeyframe(strength=0.0, start_percent=0.5))
    hooks.set_keyframes_on_hooks(frames)

    def scheduled(clip: Clip) -> list[torch.Tensor]:
        made = clip.clone()
        made.patcher.forced_hooks = hooks.clone()
        made.use_clip_schedule = True
        made.patcher.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Clip))
        return [found for found, _ in made.encode_from_tokens_scheduled(tokens("t5"))]

    fast, module = warmed(provider, clip, tokens("t5"))
    wanted, plain = scheduled(clip), encoded(clip, tokens("t5"))[0]
    assert len(wanted) == 2 and distance(wanted[0], plain) > 1e-3 and distance(wanted[1], plain) < 1e-6
    for _ in range(2):
        before = module.status.block_calls
        found = scheduled(fast)
        assert_same(found, wanted)
        assert module.status.block_calls > before


def test_layers_that_comfyui_injects_a_lora_into_run_as_they_are(provider: EngineProvider) -> None:
    """Load LoRA (bypass), which computes beside the weights."""
    load = getattr(comfy.sd, "load_bypass_lora_for_models", None)
    if load is None:
        pytest.skip("this ComfyUI has no LoRAs that are injected")
    clip, name = text_encoder(), "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    parts = {f"{name}.lora_up.weight": torch.ones(128, 2) * 0.1, f"{name}.lora_down.weight": torch.ones(2, 64) * 0.1}
    fast, module = warmed(provider, clip, tokens())
    plain, wanted = encoded(clip, tokens()), encoded(load(None, clip, parts, 1.0, 1.0)[1], tokens())
    assert distance(wanted[0], plain[0]) > 1e-3
    for _ in range(2):
        assert_same(encoded(load(None, fast, parts, 1.0, 1.0)[1], tokens()), wanted)
        assert share_of(module) == (5, 6), module.status.to_json()
        assert_same(encoded(fast, tokens()), plain)  # ComfyUI leaves the layer's own method on it
        assert share_of(module) == (6, 6), module.status.to_json()


@pytest.mark.parametrize("kind", ["t5", "qwen"])
def test_new_lengths_run_on_engines_after_a_weighted_text(kind: str, tmp_path: Path) -> None:
    """Its weights are computed beside an empty text, a batch of two; engines for that are lent to other texts."""
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        clip = text_encoder(kind)
        fast, module = accelerated(provider, clip)
        for _ in range(COLD + 1):
            encoded(fast, tokens(kind, 7, weight=1.4))
        for words in (8, 12):
            for _ in range(COLD + 1):
                encoded(fast, tokens(kind, words, seed=words))
        built = set(provider.store.digests())
        for words in (19, 23, 31):
            text = tokens(kind, words, seed=words)
            assert_same(encoded(fast, text), encoded(clip, text))
            on_engines, total = share_of(module)
            assert on_engines == total
        assert set(provider.store.digests()) == built
