"""Blocks of a model on engines of their own: pictures stay the same, and what other nodes reach into runs as it is."""

from __future__ import annotations

import gc
import sys
import time
import types
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch

from slipstream.core.spec import Optimize, Precision, Quantised
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.blocks import block_weights, computed_outside, led_network
from slipstream.hosts.comfy.process import dynamic_vram
from slipstream.hosts.comfy.run.model_calls import ModelCalls
from slipstream.hosts.live_model.account import LiveModel
from slipstream.runtime.blocks.block_engines import BlockOffer
from slipstream.runtime.checking.step_timers import is_on_purpose
from slipstream.runtime.checking.step_times import StepTimes
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.quick_blocks import QuickBlockBackend, quick_block_provider
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.fakes import FakeClock
from slipstream.tests.tensors import distance

BY_BLOCKS = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS)
STEPS = 5
"""Of which the first asks for engines where there are none, and the next one compares them."""


@pytest.fixture
def provider(shared_provider: EngineProvider) -> EngineProvider:
    return shared_provider


def accelerated(provider: EngineProvider, patcher: Any) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, BY_BLOCKS)
    return accelerate_model(patcher, module), module


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


@pytest.mark.parametrize("family", ["sd3", "flux", "wan", "qwen", "pixart", "lumina"])
def test_a_transformer_by_blocks_makes_the_same_picture(family: str, provider: EngineProvider) -> None:
    model = tiny.transformer(family)
    fast, module = accelerated(provider, model)
    # Lumina's tells how many tokens a prompt has; older ComfyUIs count them by its mask.
    mask = {"attention_mask": torch.ones(1, 77, dtype=torch.int64)} if family == "lumina" else {}
    prompts = {name: tiny.conditioning(family, seed, **mask) for seed, name in ((1, "positive"), (2, "negative"))}
    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0, **prompts}
    found, wanted = tiny.sample(fast, family, **options), tiny.sample(model, family, **options)
    assert distance(found, wanted) < 1e-5
    assert module.status.block_calls >= STEPS - 2, module.status.to_json()


def test_other_sizes_prompts_and_batches_need_no_other_build(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    tiny.sample(fast, steps=2)
    known = provider.store.digests()
    cases: list[dict[str, Any]] = [
        {"size": 96},
        {"positive": tiny.conditioning(tokens=154), "negative": tiny.conditioning(seed=2, tokens=154)},
        {"batch": 3},
        {"cfg": 1.0},
    ]
    for case in cases:
        before = module.status.block_calls
        assert distance(tiny.sample(fast, steps=STEPS, **case), tiny.sample(model, steps=STEPS, **case)) < 1e-5
        assert module.status.block_calls > before, case
    assert set(provider.store.digests()) == set(known)


def test_the_next_process_lends_engines_to_a_batch_of_one(provider: EngineProvider) -> None:
    tiny.sample(accelerated(provider, tiny.model())[0], steps=2)
    known = set(provider.store.digests())
    later = EngineProvider(EngineStore(provider.store.root))
    later.blocks.backend = provider.blocks.backend
    module = AcceleratedModule(later, replace(BY_BLOCKS, policy=BuildPolicy.MANUAL))
    model = tiny.model()
    fast = accelerate_model(model, module)
    deadline = time.monotonic() + 60
    while not module.status.block_calls and time.monotonic() < deadline:
        found = tiny.sample(fast, steps=STEPS, cfg=1.0)
    assert distance(found, tiny.sample(model, steps=STEPS, cfg=1.0)) < 1e-5
    assert module.status.block_calls and set(provider.store.digests()) == known and not later.missing()


def labels(provider: EngineProvider) -> Counter[str]:
    """Of all engines in the store."""
    return Counter(entry.manifest.label for entry in provider.store.list())


def test_an_engine_that_is_wrong_for_a_batch_of_one_serves_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the block's code took a batch of one for one that is repeated."""
    load_block = QuickBlockBackend.load_block

    def loaded(*args: Any) -> Any:
        engine = load_block(*args)
        if not isinstance(engine._signature.sizes.shapes[0][0], int):
            run = engine._run
            engine._run = lambda given: [result * (2 if len(given[0]) == 1 else 1) for result in run(given)]
        return engine

    monkeypatch.setattr(QuickBlockBackend, "load_block", loaded)
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        model = tiny.model()
        fast, module = accelerated(provider, model)
        tiny.sample(fast, steps=2)
        known, wanted = labels(provider), tiny.sample(model, steps=STEPS, cfg=1.0)
        for _ in range(4):  # the first finds it wrong, those behind it have others built, and compared
            before = module.status.block_calls
            assert distance(tiny.sample(fast, steps=STEPS, cfg=1.0), wanted) < 1e-5
        assert module.status.block_calls > before
        assert not (known + known) - labels(provider)
        before = module.status.block_calls
        assert distance(tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)) < 1e-5
        assert module.status.block_calls > before


def patched(patcher: Any, how: str) -> Any:
    """A clone that another node changed."""
    clone = patcher.clone()
    if how == "attention input":
        clone.set_model_attn1_patch(lambda q, k, v, options: (0.5 * q, k, v))
    elif how == "attention output":
        clone.set_model_attn2_output_patch(lambda n, options: 0.5 * n)
    elif how == "one attention":  # as PAG does it
        clone.set_model_attn1_replace(lambda q, k, v, options: v, "middle", 0)
    elif how == "every attention over the text":  # as IP-Adapter does it
        for block in (1, 2, 4, 5, 7, 8):
            clone.set_model_attn2_replace(lambda q, k, v, options: q, "input", block)
            clone.set_model_attn2_replace(lambda q, k, v, options: q, "output", block)
        clone.set_model_attn2_replace(lambda q, k, v, options: q, "middle", 0)
    elif how == "skips":  # as FreeU does it
        clone.set_model_output_block_patch(lambda h, skip, options: (1.1 * h, 0.9 * skip))
    elif how == "attention function":
        from comfy.ldm.modules.attention import attention_basic

        def basic(function: Any, *args: Any, **kwargs: Any) -> Any:
            return 0.9 * attention_basic(*args, **kwargs)

        clone.model_options["transformer_options"]["optimized_attention_override"] = basic
    return clone


