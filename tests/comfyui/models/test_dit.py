"""Diffusion transformers: the picture equals the plain one, the engine made it, and the model stays whole."""

from __future__ import annotations

import importlib
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.sd
import comfyui_version
import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.core.spec import Precision
from slipstream.engine_cache import EngineStore, WeightsMemo
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.building.build_engines import open_unet, unet_call
from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
from slipstream.hosts.live_model.layer_walk import layers_of
from slipstream.hosts.live_model.source_code import HostCode
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.planning.plan import CallShape
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Resolution, Settings
from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.changes import attention_override, compiled_elsewhere
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

TOLERANCE = 1e-4
ALL = sorted(tiny.TRANSFORMERS)
# Builds take long: an older ComfyUI's other classes are traced and compared, but not compiled.
BUILT = ALL if int(comfyui_version.__version__.split(".")[1]) >= 33 else ["sd3"]
Patcher = Any


@pytest.fixture(scope="module")
def provider(engine_store: EngineStore) -> EngineProvider:
    return EngineProvider(engine_store)


def accelerated(
    provider: EngineProvider, patcher: Patcher, policy: BuildPolicy = BuildPolicy.FIRST_USE
) -> tuple[Patcher, AcceleratedModule]:
    module = AcceleratedModule(provider, Settings(policy=policy))
    return accelerate_model(patcher, module), module


