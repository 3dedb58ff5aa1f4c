"""Weights that a model stores in 8 bits: engines of blocks take them as they are, and cast them as ComfyUI does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from types import MethodType
from typing import Any

import comfy.model_management
import comfy.ops
import pytest
import torch

from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.block_calls import run_offers
from slipstream.hosts.comfy.blocks import block_weights
from slipstream.hosts.comfy.blocks.block_architecture import PREFIX
from slipstream.hosts.comfy.process import dynamic_vram
from slipstream.runtime.blocks.block_engines import BlockEngines
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.models import dequantised, eight_bits, tiny
from slipstream.tests.tensors import distance

STEPS = 6


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_block_provider(EngineStore(tmp_path_factory.mktemp("blocks"))) as made:
        yield made


def compared(
    provider: EngineProvider, model: Any, optimize: Optimize = Optimize.BLOCKS, **options: Any
) -> AcceleratedModule:
    """Sample with and without engines of blocks, and compare the pictures."""
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE, optimize=optimize))
    fast = accelerate_model(model, module)
    found, wanted = (tiny.sample(each, "sd3", steps=STEPS, cfg=2.0, **options) for each in (fast, model))
    assert torch.isfinite(wanted).all() and distance(found, wanted) < 1e-5
    return module


def share_of(module: AcceleratedModule) -> tuple[int, int]:
    """Calls of blocks that engines computed in the last call of the model, and all of them."""
    words = module.status.standing.blocks.split()
    return (int(words[0]), int(words[2])) if words else (0, 0)


def all_on_engines(module: AcceleratedModule) -> bool:
    on_engines, total = share_of(module)
    return on_engines == total > 0 and module.status.block_calls >= STEPS - 2


def labels(provider: EngineProvider) -> list[str]:
    return [entry.manifest.label for entry in provider.store.list()]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers that ComfyUI was asked to cast for an engine."""
    seen: list[Any] = []
    cast = block_weights._cast

    def noted(layer: Any, *args: Any) -> Any:
        seen.append(layer)
        return cast(layer, *args)

    monkeypatch.setattr(block_weights, "_cast", noted)
    return seen


def test_a_model_that_is_loaded_in_fp8_hands_its_weights_over_as_they_are(
    provider: EngineProvider, casts: list[Any]
) -> None:
    assert all_on_engines(compared(provider, eight_bits.in_fp8()))
    assert not casts
    assert labels(provider) and all("weights in float8_e4m3fn" in label for label in labels(provider))


def test_weights_in_fp8_that_a_lora_changes_reach_engines(provider: EngineProvider, casts: list[Any]) -> None:
    model = eight_bits.in_fp8()
    names = [name for name in model.model_state_dict() if name.endswith("qkv.weight")]
    before = tiny.sample(model, "sd3", steps=STEPS, cfg=2.0)
    changed = model.clone()
    state = model.model_state_dict()
    changes = {name: (torch.full(state[name].shape, 0.2),) for name in names}
    assert len(changed.add_patches(changes, 1.0)) == len(names) > 0
    assert all_on_engines(compared(provider, changed)) and not casts
    assert distance(tiny.sample(changed, "sd3", steps=STEPS, cfg=2.0), before) > 1e-3


