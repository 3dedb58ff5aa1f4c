"""With DynamicVRAM, ComfyUI builds layers that have no weights yet: engines are still those of the same model."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.lora
import comfy.model_management
import comfy.ops
import pytest
import torch

from slipstream.core.protocols import BoundWeights
from slipstream.core.spec import Precision
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.models.autoencoders import HALVES, KINDS
from slipstream.hosts.comfy.models.diffusion_model import ComfyDiffusionModel
from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.hosts.comfy.models.vae import ComfyVaeHalf
from slipstream.hosts.comfy.process import current_weights, dynamic_vram, staged_pages
from slipstream.hosts.comfy.process.dynamic_vram import loading_once
from slipstream.hosts.live_model.account import live_model
from slipstream.runtime.loaded.engine_pool import LoadedEngine
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider

CPU = torch.device("cpu")


@pytest.fixture
def aimdo_enabled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What switches the layers' construction; the rest of DynamicVRAM needs a GPU."""
    try:
        memory = importlib.import_module("comfy.memory_management")
    except ImportError:
        pytest.skip("this ComfyUI has no DynamicVRAM")

    def switch_on() -> None:
        monkeypatch.setattr(memory, "aimdo_enabled", True)

    switch_on.memory = memory  # type: ignore[attr-defined]
    return switch_on


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3"])
def test_a_model_is_the_same_with_and_without(family: str, aimdo_enabled: Any) -> None:
    model = tiny.transformer(family) if family == "sd3" else tiny.model(family)
    without = ComfyDiffusionModel.of(model.model)
    wanted = without.fingerprint, without.weight_names
    aimdo_enabled()
    found = ComfyDiffusionModel.of(model.model)
    assert (found.fingerprint, found.weight_names) == wanted
    placeholder = found.placeholder(Precision.FP32, CPU)
    assert {name.removeprefix("model.") for name, _ in placeholder.named_parameters()} <= found.weight_names
    assert any(isinstance(layer, torch.nn.Linear) and layer.weight is not None for layer in placeholder.modules())
    assert aimdo_enabled.memory.aimdo_enabled, "ComfyUI's own models are built as before"


@pytest.mark.parametrize("half", HALVES.values(), ids=lambda half: half.part)
def test_a_vae_is_the_same_with_and_without(half: Any, aimdo_enabled: Any) -> None:
    layers = {
        "ch": 32, "widths": [32, 64], "num_res_blocks": 1, "out_ch": 3, "in_channels": 3, "z_channels": 4,
        "attn_resolutions": [], "resolution": 64, "double_z": True,
    }  # fmt: skip
    config = {"layers": layers, "embed_dim": 4}
    wanted = ComfyVaeHalf(KINDS["VAE"], half, config).fingerprint
    aimdo_enabled()
    assert ComfyVaeHalf(KINDS["VAE"], half, config).fingerprint == wanted


