"""ComfyUI's own memory management sees what engines hold, and can have it back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.ops
import pytest
import torch

from slipstream.core.progress import CancelToken, ignore_progress
from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.process import free_memory
from slipstream.hosts.comfy.process.current_weights import copies, current_weights, weights_token
from slipstream.hosts.comfy.process.engine_memory import LoadedEngines, Residency
from slipstream.hosts.comfy.process.free_memory import free_device_memory, memory_beside_sampling
from slipstream.runtime.building import build as build_module
from slipstream.runtime.building.build import build_engine
from slipstream.runtime.loaded.engine_pool import EnginePool, LoadedEngine
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.fakes import CPU, FakeWorker, NullBackend, make_plan

pytestmark = pytest.mark.skipif(not management.cpu_mode(), reason="free memory is made up; see test_gpu_memory.py")

FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)
MB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left(nothing_loaded: None) -> Iterator[None]:
    yield
    copies.free(CPU)


@pytest.fixture
def pool() -> EnginePool:
    pool = EnginePool()
    Residency(pool)
    return pool


@pytest.fixture
def take(pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedEngine]:
    """Takes an engine that holds so many bytes, one for each size of picture."""
    backend = NullBackend()
    monkeypatch.setattr(build_module, "run_build", FakeWorker([backend]))
    store = EngineStore(tmp_path)

    def take(size: int = 8, holds: int = 100 * MB) -> LoadedEngine:
        backend.device_bytes = holds
        plan = make_plan(size, backend)
        return pool.take(plan, build_engine(plan, store, ignore_progress, CancelToken()), CPU)

    return take


@pytest.fixture
def idle(pool: EnginePool, take: Callable[..., LoadedEngine]) -> list[LoadedEngine]:
    """Three idle engines of 100 MB, the first one used longest ago."""
    engines = [take(size) for size in (8, 16, 24)]
    for loaded in engines:
        pool.give_back(loaded)
    return engines


@pytest.fixture
def device_of_1_gb(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which the engines leave the rest of 1 GB free."""

    def free(device: Any = None, torch_free_too: bool = False) -> Any:
        left = 1024 * MB - pool.device_bytes(CPU)
        return (left, left) if torch_free_too else left

    monkeypatch.setattr(management, "get_free_memory", free)


def listed() -> list[Any]:
    return [loaded for loaded in management.current_loaded_models if isinstance(loaded, LoadedEngines)]


def closed(engines: list[LoadedEngine]) -> list[bool]:
    return [loaded.engine.closed for loaded in engines]


# --------------------------------------------------------------------------------------------------- sizes


def test_engines_without_memory_are_not_listed(take: Callable[..., LoadedEngine]) -> None:
    take(holds=0)
    assert management.current_loaded_models == []


def test_the_size_is_true_at_all_times(pool: EnginePool, take: Callable[..., LoadedEngine]) -> None:
    first, second = take(8), take(16)
    (entry,) = listed()
    assert entry.model_memory() == entry.model_loaded_memory() == 200 * MB
    assert entry.model_offloaded_memory() == entry.model_memory_required(CPU) == 0
    second.engine.device_bytes = 7 * MB
    assert entry.model_loaded_memory() == 107 * MB
    pool.give_back(first)
    assert entry.model_memory() == 107 * MB and listed() == [entry]


# ------------------------------------------------------------------------------------------------ unloading


def test_unload_all_models_closes_idle_engines(pool: EnginePool, idle: list[LoadedEngine]) -> None:
    assert len(listed()) == 1
    management.unload_all_models()
    assert closed(idle) == [True] * 3 and management.current_loaded_models == [] and pool.device_bytes(CPU) == 0


def test_an_unloaded_engine_is_loaded_and_listed_again(
    pool: EnginePool, idle: list[LoadedEngine], take: Callable[..., LoadedEngine]
) -> None:
    management.unload_all_models()
    again = take(8)
    assert not again.engine.closed and [entry.model_memory() for entry in listed()] == [100 * MB]