def with_lora(patcher: Patcher, strength: float = 1.0) -> Patcher:
    generator = torch.Generator().manual_seed(5)
    lora = {}
    weights = patcher.model.state_dict()
    for name, key in comfy.lora.model_lora_keys_unet(patcher.model, {}).items():
        if name.startswith("diffusion_model.") and weights[key].ndim == 2:
            rows, columns = weights[key].shape
            lora[f"{name}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
            lora[f"{name}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * 0.1
    assert len(lora) > 8, "no layer took the LoRA: the key names have changed"
    return comfy.sd.load_lora_for_models(patcher, None, lora, strength, 0.0)[0]


def assert_whole(patcher: Patcher) -> None:
    """The model's own module is in its place."""
    model = patcher.model
    assert "diffusion_model" not in vars(model) and isinstance(model.diffusion_model, torch.nn.Module)
    assert model.diffusion_model is model._modules["diffusion_model"]


def prompts(family: str, **extras: Any) -> dict[str, Any]:
    """Qwen-Image's come with a mask of whole numbers, which older ComfyUIs leave out."""
    if family == "qwen":
        extras["attention_mask"] = torch.tensor([[1] * 60 + [0] * 17])
    seeds = {"positive": 1, "negative": 2}
    return {name: tiny.conditioning(family, seed, **extras) for name, seed in seeds.items()}


@pytest.mark.parametrize("family", with_slow(BUILT, *({"qwen", "wan", "pixart"} & {*BUILT})))
def test_picture_is_the_plain_one_and_the_engine_made_it(family: str, provider: EngineProvider) -> None:
    model = tiny.transformer(family)
    fast, module = accelerated(provider, model)
    wanted, found = (tiny.sample(patcher, family, **prompts(family)) for patcher in (model, fast))
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    assert module.status.engine_calls == 3
    assert wanted.std() > 0.1 and distance(found, wanted) < TOLERANCE
    assert_whole(fast)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_what_is_traced_computes_what_the_model_does_in_half_precision(family: str, precision: Precision) -> None:
    """Without a build: the placeholder with the live weights."""
    from slipstream.core.dtypes import dtype_of

    dtype = dtype_of(precision)
    model = tiny.transformer(family, dtype=dtype)
    comfy.model_management.load_models_gpu([model])
    source = ComfyUNetSource(model)
    assert source.precision is precision
    shapes = SHAPES[family]
    inputs = source.architecture.random_inputs(
        shapes, {name: torch.float32 if name == "timesteps" else dtype for name in shapes}, source.device, seed=1
    )
    placeholder = source.architecture.placeholder(precision, source.device)
    with torch.no_grad():
        found = torch.func.functional_call(placeholder, dict(source.bind(precision).tensors), (), inputs)[0]
        reference, eager = source.reference(inputs), source.eager(inputs)
    assert found.dtype == eager["out"].dtype == dtype and reference["out"].dtype == torch.float32
    assert relative_error({"out": found}, reference) < 1.2 * relative_error(eager, reference) < 2e-2


SHAPES = {
    "sd3": {"x": (2, 16, 6, 10), "timesteps": (2,), "context": (2, 9, 32), "y": (2, 24)},
    "flux": {"x": (2, 16, 6, 10), "timesteps": (2,), "context": (2, 9, 32), "y": (2, 24), "guidance": (2,)},
    "wan": {"x": (2, 16, 3, 6, 10), "timesteps": (2,), "context": (2, 9, 32)},
    "qwen": {"x": (2, 16, 1, 6, 10), "timesteps": (2,), "context": (2, 9, 32)},
    "pixart": {"x": (2, 4, 34, 38), "timesteps": (2,), "context": (2, 9, 32), "c_size": (2, 2), "c_ar": (2, 1)},
}


@pytest.mark.skipif("pixart" not in BUILT, reason="not compiled on this ComfyUI")
def test_pixarts_engine_follows_the_size_that_a_prompt_tells(provider: EngineProvider) -> None:
    """As the node CLIP Text Encode PixArt-alpha does: it is an input of the engine, not a part of it."""
    model = tiny.transformer("pixart")
    fast, module = accelerated(provider, model)
    pictures = []
    for told in ({}, {"width": 1024, "height": 512}, {"width": 1024, "height": 512, "aspect_ratio": 3.0}):
        wanted, found = (tiny.sample(patcher, "pixart", **prompts("pixart", **told)) for patcher in (model, fast))
        assert distance(found, wanted) < TOLERANCE
        pictures.append(found)
    assert module.status.eager_calls == 0 and module.status.engine_calls == 9
    assert len(module.status.to_json()["engines"]) == 1
    assert all(distance(pictures[0], other) > 10 * TOLERANCE for other in pictures[1:])
    assert distance(pictures[1], pictures[2]) > 10 * TOLERANCE


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("positions", [None, 1])
def test_what_is_traced_of_pixart_sigma_computes_what_it_does(told: bool, positions: int | None) -> None:
    """It reads no size, and may find out itself how far apart its positions are."""
    config = {"image_model": "pixart_sigma", "micro_condition": False, "pe_interpolation": positions}
    assert_traced_right(tiny.transformer("pixart", **config), told)


@pytest.mark.parametrize("told", [True, False])
def test_what_is_traced_of_pixart_alpha_computes_what_it_does(told: bool) -> None:
    """Where nobody tells it a size, it takes the picture's."""
    assert_traced_right(tiny.transformer("pixart"), told)


def assert_traced_right(model: Patcher, told: bool) -> None:
    """By its own program, which has the one attention that compilers know, whatever this machine's is."""
    comfy.model_management.load_models_gpu([model])
    source = ComfyUNetSource(model)
    shapes = {name: shape for name, shape in SHAPES["pixart"].items() if told or not name.startswith("c_")}
    inputs = source.architecture.random_inputs(shapes, dict.fromkeys(shapes, torch.float32), source.device, seed=1)
    placeholder = source.architecture.placeholder(Precision.FP32, source.device)
    weights = dict(source.bind(Precision.FP32).tensors)
    with torch.no_grad():
        graph = torch.export.export(placeholder, (), dict(inputs), strict=False).graph
        found = torch.func.functional_call(placeholder, weights, (), inputs)[0]
        assert found.shape == (2, 4, 34, 38)
        assert relative_error({"out": found}, source.eager(inputs)) < 1e-5
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.aten.scaled_dot_product_attention.default) == 4
    assert torch.ops.aten.softmax.int not in targets


@pytest.mark.parametrize("family", ALL)
def test_reading_a_model_takes_no_random_numbers(family: str) -> None:
    """Those are the samplers'."""
    source = ComfyUNetSource(tiny.transformer(family))
    before = torch.get_rng_state()
    assert source.architecture.new_meta_module() and source.architecture.caster()
    assert torch.equal(torch.get_rng_state(), before)


def test_sd3_engine_follows_a_lora_that_comes_changes_and_goes(provider: EngineProvider) -> None:
    model = tiny.transformer("sd3")
    fast, module = accelerated(provider, model)
    pictures = []
    for strength in (0.0, 1.0, 0.25, 0.0):
        change = (lambda patcher: patcher) if not strength else (lambda patcher, s=strength: with_lora(patcher, s))
        wanted, found = tiny.sample(change(model), "sd3"), tiny.sample(change(fast), "sd3")
        assert distance(found, wanted) < TOLERANCE
        pictures.append(found)
    assert module.status.eager_calls == 0 and module.status.engine_calls == 12
    assert len(module.status.to_json()["engines"]) == 1
    assert torch.equal(pictures[0], pictures[3])
    assert distance(pictures[1], pictures[0]) > 100 * TOLERANCE
    assert distance(pictures[2], pictures[1]) > 10 * TOLERANCE


def test_sd3_is_whole_after_an_interrupt_inside_a_call(provider: EngineProvider, monkeypatch: Any) -> None:
    model = tiny.transformer("sd3")
    wanted = tiny.sample(model, "sd3")
    fast, module = accelerated(provider, model, BuildPolicy.MANUAL)
    kind = type(model.model.diffusion_model)
    seen = []

    def before_the_call(self: Any, timestep: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(self.diffusion_model)
        return timestep

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> None:
        assert_whole(fast)
        raise comfy.model_management.InterruptProcessingException

    monkeypatch.setattr(type(model.model), "process_timestep", before_the_call)
    monkeypatch.setattr(kind, "forward", interrupt)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(fast, "sd3")
    monkeypatch.undo()
    (stand_in,) = seen
    assert not isinstance(stand_in, torch.nn.Module), "the call did not go through a stand-in: the test proves nothing"
    assert stand_in.dtype == torch.float32
    assert_whole(fast)
    assert distance(tiny.sample(fast, "sd3"), wanted) < TOLERANCE
    assert_whole(fast)
    comfy.model_management.unload_all_models()
    names = set(fast.model.state_dict())
    assert names and names == set(tiny.transformer("sd3").model.state_dict())


def scaled_positions(patcher: Patcher) -> Patcher:
    """As ScaleROPE does it, which 0.3.64 does not have."""
    clone = patcher.clone()
    clone.model_options["transformer_options"]["rope_options"] = {"scale_x": 2.0, "scale_y": 2.0}
    return clone


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("sd3", compiled_elsewhere, "TorchCompileModel"),
        ("sd3", attention_override, "attention function"),
        ("wan", attention_override, "attention function"),
        ("flux", scaled_positions, "rope_options"),
    ],
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_an_engine_cannot_honour_runs_plain(
    family: str, change: Any, says: str, place: str, provider: EngineProvider
) -> None:
    model = tiny.transformer(family)
    wanted = tiny.sample(change(model), family)
    if place == "before":
        fast, module = accelerated(provider, change(model))
    else:
        fast, module = accelerated(provider, model)
        fast = change(fast)
    found = tiny.sample(fast, family)
    assert torch.equal(found, wanted)
    assert module.status.engine_calls == 0 and module.status.eager_calls == 3
    assert [says in reason for reason in module.status.to_json()["reasons"]] == [True]
    assert_whole(fast)


@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_reference_pictures_run_plain(family: str, provider: EngineProvider) -> None:
    model = tiny.transformer(family)
    shape = tuple(tiny.latent(64, 1, family)["samples"].shape)
    reference = prompts(family, reference_latents=[torch.randn(shape, generator=torch.Generator().manual_seed(3))])
    wanted = tiny.sample(model, family, **reference)
    assert distance(wanted, tiny.sample(model, family, **prompts(family))) > 100 * TOLERANCE
    fast, module = accelerated(provider, model)
    assert torch.equal(tiny.sample(fast, family, **reference), wanted)
    assert module.status.engine_calls == 0 and "'ref_latents'" in module.status.to_json()["now"]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    "name", ["ldm.common_dit.pad_to_patch_size", "ldm.modules.attention.attention_pytorch", "ops.cast_bias_weight"]
)
def test_a_replaced_function_of_comfyuis_is_noticed(family: str, name: str, monkeypatch: Any) -> None:
    """Wherever the transformer's code reaches it."""
    model = tiny.transformer(family).model.diffusion_model
    assert HostCode(model, layers_of(model)).why_replaced() is None
    module, _, function = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(f"comfy.{module}"), function, lambda *args, **kwargs: None)
    assert str(HostCode(model, layers_of(model)).why_replaced()).endswith(
        f"test_dit) replaced comfy.{name}; start without it to use engines"
    )