@pytest.mark.parametrize("make", [eight_bits.in_fp8, eight_bits.scaled_fp8])
def test_weights_that_functions_change_are_cast_by_comfyui(
    make: Callable[[], Any], provider: EngineProvider, casts: list[Any]
) -> None:
    """As a LoRA is applied where memory is short; here from the first step on, since a load sets functions back."""
    model = make()
    layers = [layer for name, layer in model.model.diffusion_model.named_modules() if name.endswith("qkv")]

    def halve(weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight

    def change(step: int, *_: Any) -> None:
        for layer in layers:
            layer.weight_function = [halve] if step < STEPS - 1 else []

    before = tiny.sample(model, "sd3", steps=STEPS, cfg=2.0)
    casts.clear()
    module = compared(provider, model, callback=change)
    on_engines, total = share_of(module)  # at first they were found to be stored otherwise than they were
    assert on_engines == total > 0 and casts
    assert distance(tiny.sample(model, "sd3", steps=STEPS, cfg=2.0, callback=change), before) > 1e-3


@pytest.mark.parametrize("part", with_slow(["bias", "weight"], "weight"))
def test_layers_of_several_dtypes(part: str, provider: EngineProvider) -> None:
    model = eight_bits.in_fp8()
    for name, layer in model.model.diffusion_model.named_modules():
        if name.endswith(("proj", "fc1")) and getattr(layer, part, None) is not None:
            tensor = getattr(layer, part)
            setattr(layer, part, torch.nn.Parameter(tensor.to(torch.bfloat16), requires_grad=False))
    assert all_on_engines(compared(provider, model))


def test_weights_with_a_scale_are_handed_over_with_it(provider: EngineProvider) -> None:
    model = eight_bits.scaled_fp8()
    network = model.model.diffusion_model
    held = [block_weights.stored_weights(block, torch.device("cpu"), torch.float32) for block in network.joint_blocks]
    assert all(any(each.is_scaled for each in stored.values()) for stored in held)
    assert all_on_engines(compared(provider, model))


def test_what_comfyui_multiplies_in_eight_bits_stays_with_the_model(
    provider: EngineProvider, caplog: pytest.LogCaptureFixture
) -> None:
    known = set(provider.store.digests())
    model = eight_bits.scaled_fp8()
    is_newer = any(block_weights.is_quantized(parameter) for parameter in model.model.diffusion_model.parameters())
    for layer in model.model.diffusion_model.modules():
        if is_newer and hasattr(layer, "_full_precision_mm"):
            layer._full_precision_mm = False
        elif not is_newer and hasattr(layer, "scale_weight"):
            layer.__class__ = comfy.ops.fp8_ops.Linear
    with caplog.at_level("INFO"):
        module = compared(provider, model)
    assert not module.status.block_calls and set(provider.store.digests()) == known
    assert "ComfyUI multiplies with its weights in 8 bits itself" in caplog.text


@pytest.mark.parametrize("make", [eight_bits.in_fp8, eight_bits.scaled_fp8])
def test_weights_in_eight_bits_that_comfyui_stages(
    make: Callable[[], Any], provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = staging.switch_on(monkeypatch)
    model = make()
    comfy.model_management.archive_model_dtypes(model.model)
    patcher = kind(model.model, staging.DEVICE, torch.device("cpu"))
    assert all_on_engines(compared(provider, patcher))


class Stream:
    """One on which ComfyUI transfers weights."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def as_context(self, stream: Any) -> Any:
        return nullcontext()

    def wait_stream(self, stream: Any) -> None:
        self._events.append("waits for the GPU")


def staged(patcher: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = staging.switch_on(monkeypatch)
    if not hasattr(comfy.ops, "cast_modules_with_vbar"):
        pytest.skip("this ComfyUI transfers layer by layer")
    comfy.model_management.archive_model_dtypes(patcher.model)
    return kind(patcher.model, staging.DEVICE, torch.device("cpu"))


@pytest.mark.parametrize("fails", [False, True])
def test_what_streams_from_ram_is_transferred_for_a_block_at_once(
    fails: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream that then waits for the block's engine alone; what fails midway leaves nothing held."""
    patcher, events = staged(tiny.transformer("sd3"), monkeypatch), list[str]()
    together, cast = block_weights.staged_together, block_weights._cast

    def noted(layers: Any, device: torch.device) -> Any:
        events.append(f"{len(layers)} layers")
        return together(layers, device)

    def noted_cast(*args: Any) -> Any:
        events.append("cast")
        if fails and events.count("cast") == 3:
            raise RuntimeError("a cast failed midway")
        return cast(*args)

    with quick_block_provider(EngineStore(tmp_path)) as provider:
        assert all_on_engines(compared(provider, patcher))
        monkeypatch.setattr(dynamic_vram, "hold", lambda patcher: None)
        monkeypatch.setattr(comfy.model_management, "get_offload_stream", lambda device: Stream(events))
        monkeypatch.setattr(block_weights, "staged_together", noted)
        monkeypatch.setattr(block_weights, "_cast", noted_cast)
        (pages,) = patcher.model.dynamic_vbars.values()
        pages.take_away()
        module = compared(provider, patcher)
    blocks = [event.split() for event in ",".join(events).split("waits for the GPU") if event]
    assert len(blocks) == 2, "what is staged once stays"
    for number, words in enumerate(blocks):
        layers = int(words[0].strip(","))
        assert layers > 5 and " ".join(words).count("cast") == (3 if fails and number == 0 else layers)
    assert all_on_engines(module) != fails, module.status.to_json()
    assert not pages.held and not any("_prefetch" in vars(layer) for layer in patcher.model.modules())


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_staged_weights_make_room_for_builds_that_a_picture_waits_for(
    free: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build processes share the device with ComfyUI; what it gave them is staged again."""
    patcher, staged_pages = staged(tiny.transformer("sd3"), monkeypatch), list[tuple[int, int]]()
    monkeypatch.setattr(run_offers, "bytes_for_others", lambda device: free)
    wait = BlockEngines.wait_for

    def waited(engines: BlockEngines, offers: Any, *args: Any) -> None:
        (pages,) = patcher.model.dynamic_vbars.values()
        staged_pages.append((len(pages.resident), pages.watermark))
        wait(engines, offers, *args)

    monkeypatch.setattr(BlockEngines, "wait_for", waited)
    comfy.model_management.load_models_gpu([patcher])
    (pages,) = patcher.model.dynamic_vbars.values()
    assert pages.fault(pages.base_addr, pages.offset) is not None  # all are staged, as by an earlier picture
    pages.unpin(pages.base_addr, pages.offset)
    before = len(pages.resident), pages.watermark
    with quick_block_provider(EngineStore(tmp_path)) as provider:
        assert all_on_engines(compared(provider, patcher))
    assert before[0] > 40 and staged_pages[0] == (before if free else (0, 0))
    assert pages.watermark == before[1] and not pages.held


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_is_transferred_at_once_is_right_together(
    share: float, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a LoRA, whether or not device memory has room for the pages, and where it has none for all at once."""
    patcher = staged(tiny.transformer("sd3"), monkeypatch)
    state = {name: tensor.clone() for name, tensor in patcher.model.state_dict().items()}
    changes = {name: (torch.full(tensor.shape, 0.05),) for name, tensor in state.items() if "qkv.weight" in name}
    assert len(patcher.add_patches(changes, 1.0)) > 1
    comfy.model_management.load_models_gpu([patcher])
    (pages,) = patcher.model.dynamic_vbars.values()
    prefix = "diffusion_model.joint_blocks.0."
    block = patcher.model.diffusion_model.joint_blocks[0]
    ends = sorted(sum(layer._v[1:]) - pages.base_addr for layer in block.modules() if hasattr(layer, "_v"))
    pages.watermark = -(-ends[int(share * len(ends)) - 1] // staging.PAGE) if share else 0
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    wanted = [(PREFIX + name, tuple(state[prefix + name].shape), torch.float32) for name in names]
    transfer, sizes = comfy.ops.cast_modules_with_vbar, list[int]()

    def transferred(layers: Any, *args: Any) -> Any:
        sizes.append(len(layers))
        if len(layers) > 1 and not grows:
            transfer(layers[: len(layers) // 2], *args)
            raise RuntimeError("VRAM grow failed")
        return transfer(layers, *args)

    monkeypatch.setattr(comfy.ops, "cast_modules_with_vbar", transferred)
    for may_copy in (False, True):
        with ExitStack() as until:
            found = block_weights.BlockWeights(wanted).of(block, staging.DEVICE, until, may_copy)
            assert found is not None
            for name, tensor in zip(names, found, strict=True):
                change = 0.05 if prefix + name in changes else 0.0
                torch.testing.assert_close(tensor, state[prefix + name] + change, rtol=0, atol=1e-6)
            assert (pages.held > 0) == (share > 0)
        assert not pages.held and not any("_prefetch" in vars(layer) for layer in block.modules())
    alone = 2 * sum(name.startswith(prefix) for name in changes)  # those of the LoRA, in both calls
    assert sizes[0] > 5 and (sizes.count(1) > alone) == (not grows), sizes
    monkeypatch.setattr(block_weights, "_MOST_COPIED_BYTES", 0)
    with ExitStack() as until:
        found = block_weights.BlockWeights(wanted).of(block, staging.DEVICE, until, may_copy=False)
        assert (found is None) == (share < 1), "a large block is not copied"
    assert not pages.held


def test_weights_in_gguf_are_handed_over_as_they_are(provider: EngineProvider) -> None:
    model = dequantised.model()
    layers = [layer for layer in model.model.diffusion_model.modules() if isinstance(layer, dequantised.GGMLLayer)]
    asked: list[Any] = []
    module = compared(provider, model, callback=lambda *_: asked.append(sum(layer.casts for layer in layers)))
    assert all_on_engines(module)
    by_engines, by_model = asked[:STEPS], asked[STEPS:]
    assert by_engines[-2] == by_engines[-1] and by_model[-2] < by_model[-1], "engines have no layer make its weights"
    assert any("weights in Q8_0" in label for label in labels(provider))


def test_weights_in_gguf_that_are_changed_afterwards_are_made_by_their_layers(provider: EngineProvider) -> None:
    """LoRAs are, and types that programs do not read."""
    model = dequantised.model()
    before = tiny.sample(model, "sd3", steps=STEPS, cfg=2.0)
    assert all_on_engines(compared(provider, model))
    dequantised.change(model)
    assert all_on_engines(compared(provider, model))
    assert distance(tiny.sample(model, "sd3", steps=STEPS, cfg=2.0), before) > 1e-3
    known = {*labels(provider)}
    assert all_on_engines(compared(provider, dequantised.model("IQ8_X")))
    assert all("weights in" not in label for label in {*labels(provider)} - known)


def test_weights_in_gguf_that_are_changed_in_the_midst_of_a_run(provider: EngineProvider) -> None:
    model = dequantised.model()

    def change(step: int, *_: Any) -> None:
        dequantised.change(model, is_changed=1 <= step < STEPS - 1)

    before = tiny.sample(model, "sd3", steps=STEPS, cfg=2.0)
    module = compared(provider, model, callback=change)
    on_engines, total = share_of(module)  # at first they were found to be stored otherwise than they were
    assert on_engines == total > 0
    assert distance(tiny.sample(model, "sd3", steps=STEPS, cfg=2.0, callback=change), before) > 1e-3


@pytest.mark.parametrize("place", ["instance", "class", "module", "what the module imports"])
def test_what_is_replaced_in_layers_that_dequantise_their_weights_is_seen(
    place: str, provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pack's own code, which engines stand for as well."""
    model = dequantised.model()
    before = tiny.sample(model, "sd3", steps=STEPS, cfg=2.0)
    assert all_on_engines(compared(provider, model))
    made = dequantised.GGMLLayer.cast_bias_weight

    def halved(layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        weight, bias = made(layer, *args, **kwargs)
        return 0.5 * weight, bias

    if place == "instance":
        for layer in model.model.diffusion_model.modules():
            if isinstance(layer, dequantised.GGMLLayer):
                layer.cast_bias_weight = MethodType(halved, layer)
    elif place == "class":
        monkeypatch.setattr(dequantised.GGMLLayer, "cast_bias_weight", halved)
    elif place == "what the module imports":
        monkeypatch.setattr(dequantised, "in_q8_0", lambda weight: weight)
        assert share_of(compared(provider, model))[0] == 0
        return
    else:
        monkeypatch.setattr(dequantised, "numbers_of", lambda weight, dtype: 0.5 * weight.dequantised(dtype))
    assert share_of(compared(provider, model))[0] == 0
    assert distance(tiny.sample(model, "sd3", steps=STEPS, cfg=2.0), before) > 1e-3


def test_layers_that_do_more_than_dequantise_stay_with_the_model(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = dequantised.Operations.Linear.forward
    monkeypatch.setattr(dequantised.Operations.Linear, "forward", lambda *args: 1.1 * forward(*args), raising=False)
    assert share_of(compared(provider, dequantised.model()))[0] == 0


def test_a_pack_that_cannot_dequantise_takes_no_engine_from_other_models(
    provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny.transformer("sd3")
    assert all_on_engines(compared(provider, plain))
    monkeypatch.setattr(dequantised.GGMLLayer, "takes_bias_dtype", False)
    module = compared(provider, dequantised.model("IQ8_X"))
    assert share_of(module)[0] == 0 and "cannot be dequantised (TypeError" in module.status.standing.reason
    assert all_on_engines(compared(provider, plain))


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_plain_numbers_that_a_pack_holds_in_a_class_of_its_own(kind: str, provider: EngineProvider) -> None:
    """As where ComfyUI puts what a file holds into layers, instead of copying it."""
    model = dequantised.model()
    for layer in model.model.diffusion_model.modules():
        for name, tensor in layer._parameters.items():
            if tensor is not None and not isinstance(tensor, dequantised.Quantised):
                held = dequantised.Quantised.plain(
                    tensor.detach().to(torch.float16 if kind == "F16" else tensor.dtype), kind
                )
                layer._parameters[name] = torch.nn.Parameter(held, requires_grad=False)
    assert all_on_engines(compared(provider, model))


def test_dequantised_weights_that_functions_change_stay_with_the_model(provider: EngineProvider) -> None:
    """Layers that dequantise their weights know nothing of ComfyUI's functions."""
    model = dequantised.model()
    layers = [layer for name, layer in model.model.diffusion_model.named_modules() if name.endswith("qkv")]

    def change(*_: Any) -> None:
        for layer in layers:
            layer.weight_function = [torch.neg]

    module = compared(provider, model, callback=change)
    assert share_of(module)[0] == 0