@pytest.mark.usefixtures("device_of_1_gb")
def test_only_as_much_is_unloaded_as_is_needed(pool: EnginePool, idle: list[LoadedEngine]) -> None:
    management.free_memory(700 * MB, CPU)
    assert closed(idle) == [False, False, False], "724 MB are free"
    management.free_memory(900 * MB, CPU)
    assert closed(idle) == [True, True, False], "those that were used longest ago"
    (entry,) = listed()
    assert entry.model_memory() == 100 * MB
    management.free_memory(2000 * MB, CPU)
    assert closed(idle) == [True] * 3 and listed() == []


def test_what_a_run_uses_stays_and_is_reported(pool: EnginePool, idle: list[LoadedEngine], take: Any) -> None:
    used = take(16)
    assert used is idle[1]
    management.unload_all_models()
    assert closed(idle) == [True, False, True]
    (entry,) = listed()
    assert entry.model_memory() == 100 * MB
    pool.give_back(used)
    assert listed() == [entry]
    management.unload_all_models()
    assert closed(idle) == [True] * 3 and listed() == []


@pytest.mark.usefixtures("device_of_1_gb")
def test_other_models_are_not_unloaded_for_what_engines_gave(idle: list[LoadedEngine]) -> None:
    """The engines' memory alone suffices: ComfyUI's sort puts the smaller model first, and that is theirs."""
    model = tiny.model()
    management.load_models_gpu([model])
    model.model.model_loaded_weight_memory = model.size = 500 * MB
    management.free_memory(1000 * MB, CPU)
    assert [loaded.model for loaded in management.current_loaded_models] == [model]
    assert closed(idle) == [True] * 3


