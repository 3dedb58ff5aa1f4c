"""What people do with a model, each on an engine: the picture equals the plain one, and the engine made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

TOLERANCE = 1e-4
Patcher = Any
Change = Callable[[Patcher], Patcher]


def unchanged(patcher: Patcher) -> Patcher:
    return patcher


def with_lora(patcher: Patcher, strength: float = 1.0, seed: int = 5) -> Patcher:
    """As LoraLoaderModelOnly does it, on every attention projection and the first convolution."""
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    weights = patcher.model.state_dict()
    for name, key in comfy.lora.model_lora_keys_unet(patcher.model, {}).items():
        wanted = "attn" in name or name.endswith("input_blocks_0_0")
        if name.startswith("lora_unet_") and wanted and key in weights:
            rows, columns = weights[key].shape[0], weights[key][0].numel()
            lora[f"{name}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
            lora[f"{name}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * 0.1
    assert len(lora) > 8, "no layer took the LoRA: the key names have changed"
    return comfy.sd.load_lora_for_models(patcher, None, lora, strength, 0.0)[0]


def merged(patcher: Patcher) -> Patcher:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    return ModelMergeSimple().merge(patcher, tiny.model(seed=9), 0.3)[0]


def easy_cache(patcher: Patcher) -> Patcher:
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(patcher, 0.2, 0.15, 0.95, False).args[0]


def fp8(patcher: Patcher) -> Patcher:
    """As `UNETLoader` with weight_dtype fp8 leaves a model: stored in fp8, cast at every call."""
    shape = tiny.FAMILIES["sd15"]
    config = tiny.CONFIGS["sd15"]({**shape.config(), "dtype": torch.float8_e4m3fn})
    config.unet_config.update(shape.heads)
    config.manual_cast_dtype = torch.float32
    model = comfy.model_base.BaseModel(config, device=torch.device("cpu"))
    numbers = patcher.model.diffusion_model.state_dict()
    for name, parameter in model.diffusion_model.named_parameters():
        parameter.data.copy_(numbers[name])
    return comfy.model_patcher.ModelPatcher(model, patcher.load_device, patcher.offload_device)


def masked(seed: int, value: float) -> list[Any]:
    mask = torch.zeros(1, 64, 64)
    mask[:, :, :32] = value
    return tiny.conditioning(seed=seed, mask=mask, mask_strength=1.0)


@dataclass(frozen=True)
class Case:
    """One thing that people do.

    Attributes:
        before, after: what stands before and after Accelerate Model in the graph.
        sample: options of the sampler.
    """

    family: str = "sd15"
    before: Change = unchanged
    after: Change = unchanged
    sample: dict[str, Any] = field(default_factory=dict)
    v_prediction: bool = False


# As many as make one call with the negative prompt as large as a batch of two: they share its engine.
THREE_PROMPTS = [prompt for seed in (1, 3, 4) for prompt in tiny.conditioning(seed=seed)]

CASES = {
    "plain": Case(),
    "sd2 with v-prediction": Case("sd2", v_prediction=True),
    "sdxl": Case("sdxl"),
    "lora before": Case(before=with_lora),
    "lora after": Case(after=with_lora),
    "lora on both sides": Case(before=with_lora, after=lambda model: with_lora(model, 0.5, seed=6)),
    "merge before": Case(before=merged),
    "merge after": Case(after=merged),
    "easycache before": Case(before=easy_cache, sample={"steps": 6}),
    "easycache after": Case(after=easy_cache, sample={"steps": 6}),
    "fp8": Case(before=fp8),
    "cfg 1": Case(sample={"cfg": 1.0}),
    "batch of two": Case(sample={"batch": 2}),
    "long prompt": Case(sample={"positive": tiny.conditioning(seed=1, tokens=154)}),
    "several prompts": Case(sample={"positive": THREE_PROMPTS}),
    "area": Case(sample={"positive": tiny.conditioning(seed=1, area=(4, 8, 0, 0), strength=1.0)}),
    "mask": Case(sample={"positive": masked(1, 1.0) + THREE_PROMPTS[1:]}),
    "timestep range": Case(
        sample={"positive": tiny.conditioning(seed=1, end_percent=0.5) + tiny.conditioning(seed=3, start_percent=0.5)}
    ),
    "inpaint mask": Case(sample={"noise_mask": torch.ones(1, 1, 64, 64).tril()}),
    "img2img": Case(sample={"denoise": 0.5}),
    "stochastic sampler": Case(sample={"sampler": "euler_ancestral"}),
    "second-order sampler": Case(sample={"sampler": "heun"}),
    "multistep sampler": Case(sample={"sampler": "dpmpp_2m", "scheduler": "karras"}),
}


@pytest.fixture(scope="module")
def provider(engine_store: EngineStore) -> EngineProvider:
    return EngineProvider(engine_store)


def accelerated(provider: EngineProvider, patcher: Patcher) -> tuple[Patcher, AcceleratedModule]:
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE))
    return accelerate_model(patcher, module), module


SLOW = ("sd2 with v-prediction", "cfg 1", "long prompt", "area", "timestep range", "batch of two")
"""An engine of its own each; another case shows as much."""


@pytest.mark.parametrize("name", with_slow(CASES, *SLOW))
def test_picture_is_the_plain_one_and_the_engine_made_it(name: str, provider: EngineProvider) -> None:
    case = CASES[name]
    model = case.before(tiny.model(case.family, v_prediction=case.v_prediction))
    wanted = tiny.sample(case.after(model), case.family, **case.sample)
    fast, module = accelerated(provider, model)
    found = tiny.sample(case.after(fast), case.family, **case.sample)
    assert module.status.engine_calls > 0
    assert module.status.eager_calls == 0, module.status.to_json()["reasons"]
    assert wanted.std() > 0.1 and distance(found, wanted) < TOLERANCE


def test_engine_follows_a_lora_that_comes_changes_and_goes(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    plain = tiny.sample(model)
    pictures = []
    for strength in (None, 1.0, 0.25, None, 1.0):
        change = unchanged if strength is None else lambda patcher, s=strength: with_lora(patcher, s)
        wanted, found = tiny.sample(change(model)), tiny.sample(change(fast))
        assert distance(found, wanted) < TOLERANCE
        pictures.append(found)
    assert module.status.eager_calls == 0
    assert torch.equal(pictures[0], pictures[3]) and torch.equal(pictures[1], pictures[4])
    assert distance(pictures[1], plain) > 100 * TOLERANCE  # the LoRA does change the picture
    assert distance(pictures[2], pictures[1]) > 10 * TOLERANCE


def test_two_checkpoints_share_one_engine_and_both_pictures_are_right(provider: EngineProvider) -> None:
    first, second = tiny.model(seed=1), tiny.model(seed=2)
    fast_first, module_first = accelerated(provider, first)
    fast_second, module_second = accelerated(provider, second)
    for _ in range(2):  # alternating, as a workflow with two models does
        assert distance(tiny.sample(fast_first), tiny.sample(first)) < TOLERANCE
        assert distance(tiny.sample(fast_second), tiny.sample(second)) < TOLERANCE
    assert distance(tiny.sample(first), tiny.sample(second)) > 0.1
    one, other = module_first.status.last_engine, module_second.status.last_engine
    assert one is not None and other is not None and one.digest == other.digest
    assert module_first.status.eager_calls == module_second.status.eager_calls == 0


def test_lowvram_with_lora_uses_the_weights_that_comfyui_uses(provider: EngineProvider, monkeypatch: Any) -> None:
    model = tiny.model()
    wanted = tiny.sample(with_lora(model))
    fast, module = accelerated(provider, model)
    patched = with_lora(fast)
    load = type(patched).load

    def load_little(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["lowvram_model_memory"] = 4096
        kwargs["full_load"] = False
        return load(self, args[0] if args else kwargs.pop("device_to", None), **kwargs)

    comfy.model_management.unload_all_models()
    monkeypatch.setattr(type(patched), "load", load_little)
    found = tiny.sample(patched)
    casting = [layer for layer in model.model.diffusion_model.modules() if getattr(layer, "weight_function", None)]
    monkeypatch.undo()
    comfy.model_management.unload_all_models()
    assert casting, "the model was not loaded in low VRAM mode: the test proves nothing"
    assert module.status.engine_calls == 3 and module.status.eager_calls == 0
    assert distance(found, wanted) < TOLERANCE


def test_sampling_leaves_the_model_as_it_was(provider: EngineProvider) -> None:
    model = tiny.model()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    fast, _ = accelerated(provider, model)
    tiny.sample(with_lora(fast))
    comfy.model_management.unload_all_models()
    after = model.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not model.get_all_wrappers("outer_sample")
