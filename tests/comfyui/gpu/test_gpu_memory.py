"""Device memory on a real GPU, with an SD1.5 of reduced size. Run with SLIPSTREAM_TEST_DEVICE=cuda; two minutes.

The last tests switch DynamicVRAM on, where ComfyUI has it, and it stays on: keep them last.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management as management
import comfy.model_patcher
import comfy.supported_models
import pytest
import torch
from comfy.cli_args import args

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.models.tracing_layers import layers_with_weights
from slipstream.hosts.comfy.process.current_weights import copies
from slipstream.hosts.comfy.process.engine_memory import LoadedEngines, Residency
from slipstream.runtime.capture import arena
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.models.weights import randomise_unet
from slipstream.tests.tensors import distance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(args.cpu, reason="SLIPSTREAM_TEST_DEVICE is not cuda")]

REDUCED = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 128, "num_res_blocks": [1, 1],
    "channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_middle": 1,
    "transformer_depth_output": [1] * 4, "context_dim": 768, "use_spatial_transformer": True,
    "use_linear_in_transformer": False, "adm_in_channels": None, "use_temporal_attention": False, "legacy": False,
    "use_checkpoint": False, "num_heads": 8, "num_head_channels": -1,
}  # fmt: skip
STEPS = 3
MB = 1 << 20
TOLERANCE = 2e-2
LORA_LAYER = "diffusion_model.middle_block.0.in_layers.2.weight"


def make_model(kind: Any = comfy.model_patcher.ModelPatcher) -> Any:
    config = comfy.supported_models.SD15({**REDUCED, "dtype": torch.float16})
    config.unet_config.update(REDUCED)
    with layers_with_weights():
        model = comfy.model_base.BaseModel(config, device=torch.device("cpu"))
    randomise_unet(model.diffusion_model, seed=1)
    return kind(model, management.get_torch_device(), management.unet_offload_device())


def with_lora(patcher: Any, strength: float) -> Any:
    clone = patcher.clone()
    weight = clone.model.state_dict()[LORA_LAYER]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.02
    assert clone.add_patches({LORA_LAYER: ("diff", (noise,))}, strength)
    return clone


def picture(patcher: Any) -> torch.Tensor:
    prompts = {
        name: [[torch.randn(1, 77, 768, generator=torch.Generator().manual_seed(seed)), {}]]
        for name, seed in (("positive", 1), ("negative", 2))
    }
    return tiny.sample(patcher, steps=STEPS, size=512, **prompts).float().cpu()


def gpu() -> torch.device:
    return torch.device(management.get_torch_device())


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return int(management.get_free_memory(gpu()))


def left_on_device() -> int:
    """What no process holds. (ComfyUI's own count takes a graph's memory in torch's allocator for free.)"""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(gpu())[0]


def listed() -> list[Any]:
    return [loaded for loaded in management.current_loaded_models if isinstance(loaded, LoadedEngines)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EngineStore:
    """One engine serves every test here."""
    folder: Path = tmp_path_factory.mktemp("engines")
    return EngineStore(folder)


@pytest.fixture
def accelerate(store: EngineStore) -> Iterator[Callable[[Any], tuple[Any, AcceleratedModule]]]:
    management.unload_all_models()
    copies.free(gpu())
    provider = EngineProvider(store)
    Residency(provider.pool)

    def accelerate(model: Any) -> tuple[Any, AcceleratedModule]:
        module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE))
        return accelerate_model(model, module), module

    yield accelerate
    management.unload_all_models()
    assert provider.pool.device_bytes(gpu()) == 0


def assert_by_engine(module: AcceleratedModule, pictures: int) -> None:
    counts = (module.status.engine_calls, module.status.eager_calls)
    assert counts == (pictures * STEPS, 0), module.status.to_json()["reasons"]


# ------------------------------------------------------------------------------------------------ residency