# -------------------------------------------------------------------------------- weights where ComfyUI stages them


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a tiny SD1.5 whose weights ComfyUI stages."""
    kind = staging.switch_on(monkeypatch)

    def make(seed: int = 1) -> Any:
        model = tiny.model("sd15", seed).model
        comfy.model_management.archive_model_dtypes(model)
        return kind(model, staging.DEVICE, CPU)

    return make


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl", *tiny.TRANSFORMERS])
def test_what_staging_leaves_on_layers_is_no_change(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = staging.switch_on(monkeypatch)
    model = (tiny.transformer(family) if family in tiny.TRANSFORMERS else tiny.model(family)).model
    comfy.model_management.archive_model_dtypes(model)
    tiny.sample(kind(model, staging.DEVICE, CPU), family)
    assert any(hasattr(layer, "seed_key") for layer in model.diffusion_model.modules())
    assert live_model(model.diffusion_model, ComfyDiffusionModel.of(model)).why_changed() is None


def test_engines_answer_from_the_first_picture_on(staged: Any, tmp_path: Path) -> None:
    patcher = staged()
    with quick_provider(EngineStore(tmp_path)) as provider:
        module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE))
        found = tiny.sample(accelerate_model(patcher, module))
    assert (module.status.engine_calls, module.status.to_json()["reasons"]) == (3, {})
    torch.testing.assert_close(found, tiny.sample(patcher), rtol=1e-4, atol=1e-4)


def load(patcher: Any) -> None:
    """As ComfyUI does before each run."""
    with loading_once(patcher):
        patcher.partially_load(patcher.load_device, 0)


def bound(patcher: Any) -> BoundWeights:
    return ComfyUNetSource(patcher).bind(Precision.FP32)


def in_place(patcher: Any) -> Mapping[str, torch.Tensor]:
    """What engines of blocks are given for a run that is over by now."""
    with ExitStack() as run:
        return dynamic_vram.weights_in_place(patcher, patcher.model.diffusion_model, torch.float32, run)


def wanted(patcher: Any) -> dict[str, torch.Tensor]:
    """By ComfyUI's own account of a model's weights, patches included."""
    found = {}
    for name, value in patcher.get_key_patches("diffusion_model.").items():
        weight = value[0][0].clone()
        found["model." + name.removeprefix("diffusion_model.")] = (
            comfy.lora.calculate_weight(value[1:], weight, name) if len(value) > 1 else weight
        )
    return found


def assert_right(weights: BoundWeights, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def assert_bound_right(patcher: Any) -> None:
    weights = bound(patcher)
    assert_right(weights, wanted(patcher))
    weights.release()


def pages_of(patcher: Any) -> staging.Pages:
    (pages,) = patcher.model.dynamic_vbars.values()
    return pages


def with_lora(patcher: Any, strength: float) -> Any:
    clone = patcher.clone()
    names = [name for name in clone.model.state_dict() if name.startswith("diffusion_model.") and "weight" in name]
    patches = {name: ("diff", (torch.ones_like(clone.model.state_dict()[name]),)) for name in names}
    assert clone.add_patches(patches, strength)
    return clone


def places(weights: BoundWeights) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in weights.tensors.items()}


def test_weights_are_used_where_they_lie_and_held_until_released(staged: Any) -> None:
    patcher = staged()
    expected = wanted(patcher)
    load(patcher)
    weights, pages = bound(patcher), pages_of(patcher)
    assert_right(weights, expected)
    inside = [p for p in places(weights).values() if pages.base_addr <= p < pages.base_addr + len(pages.memory)]
    assert len(inside) > 50 and pages.held == len(pages.resident)
    pages.take_away()
    assert_right(weights, expected)
    weights.release()
    assert pages.held == 0
    pages.take_away()
    assert not pages.resident


def test_nothing_is_done_again_while_nothing_changes(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    load(patcher)
    first = bound(patcher)
    first.release()
    casts: list[Any] = []
    monkeypatch.setattr(dynamic_vram, "cast_once", lambda layer, *_: casts.append(layer))
    loads: list[Any] = []
    monkeypatch.setattr(type(patcher), "load", lambda self, *args, **kwargs: loads.append(self))
    for _ in range(3):
        with loading_once(patcher):
            patcher.partially_load(patcher.load_device, 0)
            again = bound(patcher)
            assert again.version == first.version and places(again) == places(first)
            again.release()
    assert not casts and not loads


def test_no_page_is_held_while_comfyui_counts_memory(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write a warning for each one that is, in each step."""
    patcher, seen = staged(), []
    load(patcher)
    pages = pages_of(patcher)
    monkeypatch.setattr(type(patcher), "get_free_memory", lambda self, device: seen.append(pages.held) or 17)
    with loading_once(patcher):
        first, second = bound(patcher), bound(patcher)
        assert patcher.get_free_memory(patcher.load_device) == 17 and seen == [0] and pages.held > 0
        second.release()
        assert pages.held > 0
        first.release()
        assert pages.held == 0
    assert patcher.get_free_memory(patcher.load_device) == 17 and pages.held == 0


