"""Blocks on engines for which nobody asked, as on a GPU: they serve until the engine of the whole model is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import comfy.model_management
import pytest
import torch

from slipstream.core.errors import BuildFailed
from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.block_calls import run_weights
from slipstream.hosts.comfy.blocks import block_weights
from slipstream.hosts.comfy.node_state.node_states import state_of
from slipstream.hosts.comfy.node_state.status_text import describe
from slipstream.hosts.comfy.process import dynamic_vram
from slipstream.hosts.comfy.run.model_calls import ModelCalls
from slipstream.runtime.checking.sentinel import Sentinel
from slipstream.runtime.checking.step_timers import is_on_purpose
from slipstream.runtime.checking.step_times import StepTimes
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.module import Run as ModuleRun
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, ByBlocks, Levers, Settings, parse_resolutions
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.models import dequantised, tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.fakes import FakeClock, wait_until
from slipstream.tests.tensors import distance

BY_THEMSELVES = Settings(policy=BuildPolicy.BACKGROUND, levers=Levers(by_blocks=ByBlocks.ON))
STEPS = 4


@pytest.fixture
def provider(tmp_path: Any) -> Iterator[EngineProvider]:
    """Which has no backend for whole models."""
    with quick_block_provider(EngineStore(tmp_path)) as made:
        made.backends = []
        yield made


def accelerated(
    provider: EngineProvider, patcher: Any, settings: Settings = BY_THEMSELVES, by_hand: bool = False
) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, settings, by_hand=by_hand)
    return accelerate_model(patcher, module), module


def sampled(fast: Any, model: Any, **options: Any) -> None:
    """Sample with and without: the same comes out."""
    options = {"steps": STEPS, **options}
    assert distance(tiny.sample(fast, **options), tiny.sample(model, **options)) < 1e-5


def blocks_built(provider: EngineProvider) -> int:
    wait_until(lambda: not provider.blocks.queue.pending(), 60)
    time.sleep(0.2)  # until they are loaded
    return len(provider.store.digests())


def test_blocks_serve_until_the_whole_engine_is_there(tmp_path: Any) -> None:
    model = tiny.model()
    with quick_provider(EngineStore(tmp_path)) as whole, quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.backends = whole.backends
        asked = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS)
        tiny.sample(accelerated(provider, model, asked)[0], steps=STEPS)
        fast, module = accelerated(provider, model)
        sampled(fast, model)
        assert (module.status.block_calls, module.status.engine_calls) == (STEPS, 0), module.status.to_json()
        wait_until(lambda: not provider.queue.pending(), 60)
        state = state_of(module)
        assert state.kind == "ready" and state.digest in provider.store.digests(), "the next picture is made by it"
        assert set(module.status.last_run.wanted.values()) == {state.digest}
        sampled(fast, model)
        assert (module.status.block_calls, module.status.engine_calls) == (STEPS, STEPS), module.status.to_json()


def test_a_whole_engine_that_is_slower_than_the_blocks_gives_way_to_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, by_engine, by_model, model = FakeClock(), ModuleRun._compute, ModelCalls._plain, tiny.model()

    def compute(run: Any, *args: Any) -> Any:
        clock.now += 38.0
        return by_engine(run, *args)

    def plain(calls: Any, *args: Any) -> Any:
        clock.now += 98.0 if is_on_purpose() else 34.0
        return by_model(calls, *args)

    monkeypatch.setattr(Sentinel, "is_due", lambda *args: False)  # its comparisons are calls of the model, too
    monkeypatch.setattr(ModuleRun, "_compute", compute)
    monkeypatch.setattr(ModelCalls, "_plain", plain)
    with quick_provider(EngineStore(tmp_path)) as whole, quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.backends = whole.backends
        provider.step_times = StepTimes(provider.store, {}, lambda device: clock)
        asked = Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS)
        tiny.sample(accelerated(provider, model, asked)[0], steps=STEPS)
        fast, module = accelerated(provider, model)

        def calls(changed: Any = fast) -> tuple[int, int]:
            before = module.status.block_calls, module.status.engine_calls
            sampled(changed, model, steps=12)
            return module.status.block_calls - before[0], module.status.engine_calls - before[1]

        assert calls() == (10, 0), "two steps are computed on purpose"
        wait_until(lambda: not provider.queue.pending(), 60)
        assert calls()[0] == 0, "the whole engine is there"
        assert [calls() for _ in range(2)] == [(10, 0), (12, 0)]
        state = state_of(module)
        assert (state.kind, state.text) == ("ready", "blocks")
        reason = "the engine takes 38.0 ms a step where engines of the model's blocks take 34.0 ms, so these are used"
        assert reason in state.tip and reason in describe(module)
        alone, without = accelerated(provider, model, Settings(policy=BuildPolicy.MANUAL))
        sampled(alone, model, steps=3)
        assert without.status.engine_calls == 3, "which has no engines of blocks"
        by_hand, pressed = accelerated(provider, model, by_hand=True)  # as Build engine's dry run makes it
        sampled(by_hand, model, steps=1)
        assert pressed.status.engine_calls == 1 and calls()[0] == 0


def test_a_whole_engine_that_cannot_be_built_is_told_of_though_blocks_serve(tmp_path: Any) -> None:
    model = tiny.model()
    with quick_provider(EngineStore(tmp_path)) as whole, quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.backends = whole.backends

        def fail(*_: Any) -> None:
            raise BuildFailed("it is broken")

        provider.queue._build = fail
        fast, module = accelerated(provider, model)
        sampled(fast, model)
        blocks_built(provider)
        wait_until(lambda: not provider.queue.pending(), 60)
        sampled(fast, model)
        assert module.status.block_calls
        state = state_of(module)
        assert (state.kind, state.mend) == ("failed", "retry") and "it is broken" in state.text


def test_the_line_shows_blocks_that_are_built_before_the_whole_that_waits_for_them(tmp_path: Any) -> None:
    model = tiny.model()
    with quick_provider(EngineStore(tmp_path)) as whole, quick_block_provider(EngineStore(tmp_path)) as provider:
        provider.backends = whole.backends
        provider.blocks.queue._build = lambda *_: time.sleep(3600)
        fast, module = accelerated(provider, model)
        sampled(fast, model)
        assert provider.queue.pending() and provider.blocks.queue.pending()
        wait_until(lambda: state_of(module).kind == "building", 20)
        assert "blocks' engines built" in state_of(module).text
        module.status.begin_run()  # of which nothing is known yet
        assert "blocks" not in state_of(module).text


def test_sizes_that_are_not_listed_run_on_the_model(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model, replace(BY_THEMSELVES, resolutions=parse_resolutions("1024x1024")))
    sampled(fast, model)
    assert not blocks_built(provider) and not module.status.block_calls
    assert "64×64 is not in the node's list" in module.status.standing.reason
    fast, module = accelerated(provider, model, replace(BY_THEMSELVES, resolutions=parse_resolutions("64x64")))
    sampled(fast, model)
    assert blocks_built(provider)


def test_a_click_on_a_patched_model_waits_for_its_blocks(provider: EngineProvider) -> None:
    model, calls = tiny.model(), []

    def patch(h: torch.Tensor, skip: torch.Tensor, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return h, skip

    model.set_model_output_block_patch(patch)
    tiny.sample(model, steps=1)
    once = len(calls)
    settings = replace(BY_THEMSELVES, policy=BuildPolicy.FIRST_USE)
    fast, module = accelerated(provider, model, settings, by_hand=True)
    tiny.sample(fast, steps=1)
    assert provider.store.digests() and not provider.blocks.queue.pending()
    assert len(calls) - once <= 4 * once, "asked for, compared, in use"
    assert module.status.block_calls == 1, module.status.to_json()


def test_nobody_waits_for_them_otherwise(provider: EngineProvider) -> None:
    model = tiny.model()
    provider.blocks.queue._build = lambda *_: time.sleep(3600)
    fast, _ = accelerated(provider, model, replace(BY_THEMSELVES, policy=BuildPolicy.FIRST_USE))
    sampled(fast, model)
    assert provider.blocks.queue.pending()


def store_in(dtype: torch.dtype, model: Any) -> None:
    """ComfyUI casts the weights at each call where the model computes in another one."""
    for layer in model.model.diffusion_model.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = dtype != torch.float32
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def test_weights_that_are_cast_at_each_call_stay_with_the_model(provider: EngineProvider) -> None:
    """An engine that waits for the cast may take longer than the model, and nobody asked for it."""
    model = tiny.model()
    store_in(torch.bfloat16, model)
    fast, module = accelerated(provider, model)
    sampled(fast, model)
    assert not blocks_built(provider) and not module.status.block_calls
    assert "ComfyUI casts its weights at each call" in module.status.standing.reason
    store_in(torch.float32, model)
    sampled(fast, model)
    assert blocks_built(provider)
    sampled(fast, model)
    assert module.status.block_calls
    before = module.status.block_calls
    store_in(torch.bfloat16, model)
    sampled(fast, model)
    assert module.status.block_calls == before


@pytest.mark.parametrize("room", [1 << 30, 1 << 10])
def test_weights_that_layers_dequantise_anyway_are_handed_over_where_memory_suffices(
    room: int, provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_weights, "available", lambda _: room)
    model = dequantised.model()
    options: dict[str, Any] = {"steps": STEPS, "cfg": 2.0}
    tiny.sample(accelerated(provider, model)[0], "sd3", **options)
    built = blocks_built(provider)
    fast, module = accelerated(provider, model)
    assert distance(tiny.sample(fast, "sd3", **options), tiny.sample(model, "sd3", **options)) < 1e-5
    assert (built > 0) == (module.status.block_calls > 0) == (room > 1 << 20)


def test_a_worker_that_builds_nothing_leaves_blocks_alone(provider: EngineProvider) -> None:
    provider.supply.never_builds = True
    fast, module = accelerated(provider, tiny.model())
    tiny.sample(fast, steps=1)
    assert "blocks" not in module.status.standing.reason


def test_staged_weights_lie_in_place_from_the_first_picture_on(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamic VRAM: nothing is staged when the first picture begins, nor after another node unloaded the model."""
    kind = staging.switch_on(monkeypatch)
    model = tiny.model()
    comfy.model_management.archive_model_dtypes(model.model)
    patcher = kind(model.model, staging.DEVICE, torch.device("cpu"))
    fast, module = accelerated(provider, patcher)
    sampled(fast, patcher)
    assert blocks_built(provider), "asked for by the first picture"
    sampled(fast, patcher)
    assert module.status.block_calls == STEPS - 1, "after the call in which they are compared"
    comfy.model_management.unload_all_models()
    sampled(fast, patcher)
    assert module.status.block_calls == 2 * STEPS - 1, module.status.to_json()
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(dynamic_vram, "hold", lambda patcher: None)
        sampled(fast, patcher)
        assert module.status.block_calls == 3 * STEPS - 1, "they are taken as they are staged"
        for pages in model.model.dynamic_vbars.values():
            pages.take_away()
        sampled(fast, patcher)
        assert module.status.block_calls == 4 * STEPS - 1, "what is not there is staged for the engine"
        with monkeypatch.context() as shorter:
            copied: list[bool] = []
            stay = block_weights._stay
            shorter.setattr(block_weights, "_stay", lambda *args: copied.append(not stay(*args)) or not copied[-1])
            shorter.setattr(staging.Pages, "fault", without_the_last_pages(staging.Pages.fault))
            for most, count in ((0, 5), (block_weights._MOST_COPIED_BYTES, 6)):
                shorter.setattr(block_weights, "_MOST_COPIED_BYTES", most)
                copied.clear()
                blocks_built(provider)  # in a thread of this process, where none runs while another is traced
                for pages in model.model.dynamic_vbars.values():
                    pages.take_away()
                sampled(fast, patcher)
                assert module.status.block_calls == count * STEPS - 1, module.status.to_json()
                assert copied and any(copied) == bool(most), "small blocks alone have their weights copied at once"
                assert not any(pages.held for pages in model.model.dynamic_vbars.values())
        patcher.detach()
        for layer in model.model.diffusion_model.modules():
            for part, tensor in (*layer._parameters.items(),) if hasattr(layer, "_v") else ():
                tensor.data = tensor.data.to(torch.bfloat16)
                setattr(layer, f"{part}_comfy_model_dtype", torch.bfloat16)
        sampled(fast, patcher)
    assert module.status.block_calls == 6 * STEPS - 1, "none waits for a cast to another dtype"


def without_the_last_pages(fault: Any) -> Any:
    """For a tenth of a model's weights there is no memory."""

    def shorter(pages: Any, address: int, size: int) -> Any:
        is_there = address + size - pages.base_addr < 0.9 * pages.offset
        return fault(pages, address, size) if is_there else None

    return shorter