def test_comfyui_counts_the_engine_and_can_unload_it(accelerate: Any, store: EngineStore) -> None:
    model = make_model()
    plain = picture(model)
    fast, module = accelerate(model)
    pool = module.provider.pool
    first = picture(fast)
    assert_by_engine(module, 1)
    assert distance(first, plain) < TOLERANCE
    size = pool.device_bytes(gpu())
    (entry,) = listed()
    assert entry.model_memory() == size > MB, "a captured graph holds memory"
    before, left = free(), left_on_device()
    others = [loaded for loaded in management.current_loaded_models if loaded is not entry]
    management.free_memory(before + size // 2, gpu(), keep_loaded=others)
    assert pool.device_bytes(gpu()) == 0 and listed() == []
    assert left_on_device() - left > 0.8 * size, "what was told is what came back"
    assert distance(picture(fast), first) < 1e-3
    assert_by_engine(module, 2)
    assert len(module.provider.history.builds()) == 1 and len(listed()) == 1
    (recorded,) = (known.device_bytes for known in store.list()[0].manifest.verifications.values())
    assert recorded > MB, "the next process will know how much room to make"


def test_unload_models_gives_all_of_it_back(accelerate: Any) -> None:
    model = make_model()
    fast, module = accelerate(model)
    picture(fast)
    there = weakref.ref(model.model)
    management.unload_all_models()
    management.soft_empty_cache()
    after_first = free()
    for _ in range(3):
        picture(fast)
        management.unload_all_models()
        management.soft_empty_cache()
    assert_by_engine(module, 4)
    assert after_first - free() < 8 * MB, "nothing leaks"
    del model, fast
    gc.collect()
    assert there() is None


# --------------------------------------------------------------------------------------------- out of memory


def test_a_real_shortage_inside_the_engine_is_recognised(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled packages turn torch's out-of-memory error into a plain one; torch's own count tells."""
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("CUDA's own allocator does not count; there a device with little left tells")
    model = make_model()
    plain = picture(model)
    fast, module = accelerate(model)
    picture(fast)
    pool = module.provider.pool
    (loaded,) = pool._idle.values()

    def fail(*_: Any, **__: Any) -> Any:
        try:
            torch.empty(1 << 45, dtype=torch.uint8, device=gpu())
        except torch.OutOfMemoryError:
            pass
        raise RuntimeError("run_func_ failed")

    with monkeypatch.context() as short:
        short.setattr(type(loaded.engine), "__call__", fail)
        short.setattr(arena.Graph, "launch", fail)  # of the whole step, which calls no engine
        assert distance(picture(fast), plain) < TOLERANCE
    (reason,) = module.status.to_json()["reasons"]
    assert "ran out of GPU memory (it needs about" in reason
    assert pool.device_bytes(gpu()) == 0, "the plain model had room"
    assert distance(picture(fast), plain) < TOLERANCE
    assert module.status.engine_calls == 2 * STEPS and module.status.eager_calls == STEPS


def test_a_full_device_falls_back_to_the_plain_model(accelerate: Any) -> None:
    """Really full: torch may have what the plain model needs, and hardly more."""
    model = make_model()
    picture(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plain = picture(model)
    total = torch.cuda.get_device_properties(gpu()).total_memory
    room = torch.cuda.max_memory_reserved() + 24 * MB
    fast, module = accelerate(model)
    picture(fast)
    management.unload_all_models()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(room / total, gpu())
    try:
        found = picture(fast)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu())
    assert distance(found, plain) < TOLERANCE, "by whichever of the two"
    for reason in module.status.to_json()["reasons"]:
        assert "ran out of GPU memory" in reason


# --------------------------------------------------------------------------------------- low VRAM, DynamicVRAM


@pytest.fixture
def low_vram(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI keeps most of a model in RAM."""
    load = comfy.model_patcher.ModelPatcher.load

    def load_little(self: Any, device_to: Any = None, *_: Any, **kwargs: Any) -> Any:
        kwargs |= {"lowvram_model_memory": 64 * 1024, "full_load": False}
        return load(self, device_to, **kwargs)

    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "load", load_little)


def copied() -> set[int]:
    return {tensor.data_ptr() for tensor in copies._kept[gpu(), ""][1].values()}


def assert_right(accelerate: Any, model: Any, needs_copies: bool) -> None:
    """The same pictures as ComfyUI's own with two LoRAs in turn; copies where needed, once for the same weights."""
    wanted = {strength: picture(with_lora(model, strength)) for strength in (1.0, -1.0)}
    assert distance(wanted[1.0], wanted[-1.0]) > 2 * TOLERANCE, "the LoRA shows"
    fast, module = accelerate(model)
    one, other = with_lora(fast, 1.0), with_lora(fast, -1.0)
    assert distance(picture(one), wanted[1.0]) < TOLERANCE
    before = copied()
    assert bool(before) is needs_copies, "dynamic VRAM's own pages hold the weights"
    held = copies.bytes(gpu())
    assert listed()[0].model_memory() >= held and (held > MB or not needs_copies)
    assert distance(picture(one), wanted[1.0]) < TOLERANCE
    assert copied() == before, "nothing changed: nothing was copied"
    assert distance(picture(other), wanted[-1.0]) < TOLERANCE, "never stale"
    assert distance(picture(one), wanted[1.0]) < TOLERANCE
    assert_by_engine(module, 4)
    management.unload_all_models()
    assert copies.bytes(gpu()) == 0


@pytest.mark.usefixtures("low_vram")
def test_low_vram(accelerate: Any) -> None:
    model = make_model()
    assert_right(accelerate, model, needs_copies=True)


@pytest.mark.usefixtures("low_vram")
def test_a_copy_that_does_not_fit_is_a_reason(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    plain = picture(model)
    fast, module = accelerate(model)
    monkeypatch.setattr(
        "slipstream.hosts.comfy.process.free_memory.available", lambda _: management.minimum_inference_memory() + MB
    )
    assert distance(picture(fast), plain) < TOLERANCE
    (reason,) = module.status.to_json()["reasons"]
    assert "low VRAM mode" in reason and module.status.engine_calls == 0 and module.status.eager_calls == STEPS


@pytest.fixture(scope="module")
def dynamic_vram() -> Any:
    """What ComfyUI's start does for DynamicVRAM; returns its kind of `ModelPatcher`."""
    kind = getattr(comfy.model_patcher, "ModelPatcherDynamic", None)
    if kind is None:
        pytest.skip("this ComfyUI has no DynamicVRAM")
    control = importlib.import_module("comfy_aimdo.control")
    if not (control.init() and control.init_devices([gpu().index])):
        pytest.skip("comfy_aimdo does not work on this machine")
    for name in ("host_buffer", "model_mmap", "model_vbar", "vram_buffer"):
        importlib.reload(importlib.import_module(f"comfy_aimdo.{name}"))  # they look for the library when imported
    importlib.import_module("comfy.memory_management").aimdo_enabled = True
    return kind


def pinned_pages(model: Any) -> int:
    return sum(bool(page & 2) for vbar in model.model.dynamic_vbars.values() for page in vbar.get_residency())


def test_dynamic_vram(accelerate: Any, dynamic_vram: Any) -> None:
    model = make_model(dynamic_vram)
    assert model.is_dynamic()
    assert_right(accelerate, model, needs_copies=False)
    assert pinned_pages(model) == 0, "casts were undone: the weights' own memory can be taken"


def test_dynamic_vram_counts_engines(accelerate: Any, dynamic_vram: Any) -> None:
    model = make_model(dynamic_vram)
    fast, module = accelerate(model)
    picture(fast)
    management.load_models_gpu([make_model(dynamic_vram)])
    management.load_models_gpu(management.loaded_models())
    picture(fast)
    assert_by_engine(module, 2)
    management.unload_all_models()
    assert module.provider.pool.device_bytes(gpu()) == 0 and listed() == []