PATCHES = {
    "attention input": 1.0, "attention output": 1.0, "one attention": 1.0, "every attention over the text": 1.0,
    "skips": 1.0, "attention function": 1.0,
}  # fmt: skip
"""What another node does, and the least share of the calls of blocks that engines still compute."""


@pytest.mark.parametrize(("how", "least"), PATCHES.items(), ids=list(PATCHES))
def test_only_what_is_patched_runs_as_it_is(how: str, least: float, provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    found = tiny.sample(patched(fast, how), steps=STEPS)
    wanted = tiny.sample(patched(model, how), steps=STEPS)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    assert module.status.block_calls >= STEPS - 2
    on_engines, total = share_of(module)
    assert total * least <= on_engines and (on_engines == total) == (least == 1.0), module.status.to_json()["now"]
    before = module.status.to_json()
    tiny.sample(patched(fast, how), steps=STEPS)
    counted = module.status.since(before)
    assert (counted["blocks_on_engines"], counted["blocks"]) == (STEPS * on_engines, STEPS * total)


def share_of(module: AcceleratedModule) -> tuple[int, int]:
    """Calls of blocks that engines computed in the last call of the model, and all of them."""
    words = module.status.standing.blocks.split()
    return int(words[0]), int(words[2])


def overridden(patcher: Any, override: Any) -> Any:
    """A clone whose attention another node replaces."""
    clone = patcher.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = override
    return clone


class Seen:
    """An override of attention that halves what ComfyUI gives, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        options = kwargs["transformer_options"]
        told = {name: options.get(name) for name in ("block", "block_index", "cond_or_uncond", "sigmas")}
        self.calls.append((chosen, args, kwargs, told, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        assert options["optimized_attention_override"] is self
        return 0.5 * chosen(*args, **kwargs)


@pytest.mark.parametrize("kind", ["counts its calls", "adds noise"])
def test_engines_are_trusted_whatever_an_override_of_attention_does(kind: str, provider: EngineProvider) -> None:
    """As caches do that tell layers apart by counting; engines are compared without it."""
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0}

    def override() -> Any:
        calls, noise = [], torch.Generator().manual_seed(3)

        def attention(chosen: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            out = chosen(*args, **kwargs)
            if kind == "adds noise":
                return out + 0.1 * torch.randn(out.shape, generator=noise)
            return out * (0.5 if len(calls) % 4 == 0 else 1.0)

        return attention

    wanted = tiny.sample(overridden(model, override()), "flux", **options)
    for _ in range(2):
        assert distance(tiny.sample(overridden(fast, override()), "flux", **options), wanted) < 4e-5
    on_engines, total = share_of(module)
    assert on_engines == total > 0
    assert not provider.blocks._refused


def test_attention_that_runs_out_of_memory_in_an_engine_leaves_its_block_to_the_model(provider: EngineProvider) -> None:
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0}
    calls: list[bool] = []

    def attention(chosen: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(fails and not any(calls))
        if calls[-1]:
            raise torch.OutOfMemoryError("no")
        return 0.5 * chosen(*args, **kwargs)

    fails = False
    wanted = tiny.sample(overridden(model, attention), "flux", **options)
    tiny.sample(overridden(fast, attention), "flux", **options)
    fails = True
    assert distance(tiny.sample(overridden(fast, attention), "flux", **options), wanted) < 4e-5
    assert sum(calls) == 1 and module.status.block_calls > STEPS


@pytest.mark.parametrize("family", with_slow(["sd15", "sd3", "flux", "wan", "qwen", "lumina"], "sd3", "wan", "lumina"))
def test_an_override_of_attention_is_called_in_the_midst_of_engines_as_in_blocks(
    family: str, provider: EngineProvider
) -> None:
    model = tiny.model(family) if family == "sd15" else tiny.transformer(family)
    fast, module = accelerated(provider, model)
    mask = {"attention_mask": torch.ones(1, 77, dtype=torch.int64)} if family == "lumina" else {}
    prompts = {name: tiny.conditioning(family, seed, **mask) for seed, name in ((1, "positive"), (2, "negative"))}
    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0, **prompts}
    first, here, there = Seen(), Seen(), Seen()
    compared = tiny.sample(overridden(fast, first), family, **options)
    found = tiny.sample(overridden(fast, here), family, **options)
    wanted = tiny.sample(overridden(model, there), family, **options)
    assert len(first.calls) == len(there.calls) and distance(compared, wanted) < 1e-5
    assert 4 * distance(found, wanted) < 4e-5 < distance(wanted, tiny.sample(model, family, **options))
    on_engines, total = share_of(module)
    assert on_engines == total > 0
    assert len(here.calls) == len(there.calls) > 0
    for one, other in zip(here.calls, there.calls, strict=True):
        assert one[0] is other[0] and one[4:] == other[4:]
        assert one[2].keys() == other[2].keys() and len(one[1]) == len(other[1])
        assert same(one[3], other[3])
        for name, value in (*enumerate(other[1]), *other[2].items()):
            given = one[1][name] if isinstance(name, int) else one[2][name]
            assert name == "transformer_options" or same(given, value), name


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are, but for rounding."""
    if isinstance(other, torch.Tensor):
        is_alike = one.shape == other.shape and one.dtype == other.dtype
        return is_alike and (torch.equal(one, other) or distance(one, other) < 1e-4)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], value) for name, value in other.items())
    return type(one) is type(other) and bool(one == other)