def test_smart_memory_switched_off(idle: list[LoadedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "DISABLE_SMART_MEMORY", True)
    management.free_memory(1, CPU)
    assert closed(idle) == [True] * 3 and listed() == []


def test_kept_models_stay(idle: list[LoadedEngine]) -> None:
    management.free_memory(1e30, CPU, keep_loaded=listed())
    assert closed(idle) == [False] * 3


# ------------------------------------------------------------------------------------- ComfyUI's other ways


def test_a_detour_loads_models_again_without_closing_engines(
    pool: EnginePool, take: Callable[..., LoadedEngine]
) -> None:
    """A ControlNet with a VAE has ComfyUI load again whatever was loaded."""
    pool.give_back(take(8))
    model = tiny.model()
    management.load_models_gpu([model])
    assert management.loaded_models(only_currently_used=True) == [model]
    management.load_models_gpu(management.loaded_models())
    assert pool.device_bytes(CPU) == 100 * MB
    management.unload_all_models()
    assert pool.device_bytes(CPU) == 0 and management.current_loaded_models == []


def test_clean_ups_leave_it_alone(idle: list[LoadedEngine], caplog: pytest.LogCaptureFixture) -> None:
    (entry,) = listed()
    gc.collect()
    for _ in range(2):
        management.cleanup_models_gc()
        management.cleanup_models()
    assert listed() == [entry] and not entry.is_dead()
    assert "leak" not in caplog.text and closed(idle) == [False] * 3


def test_a_users_model_is_not_kept_alive(pool: EnginePool, idle: list[LoadedEngine]) -> None:
    model = tiny.model()
    management.load_models_gpu([model])
    pool.on_change(CPU)
    there = weakref.ref(model.model)
    del model
    gc.collect()
    management.cleanup_models()
    assert there() is None and management.current_loaded_models == listed()


def test_a_newer_comfyuis_further_questions(idle: list[LoadedEngine]) -> None:
    if not hasattr(management, "unload_model_and_clones"):
        pytest.skip("this ComfyUI does not ask them")
    (entry,) = listed()
    assert not entry.model.is_dynamic()
    assert entry.model.loaded_ram_size() == entry.model.pinned_memory_size() == 0
    assert list(management.models_for_pin_eviction(None)) == []
    assert management.free_pins(1 << 40) == 0
    model = tiny.model()
    management.load_models_gpu([model])
    management.unload_model_and_clones(model, all_devices=True)
    assert management.current_loaded_models == [entry] and closed(idle) == [False] * 3


# ----------------------------------------------------------------------------------------------- room


def test_room_is_made_at_the_cost_of_what_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = tiny.model(), tiny.model(seed=2)
    management.load_models_gpu([used, unused])
    next(entry for entry in management.current_loaded_models if entry.model is unused).currently_used = False
    gpu = torch.device("cuda", 0)
    asked: list[Any] = []
    monkeypatch.setattr(management, "free_memory", lambda *args, **kwargs: asked.append((args, kwargs)))
    monkeypatch.setattr(management, "get_free_memory", lambda _: management.extra_reserved_memory() + 4 * MB)
    free_device_memory(gpu, 5 * MB)
    (((wanted, device), options),) = asked
    assert wanted == 5 * MB + management.extra_reserved_memory() and device == gpu
    assert [entry.model for entry in options["keep_loaded"]] == [used]
    free_device_memory(CPU, 5 * MB)
    assert len(asked) == 1, "RAM is the system's"
    monkeypatch.setattr(free_memory, "yielding", lambda _: 1 * MB)
    free_device_memory(gpu, 5 * MB)
    assert len(asked) == 1, "staged weights give way by themselves"


def test_weights_leave_what_sampling_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [management.minimum_inference_memory() + 10 * MB]
    monkeypatch.setattr(management, "get_free_memory", lambda _: free[-1])
    asked: list[float] = []

    def unload(wanted: float, *_: Any, **__: Any) -> None:
        asked.append(wanted)
        free.append(free[-1] + 3 * MB)

    monkeypatch.setattr(management, "free_memory", unload)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(free_memory, "_unloadable", lambda _: 3 * MB)
    assert memory_beside_sampling(gpu, 10 * MB) == 10 * MB and len(free) == 1
    assert memory_beside_sampling(gpu, 14 * MB) == 10 * MB and len(free) == 1, "nothing is unloaded in vain"
    assert memory_beside_sampling(gpu, 11 * MB) == 13 * MB
    assert asked == [int(management.minimum_inference_memory()) + 11 * MB], "ComfyUI's reserve counts once"
    free.append(0)
    assert memory_beside_sampling(gpu, 11 * MB) == 0


# ------------------------------------------------------------------------------------- copies of weights


def lora(patcher: Any, strength: float) -> Any:
    """A clone with a change of one layer, computed at every call as in low VRAM mode."""
    clone = patcher.clone()
    layer = "diffusion_model.middle_block.0.in_layers.2.weight"
    change = torch.ones_like(clone.model.state_dict()[layer])
    assert clone.add_patches({layer: ("diff", (change,))}, strength)
    return clone


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of which one layer is patched at every call and one has another dtype: both have to be copied."""
    patcher = tiny.model()
    middle = patcher.model.diffusion_model.middle_block[0].in_layers[2]
    middle.weight_function = [lambda weight: weight + 1]
    patcher.model.diffusion_model.out[2].half()
    return patcher


COPIED = {"middle_block.0.in_layers.2.weight", "out.2.weight", "out.2.bias"}


def weights_of(patcher: Any, token: Any) -> dict[str, torch.Tensor]:
    unet = patcher.model.diffusion_model
    return current_weights(unet, unet.state_dict(), torch.float32, CPU, token)


def moved(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in one if one[name].data_ptr() != other[name].data_ptr()}


def test_copies_are_made_anew_without_a_token(streaming: Any) -> None:
    one, other = weights_of(streaming, None), weights_of(streaming, None)
    assert moved(one, other) == COPIED and copies.bytes(CPU) == 0


def test_copies_are_kept_for_the_same_numbers(streaming: Any) -> None:
    one = weights_of(streaming, weights_token(streaming))
    other = weights_of(streaming, weights_token(streaming.clone()))
    assert moved(one, other) == set()
    assert copies.bytes(CPU) == sum(one[name].nbytes for name in COPIED)
    bare = streaming.model.state_dict()["diffusion_model.middle_block.0.in_layers.2.weight"]
    assert torch.equal(one["middle_block.0.in_layers.2.weight"], bare + 1)


def test_a_lora_makes_new_copies_and_drops_the_old(streaming: Any) -> None:
    one = weights_of(streaming, weights_token(streaming))
    streaming.model.diffusion_model.middle_block[0].in_layers[2].weight_function = [lambda weight: weight + 2]
    patched = lora(streaming, 1.0)
    other = weights_of(patched, weights_token(patched))
    assert moved(one, other) == COPIED
    assert torch.allclose(other["middle_block.0.in_layers.2.weight"], one["middle_block.0.in_layers.2.weight"] + 1)
    assert copies.bytes(CPU) == sum(other[name].nbytes for name in COPIED), "those of one model at a time"


def test_hooks_have_no_token() -> None:
    patcher = tiny.model()
    assert weights_token(patcher) == weights_token(patcher.clone())
    assert weights_token(patcher) != weights_token(lora(patcher, 1.0)) != weights_token(lora(patcher, 1.0))
    patcher.hook_patches = {"a hook": {}}
    assert weights_token(patcher) is None


def test_what_the_model_now_holds_itself_is_no_longer_a_copy(streaming: Any) -> None:
    weights_of(streaming, weights_token(streaming))
    streaming.model.diffusion_model.out[2].float()
    weights_of(streaming, weights_token(streaming))
    assert copies.bytes(CPU) == weights_of(streaming, None)["middle_block.0.in_layers.2.weight"].nbytes


def test_comfyui_counts_copies_and_can_have_them_back(
    pool: EnginePool, streaming: Any, take: Callable[..., LoadedEngine]
) -> None:
    loaded = take(holds=0)
    weights_of(streaming, weights_token(streaming))
    size = copies.bytes(CPU)
    pool.on_change(CPU)
    assert [entry.model_memory() for entry in listed()] == [size] and size > 0
    management.unload_all_models()
    assert copies.bytes(CPU) == size, "a run uses them"
    pool.give_back(loaded)
    management.unload_all_models()
    assert copies.bytes(CPU) == 0 and listed() == []


def test_every_cast_is_undone(streaming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What streams from RAM stays pinned in device memory otherwise."""
    if not hasattr(comfy.ops, "uncast_bias_weight"):
        pytest.skip("this ComfyUI has nothing to undo")
    undone: list[Any] = []
    real = comfy.ops.uncast_bias_weight

    def uncast(layer: Any, *state: Any) -> None:
        undone.append(layer)
        real(layer, *state)

    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", uncast)
    weights_of(streaming, None)
    unet = streaming.model.diffusion_model
    assert [layer for layer in undone if layer is not unet.out[2]] == [unet.middle_block[0].in_layers[2]]


# ------------------------------------------------------------------------------------------------ pictures


def test_a_picture_after_unloading_is_the_same_and_needs_no_build(
    engine_store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.compile_backend.engine import CompiledEngine

    real = CompiledEngine.device_bytes.fget
    assert real is not None
    # On a GPU the engine would hold its graph; on the CPU it holds hardly anything.
    monkeypatch.setattr(CompiledEngine, "device_bytes", property(lambda engine: real(engine) + MB))
    provider = EngineProvider(engine_store)
    Residency(provider.pool)
    module = AcceleratedModule(provider, FIRST_USE)
    model = tiny.model()
    plain = tiny.sample(model)
    fast = accelerate_model(model, module)
    first = tiny.sample(fast)
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    calls, builds = module.status.engine_calls, len(provider.history.builds())
    assert calls > 0 and len(listed()) == 1 and torch.allclose(first, plain, atol=1e-3)
    management.unload_all_models()
    assert management.current_loaded_models == [] and provider.pool.device_bytes(CPU) == 0
    again = tiny.sample(fast)
    assert torch.equal(again, first)
    assert module.status.engine_calls == 2 * calls and module.status.eager_calls == 0
    assert len(provider.history.builds()) == builds and len(listed()) == 1
    there = weakref.ref(model.model)
    del model, fast
    gc.collect()
    management.cleanup_models()
    assert there() is None, "engines keep no model alive"


def test_copies_of_low_vram_mode_are_kept_between_pictures(
    engine_store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = EngineProvider(engine_store)
    Residency(provider.pool)
    module = AcceleratedModule(provider, FIRST_USE)
    model = tiny.model()
    wanted = [tiny.sample(lora(model, strength)) for strength in (0.05, -0.05)]
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-2), "the LoRA shows"
    management.unload_all_models()
    load = type(model).load

    def load_little(self: Any, device_to: Any = None, *_: Any, **kwargs: Any) -> Any:
        return load(self, device_to, **{**kwargs, "lowvram_model_memory": 4096, "full_load": False})

    monkeypatch.setattr(type(model), "load", load_little)
    fast = accelerate_model(model, module)
    one, other = lora(fast, 0.05), lora(fast, -0.05)
    assert torch.allclose(tiny.sample(one), wanted[0], atol=1e-3)
    kept = {name: tensor.data_ptr() for name, tensor in copies._kept[CPU, ""][1].items()}
    assert kept, "the model was not loaded in low VRAM mode: the test proves nothing"
    assert torch.allclose(tiny.sample(one), wanted[0], atol=1e-3)
    assert {name: tensor.data_ptr() for name, tensor in copies._kept[CPU, ""][1].items()} == kept
    assert torch.allclose(tiny.sample(other), wanted[1], atol=1e-3), "never stale"
    assert module.status.eager_calls == 0 and module.status.engine_calls == 9


@pytest.mark.parametrize("how", [None, "manual", "whole", "blocks"])
def test_models_go_as_soon_as_nobody_has_them(how: str | None, tmp_path: Any) -> None:
    """Without garbage collection, as without Slipstream: their gigabytes are wanted for others, and ComfyUI goes
    through its list of models while one that goes is taken out of it."""
    gc.collect()
    gc.disable()
    try:
        with (quick_block_provider if how == "blocks" else quick_provider)(EngineStore(tmp_path)) as provider:
            models = [tiny.model(), tiny.controlnet(), tiny.vae()]
            model, control, vae = models[0].model, models[1], models[2]
            parts = model, model.diffusion_model, control.control_model, vae.first_stage_model
            gone = [*map(weakref.ref, parts)]
            modules = []
            if how is not None:
                policy = BuildPolicy.MANUAL if how == "manual" else BuildPolicy.FIRST_USE
                optimize = Optimize.BLOCKS if how == "blocks" else Optimize.FAST_BUILD
                modules = [AcceleratedModule(provider, Settings(policy=policy, optimize=optimize)) for _ in models]
                wraps = accelerate_model, accelerate_controlnet, accelerate_vae
                models = [wrap(each, module) for wrap, each, module in zip(wraps, models, modules, strict=True)]
            hint = torch.rand(1, 3, 64, 64)
            for _ in range(2):
                prompt = tiny.conditioning(control=models[1].copy().set_cond_hint(hint, 1.0))
                models[2].decode(tiny.sample(models[0], steps=3, positive=prompt))
            served = [module.status.engine_calls + module.status.block_calls for module in modules]
            assert all(bool(calls) == (how != "manual") for calls in served[: 2 if how == "blocks" else 3]), served
            del model, control, vae, parts, prompt
            models.clear()
            modules.clear()
            management.unload_all_models()
            assert [each() for each in gone] == [None] * 4
    finally:
        gc.enable()