def test_a_transformer_that_cannot_be_traced_runs_plain(provider: EngineProvider) -> None:
    """This one computes inside of its text, which is the host's."""
    model = tiny.transformer("sd3", context_size=32, context_processor_layers=1)
    wanted = tiny.sample(model, "sd3")
    fast, module = accelerated(provider, model)
    assert torch.equal(tiny.sample(fast, "sd3"), wanted)
    assert (module.status.engine_calls, module.status.eager_calls) == (0, 3)
    (reason,) = module.status.to_json()["reasons"]
    assert "the model writes into its input 'context'" in reason
    assert_whole(fast)


@pytest.mark.parametrize("family", ALL)
def test_a_method_that_takes_anything_runs_plain(family: str, provider: EngineProvider, monkeypatch: Any) -> None:
    model = tiny.transformer(family)
    wanted = tiny.sample(model, family)
    fast, module = accelerated(provider, model)
    kind = type(model.model.diffusion_model)
    name = "_forward" if hasattr(kind, "_forward") else "forward"
    before = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: before(*args, **kwargs))
    assert torch.equal(tiny.sample(fast, family), wanted)
    assert module.status.engine_calls == 0 and "replaced comfy." in module.status.to_json()["now"]


def test_a_class_without_engines_says_so(provider: EngineProvider) -> None:
    model = tiny.transformer("sd3")
    kind = type(model.model.diffusion_model)
    model.model.diffusion_model.__class__ = type("OtherTransformer", (kind,), {})
    fast, module = accelerated(provider, model)
    assert torch.isfinite(tiny.sample(fast, "sd3")).all()
    assert module.status.engine_calls == 0 and "OtherTransformer) have no engines yet" in module.status.to_json()["now"]


@pytest.mark.parametrize("family", ["sd3", "flux", "qwen", "pixart"])
def test_the_build_node_knows_the_call(family: str, provider: EngineProvider, monkeypatch: Any) -> None:
    """It builds what sampling asks for."""
    asked = []
    offer = EngineProvider.offer
    monkeypatch.setattr(
        EngineProvider,
        "offer",
        lambda self, source, call, *args: (asked.append(call), offer(self, source, call, *args))[1],
    )
    model = tiny.transformer(family)
    fast, _ = accelerated(provider, model, BuildPolicy.MANUAL)
    tiny.sample(fast, family)
    source = open_unet(model, WeightsMemo(provider.store.root))
    size = tiny.size_of(family)
    assert asked == [unet_call(source, Resolution(size, size), batch=2, tokens=77)]
    assert isinstance(asked[0], CallShape)


def test_the_build_node_says_what_it_cannot_know(provider: EngineProvider) -> None:
    source = open_unet(tiny.transformer("wan"), WeightsMemo(provider.store.root))
    with pytest.raises(UnsupportedModel, match="first use"):
        unet_call(source, Resolution(64, 64), batch=2, tokens=77)