class AtPlaces:
    """Functions in the place of attention and behind it, as IP-Adapter and NAG have them, that note what they are told.

    Args:
        writes: into what they are given, and keep it.
    """

    def __init__(self, writes: bool = False) -> None:
        self.calls: list[Any] = []
        self._writes, self._kept = writes, []

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        from comfy.ldm.modules.attention import optimized_attention

        self._note((q, k, v), extra)
        found = optimized_attention(q, k, v, extra["n_heads"])
        if self._writes:
            q.copy_(0.5 * found)
            k.zero_()
            v.zero_()
            return q
        return 0.5 * found

    def follow(self, n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        self._note((n,), extra)
        return n.mul_(0.8) if self._writes else 0.8 * n

    def _note(self, tensors: tuple[torch.Tensor, ...], extra: dict[str, Any]) -> None:
        if self._writes:
            self._kept += tensors
        told = {name: value for name, value in extra.items() if name not in ("callbacks", "wrappers", "uuids")}
        self.calls.append(([each.clone() for each in tensors], told, torch.is_inference_mode_enabled()))

    def on(self, patcher: Any) -> Any:
        clone = patcher.clone()
        clone.set_model_attn1_replace(self.attend, "input", 1, 0)
        clone.set_model_attn2_replace(self.attend, "middle", 0)
        clone.set_model_attn2_replace(self.attend, "output", 3)
        clone.set_model_attn1_output_patch(self.follow)
        clone.set_model_attn1_output_patch(lambda n, extra: n + 0.01)
        clone.set_model_attn2_output_patch(self.follow)
        clone.set_model_patch(self.follow, "middle_patch")
        return clone


@pytest.mark.parametrize("writes", [False, True], ids=["", "writing"])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_functions_of_other_nodes_are_called_in_the_midst_of_engines_as_in_blocks(
    family: str, writes: bool, provider: EngineProvider
) -> None:
    model = tiny.model(family)
    fast, module = accelerated(provider, model)
    first, here, there = AtPlaces(writes), AtPlaces(writes), AtPlaces(writes)
    wanted = tiny.sample(there.on(model), family, steps=STEPS)
    assert distance(wanted, tiny.sample(model, family, steps=STEPS)) > 1e-3
    assert distance(tiny.sample(first.on(fast), family, steps=STEPS), wanted) < 1e-5
    before = module.status.to_json()
    assert distance(tiny.sample(here.on(fast), family, steps=STEPS), wanted) < 1e-5
    counted = module.status.since(before)
    assert counted["blocks_on_engines"] == counted["blocks"] > 0
    assert len(first.calls) == len(here.calls) == len(there.calls) > 0
    for one, other in zip(here.calls, there.calls, strict=True):
        assert same(one[1], other[1]) and one[2] == other[2]
        assert all(map(same, one[0], other[0])) and len(one[0]) == len(other[0])


def test_an_override_and_a_function_at_a_place_are_both_called_in_the_midst(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)

    def both(patcher: Any) -> Any:
        return overridden(AtPlaces().on(patcher), Seen())

    wanted = tiny.sample(both(model), steps=STEPS)
    assert distance(wanted, tiny.sample(AtPlaces().on(model), steps=STEPS)) > 1e-3
    for _ in range(2):
        assert distance(tiny.sample(both(fast), steps=STEPS), wanted) < 1e-5
    on_engines, total = share_of(module)
    assert on_engines == total


def test_other_patches_beside_it_leave_what_a_function_is_told(provider: EngineProvider) -> None:
    """A block keeps all patches to itself, also those that were not there when its engine was compared."""
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    told: list[set[str]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        told.append(set(extra))
        return q

    def on(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.set_model_attn2_replace(attend, "middle", 0)
        return clone

    tiny.sample(on(fast), steps=STEPS)
    told.clear()
    for patcher in (on(fast), patched(on(fast), "skips"), on(model), patched(on(model), "skips")):
        tiny.sample(patcher, steps=1)
    assert told[0] == told[1] == told[2] == told[3] and not told[0] & {"patches", "patches_replace"}


@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("no")], ids=repr)
def test_an_engine_that_cannot_be_compared_leaves_its_block_to_the_model(
    error: Exception, provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    model = tiny.model()
    fast, module = accelerated(provider, model)
    monkeypatch.setattr(computed_outside.StandIns, "_computed", fail)
    found, wanted = tiny.sample(AtPlaces().on(fast), steps=STEPS), tiny.sample(AtPlaces().on(model), steps=STEPS)
    assert distance(found, wanted) < 1e-5
    on_engines, total = share_of(module)
    assert on_engines < total


def test_functions_behind_a_transformers_attention_are_called_in_the_midst_of_engines(
    provider: EngineProvider,
) -> None:
    """As NAG has them: Flux's blocks tell them where the picture's tokens are."""
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)

    def on(patcher: Any, told: list[Any]) -> Any:
        def follow(n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            told.append((n.shape, extra.get("img_slice"), extra["block_type"], extra["block_index"]))
            first, last = extra.get("img_slice") or (0, n.shape[1])
            n[:, first:last] *= 0.5
            return n

        clone = patcher.clone()
        clone.set_model_attn1_output_patch(follow)
        return clone

    here: list[Any] = []
    there: list[Any] = []
    wanted = tiny.sample(on(model, there), "flux", steps=STEPS)
    if not there:
        pytest.skip("this ComfyUI's Flux calls no such functions")
    assert distance(wanted, tiny.sample(model, "flux", steps=STEPS)) > 1e-3
    for _ in range(2):
        here.clear()
        assert distance(tiny.sample(on(fast, here), "flux", steps=STEPS), wanted) < 1e-5
        assert here == there
    on_engines, total = share_of(module)
    assert on_engines == total > 0


@pytest.mark.parametrize("how", ["another shape", "another kind", "raises", "no memory"])
def test_a_function_that_engines_cannot_call_out_leaves_its_block_to_the_model(
    how: str, provider: EngineProvider
) -> None:
    class Odd(torch.Tensor):
        pass

    model = tiny.model()
    fast, module = accelerated(provider, model)
    calls: list[bool] = []

    def follow(n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        calls.append(True)
        if how == "another shape":
            return n[:, :1]
        if how == "another kind":
            return (0.5 * n).as_subclass(Odd)
        if len(calls) > 20 and not failed:
            failed.append(len(calls))
            raise torch.OutOfMemoryError("no") if how == "no memory" else ValueError("its own")
        return 0.5 * n

    def on(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.set_model_attn2_output_patch(follow)
        return clone

    failed: list[int] = [0]
    wanted = tiny.sample(on(model), steps=STEPS)
    calls.clear()
    failed.clear()
    if how == "raises":
        tiny.sample(on(fast), steps=STEPS)
        with pytest.raises(ValueError, match="its own"):
            for _ in range(3):
                tiny.sample(on(fast), steps=STEPS)
        assert failed == [len(calls)] and not forwards(model)
        return
    for _ in range(2):
        assert distance(tiny.sample(on(fast), steps=STEPS), wanted) < 1e-5
    on_engines, total = share_of(module)
    assert module.status.block_calls and (on_engines == total) == (how == "no memory")


def test_a_function_whose_result_an_engine_does_not_take_is_called_once_all_the_same(provider: EngineProvider) -> None:
    """It draws noise of its own at each call, so that one call too many makes another picture."""
    model = tiny.model()
    fast, module = accelerated(provider, model)

    def on(patcher: Any, calls: list[Any]) -> Any:
        noise = torch.Generator().manual_seed(1)

        def follow(n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            calls.append(1)
            return (n + 0.3 * torch.randn(n.shape, generator=noise)).mean(1, keepdim=True)

        def middle(x: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            calls.append(2)
            return x + 0.1 * torch.randn(x.shape, generator=noise)

        clone = patcher.clone()
        clone.set_model_patch(middle, "middle_patch")
        clone.set_model_attn2_output_patch(follow)
        return clone

    there: list[Any] = []
    wanted = tiny.sample(on(model, there), steps=STEPS)
    for _ in range(3):
        here: list[Any] = []
        assert distance(tiny.sample(on(fast, here), steps=STEPS), wanted) < 1e-5
        assert here == there
    on_engines, total = share_of(module)
    assert 0 < on_engines < total


def test_a_block_says_its_own_facts_whatever_options_say(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    told: list[Any] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        told.append(extra.get("n_heads"))
        return q

    def on(patcher: Any, heads: int | None = None) -> Any:
        clone = patcher.clone()
        clone.set_model_attn2_replace(attend, "middle", 0)
        if heads is not None:
            clone.model_options["transformer_options"]["n_heads"] = heads
        return clone

    tiny.sample(on(model), steps=1)
    heads = told[-1]
    tiny.sample(on(fast, heads), steps=STEPS)  # which is the same by chance, while the engine is compared
    told.clear()
    for other in (None, 99):
        tiny.sample(on(fast, other), steps=1)
    assert set(told) == {heads} and len(told) == 2


def test_functions_are_told_what_options_said_when_the_block_began(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)

    def on(patcher: Any, told: list[Any]) -> Any:
        def override(chosen: Any, *args: Any, **kwargs: Any) -> Any:
            options = kwargs["transformer_options"]
            options["mark"] = options.get("mark", 0) + 1
            return chosen(*args, **kwargs)

        def follow(n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            told.append((extra.get("mark"), extra["n_heads"]))
            extra["n_heads"] = 0
            return n

        clone = overridden(patcher, override)
        clone.set_model_attn1_output_patch(follow)
        clone.set_model_attn2_output_patch(follow)
        return clone

    there: list[Any] = []
    tiny.sample(on(model, there), steps=STEPS)
    for _ in range(2):
        here: list[Any] = []
        tiny.sample(on(fast, here), steps=STEPS)
        assert here == there
    on_engines, total = share_of(module)
    assert on_engines == total


def test_code_that_others_replace_is_seen_beside_layers_whose_code_cannot_be_read(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.ldm.modules.attention as attention

    without_file = types.ModuleType("pack_without_file")
    methods = {"forward": lambda self, x: x, "__module__": without_file.__name__}
    without_file.Foreign = type("Foreign", (torch.nn.Module,), methods)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pack_without_file", without_file)
    model = tiny.model()
    fast, module = accelerated(provider, model)
    model.model.diffusion_model.input_blocks[1].append(without_file.Foreign())
    tiny.sample(fast, steps=STEPS)
    tiny.sample(fast, steps=STEPS)
    on_engines, _ = share_of(module)
    assert on_engines
    default = attention.default
    monkeypatch.setattr(attention, "default", lambda value, other: 0.5 * default(value, other))
    found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    monkeypatch.undo()
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))


def test_layers_of_others_go_once_they_left_the_model(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    blocks = model.model.diffusion_model.input_blocks[1]
    blocks.append(torch.nn.Identity())
    known = weakref.ref(blocks[-1])
    tiny.sample(fast, steps=STEPS)
    del blocks[-1]
    tiny.sample(fast, steps=STEPS)
    gc.collect()
    assert known() is None


def test_what_changes_tokens_before_attention_is_called_out_with_it(provider: EngineProvider) -> None:
    """As HyperTile and token merging do: they divide the tokens before it, and put them together behind it."""
    model = tiny.model()
    fast, module = accelerated(provider, model)

    def on(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.set_model_attn1_patch(lambda n, context, value, extra: (*[n.unflatten(1, (2, -1)).flatten(0, 1)] * 3,))
        clone.set_model_attn1_output_patch(lambda n, extra: n.unflatten(0, (-1, 2)).flatten(1, 2))
        return clone

    found, wanted = tiny.sample(on(fast), steps=STEPS), tiny.sample(on(model), steps=STEPS)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    on_engines, total = share_of(module)
    assert on_engines == total, "the layers that are called out have engines of their own"


@pytest.mark.parametrize("how", ["fails", "gives another shape"])
def test_a_function_before_attention_is_called_once_whatever_becomes_of_it(how: str, provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    calls = []

    def on(patcher: Any, is_odd: bool) -> Any:
        def before(n: torch.Tensor, context: Any, value: Any, extra: Any) -> Any:
            calls.append(tuple(n.shape))
            if is_odd and how == "fails":
                raise ValueError("mine")
            return (n[:, :1] if is_odd else 0.5 * n), context, value

        clone = patcher.clone()
        clone.set_model_attn1_patch(before)
        return clone

    tiny.sample(on(fast, False), steps=STEPS)
    assert module.status.block_calls
    wanted, found = [], []
    for patcher, seen in ((model, wanted), (fast, found)):
        calls.clear()
        if how == "fails":
            with pytest.raises(ValueError, match="mine"):
                tiny.sample(on(patcher, True), steps=STEPS)
            seen.append(None)
        else:
            seen.append(tiny.sample(on(patcher, True), steps=STEPS))
        seen.append([*calls])
    assert found[1] == wanted[1]
    assert how == "fails" or distance(found[0], wanted[0]) < 1e-5


def test_a_block_that_tells_what_engines_cannot_is_left_to_the_model(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(computed_outside, "_HEADS", "heads")
    model = tiny.model()
    fast, module = accelerated(provider, model)
    how = "every attention over the text"
    with caplog.at_level("INFO"):
        found = tiny.sample(patched(fast, how), steps=STEPS)
    assert distance(found, tiny.sample(patched(model, how), steps=STEPS)) < 1e-5
    on_engines, total = share_of(module)
    assert on_engines < total and "how many heads" in caplog.text


def test_an_override_may_hand_back_what_it_was_given(provider: EngineProvider) -> None:
    """As perturbed attention does."""
    model = tiny.transformer("wan")
    fast, module = accelerated(provider, model)

    def values(chosen: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return v if v.shape == q.shape else chosen(q, k, v, *args, **kwargs)

    found, wanted = tiny.sample(overridden(fast, values), "wan"), tiny.sample(overridden(model, values), "wan")
    assert distance(found, wanted) < 1e-5 and module.status.block_calls


def test_what_an_override_raises_reaches_the_user(provider: EngineProvider) -> None:
    class Failed(Exception):
        pass

    model = tiny.model()
    fast, module = accelerated(provider, model)
    seen = Seen()
    tiny.sample(overridden(fast, seen), steps=STEPS)
    assert module.status.block_calls

    def fail(*args: Any, **kwargs: Any) -> Any:
        failed.append(1)
        raise Failed("in the override")

    failed: list[int] = []
    with pytest.raises(Failed, match="in the override"):
        tiny.sample(overridden(fast, fail), steps=STEPS)
    assert len(failed) == 1 and not forwards(model)
    before = module.status.block_calls
    found, wanted = tiny.sample(overridden(fast, seen), steps=STEPS), tiny.sample(overridden(model, seen), steps=STEPS)
    assert distance(found, wanted) < 1e-5 and module.status.block_calls == before + STEPS


def test_an_override_of_another_result_leaves_its_blocks_to_the_model(
    provider: EngineProvider, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(torch.Tensor):
        pass

    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)

    def odd(chosen: Any, *args: Any, **kwargs: Any) -> Any:
        return chosen(*args, **kwargs).as_subclass(Odd)

    with caplog.at_level("INFO"):
        found = tiny.sample(overridden(fast, odd), "flux", steps=STEPS)
    assert distance(found, tiny.sample(overridden(model, odd), "flux", steps=STEPS)) < 1e-5
    assert not module.status.block_calls and "another node's attention gives Odd" in caplog.text


def test_an_override_may_call_the_model_itself(provider: EngineProvider) -> None:
    """Blocks that are called in the midst of attention compute themselves."""
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    block = model.model.diffusion_model.single_blocks[0]
    inner: list[Any] = []

    def nested(chosen: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["transformer_options"].get("nested"):
            return chosen(*args, **kwargs)
        q, width = args[0], block.hidden_size
        x = q.new_ones(q.shape[0], q.shape[2], width)
        inner.append(block(x, q.new_ones(q.shape[0], width), None, transformer_options={"nested": True}))
        return chosen(*args, **kwargs)

    if "modulation" in vars(block)["_modules"]:
        found = tiny.sample(overridden(fast, nested), "flux", steps=STEPS)
        assert distance(found, tiny.sample(model, "flux", steps=STEPS)) < 1e-5
        assert module.status.block_calls >= STEPS - 2 and all(torch.equal(inner[0][0], each[0]) for each in inner)


def test_attention_that_rounds_is_computed_by_comfyui_itself(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ComfyUI was started with SageAttention or comfy-kitchen's, which are none of these on a CPU."""
    monkeypatch.setattr(computed_outside, "_EXACT", frozenset())
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        for family in ("qwen", "pixart"):
            model = tiny.transformer(family)
            fast, module = accelerated(provider, model)
            found, wanted = tiny.sample(fast, family, steps=STEPS), tiny.sample(model, family, steps=STEPS)
            assert distance(found, wanted) < 1e-5 and module.status.block_calls >= STEPS - 2
        names = [entry.manifest.label for entry in provider.store.list()]
        assert any("PixArt" in name and "attention outside" in name for name in names)


def test_a_hooked_layer_sends_its_block_alone_to_the_model(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    name = next(name for name, _ in model.model.diffusion_model.named_modules() if name.endswith("attn1.to_q"))
    layer = model.model.diffusion_model.get_submodule(name)
    handle = layer.register_forward_hook(lambda layer, args, out: 0.5 * out)
    found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    handle.remove()
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    on_engines, total = share_of(module)
    assert 0 < on_engines == total - 2  # its other attention and its feed forward are on engines


def test_reasons_that_differ_in_numbers_alone_are_logged_once(
    provider: EngineProvider, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    handles = [
        layer.register_forward_hook(lambda layer, args, out: 0.5 * out)
        for name, layer in model.model.diffusion_model.named_modules()
        if name.startswith("output_blocks") and name.endswith((".in_layers.2", ".out_layers.3"))
    ]
    with caplog.at_level("INFO"):
        for _ in range(2):
            tiny.sample(fast, steps=STEPS)
    for handle in handles:
        handle.remove()
    said = [line for line in caplog.messages if "blocks run as they are where" in line]
    assert len(handles) > 2 and len(said) == 1 and ".in_layers.2" in said[0], said  # of a block its first layer is told


def _halved(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return 0.5 * type(layer).forward(layer, *args, **kwargs)


@pytest.mark.parametrize("part", ["cross_attn", "self_attn", "ffn"])
def test_a_part_of_wans_blocks_that_another_node_replaces_leaves_the_others_on_engines(
    part: str, provider: EngineProvider
) -> None:
    """As a node does that guides the attention over the text, or divides the feed-forward."""
    model = tiny.transformer("wan")
    fast, module = accelerated(provider, model)
    network = model.model.diffusion_model

    def replaced(patcher: Any) -> Any:
        clone = patcher.clone()
        for place, block in enumerate(network.blocks):
            halved = types.MethodType(_halved, getattr(block, part))
            clone.add_object_patch(f"diffusion_model.blocks.{place}.{part}.forward", halved)
        return clone

    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0, "positive": tiny.conditioning("wan", 1),
                               "negative": tiny.conditioning("wan", 2)}  # fmt: skip
    found, wanted = tiny.sample(replaced(fast), "wan", **options), tiny.sample(replaced(model), "wan", **options)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, "wan", **options))
    parts = {"self_attn", "cross_attn"}
    if type(network.blocks[0].ffn).__name__ == "WanFeedForward":  # in older ComfyUIs it is no class of its own
        parts.add("ffn")
    on_engines, total = share_of(module)
    assert on_engines == len(parts - {part}) * len(network.blocks)
    assert total == (1 + len(parts)) * len(network.blocks)


def test_a_block_whose_own_method_lies_on_it_is_on_its_engine(provider: EngineProvider) -> None:
    """As something leaves it that led the block's calls elsewhere for a while."""
    model = tiny.model()
    fast, module = accelerated(provider, model)
    network = model.model.diffusion_model
    blocks = [each for each in network.modules() if type(each).__name__ in ("ResBlock", "BasicTransformerBlock")]
    for block in blocks:
        block.forward = block.forward
    left = [vars(block)["forward"] for block in blocks]
    found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    on_engines, total = share_of(module)
    assert distance(found, wanted) < 1e-5 and on_engines == total
    assert [vars(block)["forward"] for block in blocks] == left


def test_hooks_on_a_block_run_around_its_engine(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    network = model.model.diffusion_model
    block = next(layer for layer in network.modules() if type(layer).__name__ == "ResBlock")
    handle = block.register_forward_hook(lambda layer, args, out: 0.5 * out)
    found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    handle.remove()
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    on_engines, total = share_of(module)
    assert on_engines == total


def test_a_lora_reaches_engines_and_leaves_them_again(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)

    def with_lora(patcher: Any) -> Any:
        clone = patcher.clone()
        names = [name for name in clone.model_state_dict() if name.endswith(("to_q.weight", "emb_layers.1.weight"))]
        state = clone.model_state_dict()
        changes = {name: (torch.full_like(state[name], 0.05),) for name in names}
        assert len(clone.add_patches(changes, 1.0)) == len(names)
        return clone

    for change in (lambda patcher: patcher, with_lora, lambda patcher: patcher):
        found, wanted = tiny.sample(change(fast), steps=STEPS), tiny.sample(change(model), steps=STEPS)
        assert distance(found, wanted) < 1e-5
    assert distance(tiny.sample(with_lora(model), steps=STEPS), tiny.sample(model, steps=STEPS)) > 1e-3
    assert module.status.block_calls >= 3 * (STEPS - 2)


def test_weights_that_are_cast_at_each_call_reach_engines(provider: EngineProvider) -> None:
    """As with low VRAM, or weights that are stored in another dtype."""
    model = tiny.model()
    fast, module = accelerated(provider, model)

    def halve(weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight

    for name, layer in model.model.diffusion_model.named_modules():
        if name.endswith("to_q"):
            layer.weight_function = [halve]
    found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
    assert distance(found, wanted) < 1e-5
    on_engines, total = share_of(module)
    assert on_engines == total


def test_an_engine_that_is_wrong_is_not_used(tmp_path: Any) -> None:
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.blocks.backend.factor = 1.01
        model = tiny.model()
        fast, module = accelerated(provider, model)
        found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
        assert distance(found, wanted) < 1e-5  # rounding: here builds trace in this process, beside the first step
        assert provider.blocks.backend.calls and not module.status.block_calls


def test_an_engine_that_fails_leaves_its_blocks_to_the_model(tmp_path: Any) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    with quick_block_provider(EngineStore(tmp_path)) as provider:
        model = tiny.model()
        fast, module = accelerated(provider, model)
        tiny.sample(fast, steps=STEPS)
        for engine in provider.blocks._engines.values():
            engine._run = fail
        found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)
        assert distance(found, wanted) < 1e-5 and not forwards(model)  # their parts may be on engines


def test_the_block_is_as_it_was_where_the_model_fails(provider: EngineProvider) -> None:
    class Failed(Exception):
        pass

    def fail(h: Any, options: Any) -> Any:
        raise Failed

    model = tiny.model()
    fast, _ = accelerated(provider, model)
    fast.set_model_input_block_patch(fail)
    with pytest.raises(Failed):
        tiny.sample(fast, steps=2)
    assert not forwards(model)


def test_a_controlnet_by_blocks(provider: EngineProvider) -> None:
    model, control = tiny.model(), tiny.controlnet()
    fast, module = accelerated(provider, model)
    of_control = AcceleratedModule(provider, BY_BLOCKS)

    def sampled(patcher: Any, network: Any) -> torch.Tensor:
        hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
        prompts = [tiny.conditioning(seed=seed, control=network.copy().set_cond_hint(hint, 1.0)) for seed in (1, 2)]
        for prompt in prompts:
            prompt[0][1]["control_apply_to_uncond"] = False
        return tiny.sample(patcher, steps=STEPS, positive=prompts[0], negative=prompts[1])

    found, wanted = sampled(fast, accelerate_controlnet(control, of_control)), sampled(model, control)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS))
    assert module.status.block_calls >= STEPS - 2
    assert of_control.status.block_calls >= STEPS - 2, of_control.status.to_json()


def test_weights_that_comfyui_stages_reach_engines(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic VRAM: pages are taken away in the midst of a picture, and other layers get the same memory."""
    kind = staging.switch_on(monkeypatch)
    model = tiny.model()
    comfy.model_management.archive_model_dtypes(model.model)
    patcher = kind(model.model, staging.DEVICE, torch.device("cpu"))
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        fast, module = accelerated(provider, patcher)
        found, wanted = tiny.sample(fast, steps=STEPS), tiny.sample(patcher, steps=STEPS)
        assert distance(found, wanted) < 1e-5
        assert module.status.block_calls >= STEPS - 2, module.status.to_json()

        casts, cast = [], block_weights._cast

        def counted(layer: Any, *args: Any) -> Any:
            casts.extend([layer] if hasattr(layer, "_v") else [])  # small ones are not staged
            return cast(layer, *args)

        monkeypatch.setattr(block_weights, "_cast", counted)
        loads, load = [], kind.load
        monkeypatch.setattr(
            kind, "load", lambda self, *args, **kwargs: (loads.append(self), load(self, *args, **kwargs))[1]
        )
        before = module.status.block_calls
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        assert module.status.block_calls == before + STEPS and not casts, "weights that stay are looked up once a run"
        assert len(loads) == 1, "the plain picture's load made small weights anew"
        with monkeypatch.context() as short_of_memory:
            short_of_memory.setattr(dynamic_vram, "hold", lambda patcher: None)
            assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
            assert len(loads) == 1, "what the last load left is not loaded again"
            assert module.status.block_calls == before + 2 * STEPS and not casts, "what lies there still is not cast"

            changed = fast.clone()
            names = [name for name in patcher.model_state_dict() if name.endswith("to_q.weight")]
            assert changed.add_patches({name: ("set", (patcher.model_state_dict()[name] * 2,)) for name in names}, 1.0)
            with_patch = patcher.clone()
            with_patch.patches, with_patch.patches_uuid = changed.patches, changed.patches_uuid
            patched = tiny.sample(changed, steps=STEPS)
            assert casts and distance(patched, tiny.sample(with_patch, steps=STEPS)) < 1e-5 < distance(patched, wanted)
            assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
            assert module.status.block_calls == before + 4 * STEPS

        pages = patcher.model.dynamic_vbars[patcher.load_device]

        def under_pressure(h: torch.Tensor, options: Any) -> torch.Tensor:
            pages.take_away()
            return h

        fast.set_model_input_block_patch(under_pressure)
        for is_short in (False, True):
            with monkeypatch.context() as short_of_memory:
                casts.clear()
                if is_short:
                    short_of_memory.setattr(dynamic_vram, "hold", lambda patcher: None)
                assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
                assert bool(casts) == is_short and not any(pages.pins.values())


def test_what_is_not_built_is_asked_for_again_by_the_next_run(tmp_path: Any) -> None:
    model = tiny.model()
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        by_hand = AcceleratedModule(provider, replace(BY_BLOCKS, policy=BuildPolicy.MANUAL))
        wanted = tiny.sample(accelerate_model(model, by_hand), steps=STEPS)
        assert not provider.store.digests() and not by_hand.status.block_calls
        assert "builds are asked for by hand" in by_hand.status.standing.reason
        assert by_hand.status.eager_calls == STEPS
        fast, module = accelerated(provider, model)
        assert distance(tiny.sample(fast, steps=STEPS), wanted) < 1e-5
        assert module.status.block_calls == STEPS - 2
        tiny.sample(accelerate_model(model, by_hand), steps=STEPS)
        assert by_hand.status.block_calls == STEPS


def test_a_run_without_engines_is_asked_about_blocks_a_few_times_only(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at the live model at each step takes a slow CPU longer than a GPU hides."""
    looks = []
    changed = LiveModel.changed_parts
    monkeypatch.setattr(LiveModel, "changed_parts", lambda *call: looks.append(call) or changed(*call))
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        module = AcceleratedModule(provider, replace(BY_BLOCKS, policy=BuildPolicy.MANUAL))
        fast = accelerate_model(model := tiny.model(), module)
        assert torch.equal(tiny.sample(fast, steps=30), tiny.sample(model, steps=30))
        assert module.status.eager_calls == 30 and 4 <= len(looks) < 15
        assert "builds are asked for by hand" in module.status.standing.reason


def test_prompts_of_ever_other_lengths_are_not_compared_with_the_model_each(tmp_path: Any) -> None:
    """Qwen-Image, Z-Image and PixArt have another number of tokens for each prompt."""
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.step_times = StepTimes(provider.store, retires=False)
        fast, module = accelerated(provider, tiny.model())
        tiny.sample(fast, steps=STEPS)
        for tokens in range(65, 73):
            prompts = {name: tiny.conditioning(tokens=tokens) for name in ("positive", "negative")}
            tiny.sample(fast, steps=8, **prompts)
        on_purpose = module.status.to_json()["reasons"]["timed on purpose, to compare"]
        assert 2 <= on_purpose <= 6 and module.status.block_calls >= 8 * 8 - on_purpose


def test_calls_of_ever_other_sizes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led_network, "_OFFERS_KEPT", 2)
    block = led_network.LedBlock("", torch.nn.Identity(), None, (frozenset(), {}, {}))  # type: ignore[arg-type]
    offers = [BlockOffer(None, (), Precision.FP32) for _ in range(3)]  # type: ignore[arg-type]
    calls = [led_network.BlockCall(None, (size,), torch.device("cpu"), Optimize.FAST_BUILD) for size in range(3)]
    for number in (0, 1, 1, 2):
        block.keep(calls[number], offers[number])
    assert block.offers == {calls[1]: offers[1], calls[2]: offers[2]}


@pytest.mark.parametrize(
    "options",
    [{1: "x", "a": "y"}, {("a", 1): "x", 2: None}, {"patches": {1: [min], "a": []}}, {"patches": {"a": torch.ones(2)}}],
    ids=str,
)
def test_whatever_others_put_into_options_ends_no_picture(options: dict[Any, Any], provider: EngineProvider) -> None:
    def given(patcher: Any) -> Any:
        clone = patcher.clone()
        clone.model_options["transformer_options"].update(options)
        return clone

    model = tiny.model()
    fast, module = accelerated(provider, model)
    assert distance(tiny.sample(given(fast), steps=STEPS), tiny.sample(given(model), steps=STEPS)) < 1e-5
    assert module.status.block_calls


def test_blocks_that_are_slower_beside_another_nodes_patch_give_way_there_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, by_model, model = FakeClock(), ModelCalls._plain, tiny.model()

    def plain(calls: Any, *args: Any) -> Any:
        slow = 50.0 if calls.options.get("patches") else 10.0
        clock.now += 30.0 if is_on_purpose() else slow
        return by_model(calls, *args)

    monkeypatch.setattr(ModelCalls, "_plain", plain)
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.step_times = StepTimes(provider.store, {}, lambda device: clock)
        fast, module = accelerated(provider, model)

        def by_blocks(patcher: Any) -> int:
            before = module.status.block_calls
            tiny.sample(patcher, steps=12)
            return module.status.block_calls - before

        assert by_blocks(fast)
        beside = [by_blocks(patched(fast, "skips")) for _ in range(9)]
        assert beside[0] and not beside[-1], beside
        assert any("50.0 ms a step" in reason for reason in module.status.to_json()["reasons"])
        assert by_blocks(fast) >= 10 and not by_blocks(patched(fast, "skips"))


def test_build_engine_makes_the_engines_of_all_blocks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.hosts.comfy.process import shared_provider
    from slipstream.nodes.build_engine import BuildEngine

    hidden = type("Hidden", (), {"unique_id": "7", "prompt": None, "extra_pnginfo": None})
    monkeypatch.setattr(BuildEngine, "hidden", hidden)
    chosen = {"batch": 2, "tokens": 77, "backend": "auto", "precision": "auto", "optimize": "blocks"}
    with quick_block_provider(EngineStore(tmp_path)) as provider, torch.inference_mode():
        monkeypatch.setattr(shared_provider, "provider", lambda: provider)
        model = tiny.model()
        report = BuildEngine.execute(model, "64x64", **chosen).result[1].splitlines()
        assert len(report) == len(provider.store.digests()) > 3
        assert all("fp32, built in" in line and line.endswith("ready") for line in report), report
        fast, module = accelerated(provider, model)
        found, wanted = tiny.sample(fast, size=96, steps=3), tiny.sample(model, size=96, steps=3)
        assert distance(found, wanted) < 1e-5 and module.status.block_calls
        assert len(provider.store.digests()) == len(report)


def test_eight_bits_are_not_for_engines_of_blocks_and_the_node_says_so(provider: EngineProvider) -> None:
    model = tiny.model("sd15")
    module = AcceleratedModule(provider, replace(BY_BLOCKS, precision=Quantised.FP8))
    assert torch.equal(tiny.sample(accelerate_model(model, module), "sd15"), tiny.sample(model, "sd15"))
    assert module.status.block_calls == 0
    assert any("do not compute in 8 bits; choose another" in reason for reason in module.status.to_json()["reasons"])