def test_pages_that_went_while_memory_was_counted_are_noticed(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    load(patcher)
    pages = pages_of(patcher)
    monkeypatch.setattr(type(patcher), "get_free_memory", lambda self, device: pages.take_away(0))
    with loading_once(patcher):
        weights = bound(patcher)
        with pytest.raises(RuntimeError, match="took weights away"):
            patcher.get_free_memory(patcher.load_device)
        weights.release()


def test_what_was_taken_away_is_staged_again_in_the_same_place(staged: Any) -> None:
    patcher = staged()
    expected = wanted(patcher)
    load(patcher)
    first = bound(patcher)
    before = places(first)
    first.release()
    pages = pages_of(patcher)
    for taken in ([0], [3, 5], list(pages.resident)):
        pages.take_away(*taken)
        load(patcher)
        again = bound(patcher)
        assert_right(again, expected)
        assert places(again) == before and again.version != first.version
        again.release()
    assert pages.held == 0


def test_loras_are_part_of_them_and_go_again(staged: Any) -> None:
    patcher = staged()
    one, other = with_lora(patcher, 0.5), with_lora(patcher, -0.25)
    versions = set()
    for each in (patcher, one, other, one, patcher, other):
        expected = wanted(each)
        load(each)
        weights = bound(each)
        assert_right(weights, expected)
        versions.add(weights.version)
        weights.release()
    assert len(versions) == 6, "each change is another version"
    assert pages_of(patcher).held == 0


def test_a_plain_load_in_between_moves_small_weights_and_no_engine(staged: Any) -> None:
    patcher = staged()
    load(patcher)
    first = bound(patcher)
    first.release()
    patcher.clone().partially_load(patcher.load_device, 0)
    load(patcher)
    again = bound(patcher)
    assert places(again) == places(first)
    assert_right(again, wanted(patcher))
    again.release()


def first_norm(patcher: Any) -> tuple[str, torch.nn.GroupNorm]:
    """A layer whose weights are small, and its name."""
    layers = patcher.model.diffusion_model.named_modules()
    return next((name, layer) for name, layer in layers if isinstance(layer, torch.nn.GroupNorm))


def test_a_weight_that_somebody_replaced_is_seen(staged: Any) -> None:
    patcher = staged()
    load(patcher)
    first = bound(patcher)
    first.release()
    name, layer = first_norm(patcher)
    with torch.no_grad():
        layer.weight.mul_(3)
    again = bound(patcher)
    assert again.version != first.version
    torch.testing.assert_close(again.tensors[f"model.{name}.weight"], layer.weight.detach())
    again.release()


def test_values_that_somebody_put_in_the_place_of_others_are_seen(staged: Any) -> None:
    """By `.data`, which torch counts as no write into the tensor."""
    patcher = staged()
    load(patcher)
    bound(patcher).release()
    in_place(patcher)
    name, layer = first_norm(patcher)
    layer.weight.data = layer.weight.detach() * 3
    again = bound(patcher)
    torch.testing.assert_close(again.tensors[f"model.{name}.weight"], layer.weight.detach())
    again.release()
    torch.testing.assert_close(in_place(patcher)[f"{name}.weight"], layer.weight.detach())


@pytest.mark.parametrize("is_staged", [False, True])
def test_what_somebody_has_layers_do_to_their_weights_is_seen(is_staged: bool, staged: Any) -> None:
    """By `weight_function`, past ComfyUI's own account of patches."""
    patcher = staged()
    load(patcher)
    bound(patcher).release()
    in_place(patcher)
    layers = patcher.model.diffusion_model.named_modules()
    name, layer = next(
        (n, m)
        for n, m in layers
        if hasattr(m, "weight_function") and ("_v" in vars(m)) == is_staged and m.weight.numel()
    )
    before = wanted(patcher)[f"model.{name}.weight"]
    layer.weight_function = [lambda weight: weight * 3]
    again = bound(patcher)
    torch.testing.assert_close(again.tensors[f"model.{name}.weight"], before * 3)
    again.release()
    assert f"{name}.weight" not in in_place(patcher), "it has another value at each call"
    layer.weight_function = []
    assert_bound_right(patcher)
    assert f"{name}.weight" in in_place(patcher)


def test_unloading_is_noticed(staged: Any) -> None:
    patcher = staged()
    expected = wanted(patcher)
    load(patcher)
    bound(patcher).release()
    patcher.detach()
    assert not pages_of(patcher).resident
    load(patcher)
    again = bound(patcher)
    assert_right(again, expected)
    again.release()


def test_where_not_all_fits_the_plain_model_runs(staged: Any) -> None:
    patcher = staged()
    load(patcher)
    pages = pages_of(patcher)
    pages.capacity = 5
    with pytest.raises(torch.OutOfMemoryError, match="do not all fit into VRAM"):
        bound(patcher)
    assert pages.held == 0 and pages.watermark > 5, "what was given up in vain may come back"
    pages.capacity = 1 << 20
    assert_bound_right(patcher)


def test_room_for_sampling_is_left(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    load(patcher)
    with monkeypatch.context() as short:
        short.setattr(comfy.model_management, "get_free_memory", lambda device: 1 << 20)
        with pytest.raises(torch.OutOfMemoryError, match="beside what sampling needs"):
            bound(patcher)
    assert pages_of(patcher).held == 0


def test_weights_that_do_not_all_fit_stay_as_they_lie(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To hold them all in vain would have ComfyUI give up those that fit, and stream them at each step."""
    patcher = staged()
    load(patcher)
    with bound(patcher):
        pass
    pages = pages_of(patcher)
    pages.capacity = len(pages.resident) - 3
    pages.free_memory(3 * staging.PAGE)
    before = dict(pages.resident), pages.watermark
    for_sampling = math.ceil(comfy.model_management.minimum_inference_memory())
    needed = (len(pages.resident) + 3) * staging.PAGE + for_sampling
    loaded = comfy.model_management.LoadedModel(patcher)
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [loaded])
    monkeypatch.setattr(
        comfy.model_management, "get_free_memory", lambda device: needed - pages.loaded_size() - staging.PAGE
    )
    with pytest.raises(torch.OutOfMemoryError, match="beside what sampling needs"):
        bound(patcher)
    assert (pages.resident, pages.watermark, pages.held) == (*before, 0)
    pages.capacity += 3
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: needed - pages.loaded_size())
    assert_bound_right(patcher)


def test_headroom_that_the_user_wants_is_left(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    load(patcher)
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: 8 << 30)
    with bound(patcher):
        pass
    monkeypatch.setattr(importlib.import_module("comfy.memory_management"), "aimdo_enabled", True)
    monkeypatch.setattr(comfy.cli_args.args, "vram_headroom", 7.5, raising=False)
    with pytest.raises(torch.OutOfMemoryError, match="beside what sampling needs"):
        bound(patcher)


def loads_of(patcher: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that ComfyUI does itself from now on."""
    loads: list[Any] = []
    real = type(patcher).load

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(patcher), "load", load)
    return loads


@pytest.mark.parametrize("change", ["callback", "hooks", "injection", "current", "forced"])
def test_a_load_that_others_have_a_part_in_is_not_left_out(
    change: str, staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.hooks import HookGroup, WeightHook
    from comfy.patcher_extension import CallbacksMP

    patcher = staged()
    load(patcher)
    bound(patcher).release()
    loads: list[Any] = []
    monkeypatch.setattr(type(patcher), "load", lambda *args, **kwargs: loads.append(args))
    load(patcher)
    assert not loads
    hooks = HookGroup()
    hooks.add(WeightHook())
    if change == "callback":
        patcher.add_callback(CallbacksMP.ON_LOAD, lambda *args: None)
    elif change == "hooks":
        patcher.hook_patches = {"hook": {}}
    elif change == "injection":
        patcher.injections = {"key": []}
    elif change == "current":
        patcher.current_hooks = hooks
    else:
        patcher.forced_hooks = hooks
    load(patcher)
    assert loads


def by_a_clones_callback(patcher: Any) -> Any:
    """As nodes that swap blocks have it: ComfyUI's next load undoes it."""
    from comfy.patcher_extension import CallbacksMP

    def change(clone: Any, *_: Any) -> None:
        _, layer = first_staged(clone)
        layer.weight_function = [torch.zeros_like]

    clone = patcher.clone()
    clone.add_callback(CallbacksMP.ON_LOAD, change)
    load(clone)
    return patcher


def by_an_object_patch(patcher: Any) -> Any:
    clone = patcher.clone()
    name, layer = first_staged(clone)
    other = type(layer)(layer.in_channels, layer.out_channels, layer.kernel_size, padding=layer.padding)
    clone.add_object_patch(f"diffusion_model.{name}", other)
    return clone


def by_another_small_weight(patcher: Any) -> Any:
    _, layer = first_norm(patcher)
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
    return patcher


def by_a_layer_with_the_same_weights(patcher: Any) -> Any:
    clone = by_an_object_patch(patcher)
    for name, other in clone.object_patches.items():
        own = patcher.get_model_object(name)
        other.weight, other.bias = own.weight, own.bias
    return clone


def by_a_move(patcher: Any) -> Any:
    first_norm(patcher)[1].half()
    return patcher


def by_a_load_elsewhere(patcher: Any) -> Any:
    clone = patcher.clone()
    clone.load_device = torch.device("meta")
    clone.register_load_device(clone.load_device)
    load(clone)
    return patcher


CHANGES = (
    by_a_clones_callback, by_an_object_patch, by_a_layer_with_the_same_weights, by_another_small_weight, by_a_move,
    by_a_load_elsewhere,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_load_is_done_where_others_changed_what_it_makes(
    change: Any, staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = staged()
    expected = wanted(patcher)
    load(patcher)
    changed, loads = change(patcher), loads_of(patcher, monkeypatch)
    load(changed)
    assert loads == [changed]
    _, layer = first_staged(changed)
    assert "_v" in vars(layer) and not layer.weight_function and layer.comfy_cast_weights
    load(changed)
    assert len(loads) == 1
    if change is not by_an_object_patch:
        assert_cast_right(changed, expected)
        small = first_norm(changed)[1].weight
        assert small.all() and small.dtype == torch.float32


def test_models_with_other_schedules_take_turns_without_loads(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's load would write the buffers of one into the other."""
    patcher = staged()
    other = patcher.clone()
    schedule = type(patcher.model.model_sampling)(patcher.model.model_config)
    schedule.set_sigmas(schedule.sigmas * 2)
    other.add_object_patch("model_sampling", schedule)
    load(patcher)
    last, loads = float(patcher.model.model_sampling.sigma_max), loads_of(patcher, monkeypatch)
    for _ in range(2):
        for each, factor in ((other, 2), (patcher, 1)):
            load(each)
            assert float(each.model.model_sampling.sigma_max) == pytest.approx(last * factor)
    assert not loads


def test_a_scripted_layer_is_no_reason_to_fail(staged: Any) -> None:
    patcher = staged()
    clone = patcher.clone()
    name, layer = first_norm(patcher)
    clone.add_object_patch(f"diffusion_model.{name}", torch.jit.script(torch.nn.GroupNorm(32, layer.num_channels)))
    for each in (clone, clone, patcher, clone):
        load(each)
    assert isinstance(first_norm(patcher)[1], torch.nn.GroupNorm)


def first_staged(patcher: Any) -> tuple[str, Any]:
    """The first convolution whose weights ComfyUI stages, or would stage, and its name."""
    layers = patcher.model.diffusion_model.named_modules()
    return next((n, each) for n, each in layers if isinstance(each, torch.nn.Conv2d) and each.in_channels > 16)


def test_a_load_that_is_left_out_holds_nothing(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without an engine leaves all weights to ComfyUI, which may take their pages whenever it wants to."""
    patcher = staged()
    expected = wanted(patcher)
    load(patcher)
    bound(patcher).release()
    pages, loads = pages_of(patcher), loads_of(patcher, monkeypatch)
    with loading_once(patcher):
        patcher.partially_load(patcher.load_device, 0)
        assert pages.held == 0 and not loads
        assert patcher.model.dynamic_pins[patcher.load_device]["active"]
        assert pages.free_memory(3 * staging.PAGE) == 3 * staging.PAGE
        pages.take_away(0, 2)
        assert_cast_right(patcher, expected)
        pages.take_away()
        weights = bound(patcher)
        assert_right(weights, expected)
        weights.release()
    assert pages.held == 0


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_a_load_is_left_out_where_memory_for_all_pages_lacks(
    strength: float, staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = with_lora(staged(), strength) if strength else staged()
    expected = wanted(patcher)
    load(patcher)
    pages, loads = pages_of(patcher), loads_of(patcher, monkeypatch)
    assert_cast_right(patcher, expected)
    pages.capacity = len(pages.resident) - 3
    for _ in range(2):
        assert pages.free_memory(32 * staging.PAGE), "as for what is loaded between two pictures"
        left = len(pages.resident)
        load(patcher)
        assert not loads and pages.held == 0
        assert_cast_right(patcher, expected)
        assert len(pages.resident) > left, "those that were given up come back where they fit"


def assert_cast_right(patcher: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Check what calls of the layers whose weights are staged compute with."""
    for name, layer in patcher.model.diffusion_model.named_modules():
        if "_v" in vars(layer):
            found, _ = cast(layer)
            torch.testing.assert_close(found, expected[f"model.{name}.weight"], rtol=1e-5, atol=1e-6)


def cast(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's weight and bias as a call of it computes with them."""
    weight, bias, stream = comfy.ops.cast_bias_weight(
        layer, dtype=torch.float32, device=staging.DEVICE, bias_dtype=torch.float32, offloadable=True
    )
    found = weight.clone(), None if bias is None else bias.clone()
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return found


def test_pages_that_are_held_are_held_again_when_memory_was_short(staged: Any) -> None:
    """A ControlNet, a half or another shape binds in the middle of a run."""
    patcher = staged()
    load(patcher)
    first, pages = bound(patcher), pages_of(patcher)
    assert pages.free_memory(staging.PAGE) == 0 and pages.watermark == 0
    again = bound(patcher)
    assert places(again) == places(first) and again.version == first.version
    first.release()
    pages.take_away()
    assert_right(again, wanted(patcher))
    again.release()
    assert pages.held == 0


def out_of_reach(*_: Any) -> Any:
    raise RuntimeError("Fault failed: 2")


def test_pages_that_cannot_be_had_count_as_memory_that_does_not_suffice(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = staged()
    load(patcher)
    bound(patcher).release()
    pages = pages_of(patcher)
    monkeypatch.setattr(pages, "fault", out_of_reach)
    with pytest.raises(torch.OutOfMemoryError, match="do not all fit into VRAM"):
        bound(patcher)
    assert pages.held == 0


@pytest.mark.parametrize("failing", ["patch_model", "unpatch_model"])
def test_a_load_that_cannot_be_left_out_is_done(failing: str, staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    load(patcher)
    bound(patcher).release()
    loads, real = loads_of(patcher, monkeypatch), getattr(patcher, failing)

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        setattr(patcher, failing, real)
        raise RuntimeError("fails")

    setattr(patcher, failing, fails_once)
    load(patcher)
    assert loads == [patcher] and pages_of(patcher).held == 0
    assert_bound_right(patcher)


def test_what_somebody_else_did_to_loads_stays(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    load(patcher)
    bound(patcher).release()
    assert "partially_load" not in vars(patcher)
    seen: list[Any] = []

    def override(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return type(patcher).partially_load(patcher, *args, **kwargs)

    patcher.partially_load = override
    load(patcher)
    assert vars(patcher)["partially_load"] is override and len(seen) == 1
    del patcher.partially_load
    with loading_once(patcher):
        patcher.partially_load = override
    assert vars(patcher)["partially_load"] is override


def test_what_another_lora_left_in_the_pages_is_seen(staged: Any) -> None:
    """Without a page that was taken away, and without a tensor that was replaced."""
    patcher = staged()
    other = with_lora(patcher, 0.5)
    load(patcher)
    name, layer = next((n, m) for n, m in patcher.model.diffusion_model.named_modules() if "_v" in vars(m))
    network = torch.nn.Sequential(layer)
    expected = {f"0.{part}": wanted(patcher)[f"model.{name}.{part}"] for part in ("weight", "bias")}

    def bind() -> BoundWeights:
        return dynamic_vram.bind_staged(patcher, network, set(expected), torch.float32)

    first = bind()
    first.release()
    other.partially_load(other.load_device, 0)
    cast(layer)
    patcher.partially_load(patcher.load_device, 0)
    again = bind()
    assert_right(again, expected)
    assert again.version != first.version
    again.release()


def test_a_tensor_in_the_place_of_one_that_is_gone_is_seen(staged: Any) -> None:
    patcher = staged()
    load(patcher)
    first = bound(patcher)
    first.release()
    name, layer = first_norm(patcher)
    value, before = torch.full_like(layer.weight, 3), id(layer.weight)
    version, others = layer.weight._version, []
    layer.weight = None
    for _ in range(1000):  # Python puts a new object where one of the same size lay
        others.append(torch.nn.Parameter(value, requires_grad=False))
        if id(others[-1]) == before:
            break
    layer.weight = others[-1]
    with torch.no_grad():
        for _ in range(version):
            layer.weight.add_(0)
    assert id(layer.weight) == before and layer.weight._version == version
    again = bound(patcher)
    assert again.version != first.version
    torch.testing.assert_close(again.tensors[f"model.{name}.weight"], value)
    again.release()


@pytest.mark.parametrize(
    ("version", "counts"),
    [("0.2.14", False), ("0.3.0", True), ("0.4.13.dev2", True), ("1.0", True), (None, False)],
)
def test_weights_are_copied_where_a_page_has_one_holder(
    version: str | None, counts: bool, staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before comfy-aimdo 0.3.0, whoever lets go of a page lets go of it for all."""

    def installed(name: str) -> str:
        assert name == "comfy-aimdo"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(staged_pages, "counts_holders", staged_pages.counts_holders.__wrapped__)
    monkeypatch.setattr(staging.Pages, "counts_holders", counts)
    patcher = staged()
    expected = wanted(patcher)
    load(patcher)
    weights, pages = bound(patcher), pages_of(patcher)
    for layer in patcher.model.diffusion_model.modules():
        if "_v" in vars(layer):
            cast(layer)  # a step of the plain model
    pages.take_away()
    if not counts:
        pages.memory.fill_(255)
    assert_right(weights, expected)
    assert bool(pages.held) == counts
    weights.release()
    assert pages.held == 0


def test_pages_that_are_held_are_not_counted_as_giving_way(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are not asked for by ComfyUI's count, which warns of each page that is held."""
    patcher = staged()
    load(patcher)
    bound(patcher).release()  # all pages are staged
    loaded = comfy.model_management.LoadedModel(patcher)
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [loaded])
    everything = pages_of(patcher).loaded_size()
    assert everything > 0 and staged_pages.yielding(patcher.load_device) == everything
    with bound(patcher):
        assert staged_pages.yielding(patcher.load_device) == 0
    assert staged_pages.yielding(patcher.load_device) == everything
    assert staged_pages.yielding(torch.device("meta")) == 0


def test_object_patches_come_and_go_without_a_load(staged: Any) -> None:
    patcher = staged()
    load(patcher)
    bound(patcher).release()
    other = patcher.clone()
    other.add_object_patch("model_sampling", patcher.model.model_sampling)
    marker = object()
    other.add_object_patch("latent_format", marker)
    with loading_once(other):
        other.partially_load(other.load_device, 0)
        assert other.model.latent_format is marker
    with loading_once(patcher):
        patcher.partially_load(patcher.load_device, 0)
        assert patcher.model.latent_format is not marker


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loras_are_computed_as_by_comfyui_s_own_cast(
    staged: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """To the last bit, but no memory is pinned for them: they are read once."""
    patcher = staged()
    asked: list[Any] = []
    pinned = importlib.import_module("comfy.pinned_memory")
    monkeypatch.setattr(pinned, "pin_memory", lambda module, *_, **__: asked.append(module))
    model = patcher.model.diffusion_model.to(dtype)
    comfy.model_management.archive_model_dtypes(patcher.model)
    other = with_every_patch(patcher)
    load(other)
    layers = [layer for layer in model.modules() if "_v" in vars(layer)]
    patched = [layer for layer in layers if layer.weight_lowvram_function is not None]
    assert len(patched) > 20 and any(layer.bias_lowvram_function is not None for layer in patched)
    expected = [cast_by_comfyui(layer, dtype) for layer in patched]
    assert any(not isinstance(module, torch.nn.Module) for module in asked)
    asked.clear()
    pages_of(other).take_away()
    for layer, parts in zip(patched, expected, strict=True):
        functions = layer.weight_lowvram_function, layer.bias_lowvram_function
        current_weights.cast_once(layer, dtype, staging.DEVICE)
        assert (layer.weight_lowvram_function, layer.bias_lowvram_function) == functions
        for found, wanted in zip((layer._v_weight, layer._v_bias), parts, strict=True):
            assert found is wanted is None or torch.equal(found, wanted)
        for found, wanted in zip(cast_by_comfyui(layer, dtype), parts, strict=True):
            assert found is wanted is None or torch.equal(found, wanted), "a call of the layer patches it no more"
    assert asked and all(isinstance(module, torch.nn.Module) for module in asked)


def with_every_patch(patcher: Any) -> Any:
    """A clone with LoRAs, DoRAs and differences, some of them two of a weight, also in parts of it."""
    adapters = importlib.import_module("comfy.weight_adapter")
    generator, clone, patches = torch.Generator().manual_seed(1), patcher.clone(), {}
    for place, (name, tensor) in enumerate(patcher.model.diffusion_model.state_dict().items()):
        key, rank = f"diffusion_model.{name}", 4
        if tensor.ndim != 2:
            patches[key] = ("diff", (torch.randn(tensor.shape, generator=generator),))
            continue
        up, down = (torch.randn(shape, generator=generator) for shape in ((len(tensor), rank), (rank, tensor.shape[1])))
        scale = torch.rand((len(tensor), 1), generator=generator) if place % 3 == 0 else None
        patches[key] = adapters.LoRAAdapter(set(), (up, down, 2.0 if place % 2 else None, None, scale, None))
    clone.add_patches(patches, 0.3)
    clone.add_patches(dict(list(patches.items())[::2]), -0.7, 0.9)
    return clone


def cast_by_comfyui(layer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    with current_weights.LayerCast(layer, dtype, staging.DEVICE) as (weight, bias):
        return weight.clone(), None if bias is None else bias.clone()


def test_a_weight_whose_lora_fails_is_staged_again(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = staged()
    other = with_lora(patcher, 0.5)
    load(other)
    patch = importlib.import_module("comfy.model_patcher").LowVramPatch
    with monkeypatch.context() as failing:
        failing.setattr(patch, "__call__", lambda self, weight: (weight.mul_(0), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            bound(other)
    assert pages_of(other).held == 0
    assert_bound_right(other)


def test_a_cast_that_failed_midway_is_no_prefetch(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI would take it for one at every later call, and read what other layers put there since."""
    patcher = staged()
    other = with_lora(patcher, 0.5)
    load(other)
    with monkeypatch.context() as short_of_memory:

        def resolve(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no memory for what is cast")

        short_of_memory.setattr(comfy.ops, "resolve_cast_module_with_vbar", resolve)
        with pytest.raises(torch.OutOfMemoryError):
            bound(other)
    assert not any("_prefetch" in vars(layer) for layer in patcher.model.diffusion_model.modules())
    assert pages_of(other).held == 0
    assert_bound_right(other)


def test_small_buffers_stay_where_graphs_read_them(staged: Any) -> None:
    """ComfyUI moves them anew at each load, as for another LoRA."""
    patcher = staged()
    sampling = patcher.model.model_sampling
    expected = sampling.sigmas.clone()
    load(patcher)
    first = sampling.sigmas
    assert torch.equal(first, expected)
    other = with_lora(patcher, 0.5)
    with loading_once(other):
        other.partially_load(other.load_device, 0)
    assert sampling.sigmas is first and torch.equal(first, expected)
    patcher.detach()
    assert sampling.sigmas is not first
    with torch.inference_mode():
        sampling.set_sigmas(expected * 2)
        load(patcher)
    assert sampling.sigmas is first and torch.equal(first, expected * 2)
    assert torch.equal(sampling.log_sigmas, (expected * 2).log())


def test_an_engine_lets_go_when_it_rests(staged: Any, tmp_path: Any) -> None:
    """The pool's engines hold the weights for as long as they are in use, whatever happens."""
    patcher = staged()
    load(patcher)
    weights = bound(patcher)

    class Refusing:
        device_bytes = 0

        def update_weights(self, tensors: Any, version: Any = None) -> None:
            raise RuntimeError("refused")

        def release_weights(self) -> None: ...

        def close(self) -> None: ...

    loaded = object.__new__(LoadedEngine)
    loaded._held, loaded._bound, loaded.engine = ExitStack(), None, Refusing()
    with pytest.raises(RuntimeError):
        loaded.bind(weights)
    assert pages_of(patcher).held
    loaded.rest()
    assert pages_of(patcher).held == 0
