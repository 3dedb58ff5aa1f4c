"""Block caches of Step Skip inside ComfyUI: what is computed, what comes of it, and that pictures keep apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP

from slipstream.core.spec import Optimize
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.blocks import block_classes, cached_blocks
from slipstream.hosts.comfy.models.model_classes import class_of
from slipstream.hosts.comfy.skip.skipping_sampler import SkippingSampler
from slipstream.hosts.comfy.skip.step_skip import skip_steps
from slipstream.nodes.shared.skip_inputs import preset_of
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.sampling.block_caching import DeepCache, FirstBlockCache
from slipstream.sampling.presets import CUSTOM, Preset
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.tensors import distance

STEPS = 8
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "sd3": {}, "flux": {"depth": 2, "depth_single_blocks": 3}, "wan": {"num_layers": 3}, "qwen": {"num_layers": 3},
    "pixart": {}, "lumina": {"n_layers": 3},
}  # fmt: skip
"""With what has each have more than one block."""
UNETS = ("sd15", "sdxl")


def caching(text: str, **chosen: Any) -> Preset:
    return preset_of(CUSTOM, share=1.0, block_cache=text, **chosen)


def model_of(family: str) -> Any:
    return tiny.model(family) if family in UNETS else tiny.transformer(family, **TRANSFORMERS[family])


def sampled(model: Any, family: str, seed: int = 1, **options: Any) -> torch.Tensor:
    """A picture with a prompt by `seed`."""
    # Lumina's tells how many tokens a prompt has; older ComfyUIs count them by its mask.
    mask = {"attention_mask": torch.ones(1, 77, dtype=torch.int64)} if family == "lumina" else {}
    prompts = {"positive": tiny.conditioning(family, seed, **mask), "negative": tiny.conditioning(family, 2, **mask)}
    return tiny.sample(model, family, **{"steps": STEPS, "cfg": 2.0, **prompts, **options})


class Cached:
    """A model with a block cache, and what its runs said of it."""

    def __init__(self, model: Any, text: str, **chosen: Any) -> None:
        self.said: list[str] = []
        self.patcher = skip_steps(model, caching(text, **chosen), lambda skipped: self.said.append(skipped.caching))

    @property
    def reused(self) -> int:
        """Calls of the model in the last run."""
        match = re.search(r": (\d+) of \d+ calls of the model reused blocks", self.said[-1])
        assert match is not None
        return int(match[1])


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each block of a transformer, or layer of a UNet, was computed, by its id."""
    found: Counter[int] = Counter()
    places = [row.place for row in block_classes.BLOCK_CLASSES if not row.module.startswith("comfy.taesd")]
    places.append(("comfy.ldm.modules.diffusionmodules.openaimodel", "Upsample"))
    for module, name in places:
        if (kind := getattr(__import__(module, fromlist=[name]), name, None)) is None:
            continue  # older ComfyUIs lack it

        def count(self: Any, *args: Any, _plain: Any = kind.forward, **kwargs: Any) -> Any:
            found[id(self)] += 1
            return _plain(self, *args, **kwargs)

        count.__wrapped__ = kind.forward  # type: ignore[attr-defined]  # its signature is asked for
        monkeypatch.setattr(kind, "forward", count)
    return found


def unchanged_by(caching: str, family: str) -> tuple[Any, torch.Tensor]:
    """A model, and what it samples, which a cache that may reuse nothing leaves as it is."""
    model = model_of(family)
    plain = sampled(model, family)
    untouched = Cached(model, caching)
    assert torch.equal(sampled(untouched.patcher, family), plain) and untouched.reused == 0
    return model, plain


# ---- what is computed, and what comes of it


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_of_a_transformer_the_first_block_alone_is_computed(family: str, computed: Counter[int]) -> None:
    model, plain = unchanged_by("block cache 0", family)
    cached = Cached(model, "block cache 1")
    computed.clear()
    found = sampled(cached.patcher, family)
    network = model.model.diffusion_model
    row = class_of(network)
    assert row is not None
    first, *others = (id(block) for stack in row.stacks for block in getattr(network, stack.name))
    assert 3 <= cached.reused <= 4  # of steps 2 to 6: no more than three in a row
    assert computed[first] == STEPS and {computed[block] for block in others} == {STEPS - cached.reused}
    assert 0 < distance(found, plain) < 0.3
    assert not any("forward" in vars(layer) for layer in network.modules())


def test_a_transformers_error_grows_with_the_threshold() -> None:
    model = model_of("lumina")
    plain = sampled(model, "lumina", steps=12)
    cases = [Cached(model, f"block cache {threshold}") for threshold in (0.02, 0.05, 0.1)]
    errors = [distance(sampled(cached.patcher, "lumina", steps=12), plain) for cached in cases]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.1
    assert 0 < cases[0].reused < cases[1].reused


@pytest.mark.parametrize("family", UNETS)
def test_of_a_unet_the_deep_part_is_computed_on_a_cadence(family: str, computed: Counter[int]) -> None:
    model, plain = unchanged_by("deep cache 1", family)
    cached = Cached(model, "deep cache 3")
    computed.clear()
    found = sampled(cached.patcher, family)
    network = model.model.diffusion_model
    assert cached.reused == 4  # steps 2 and 3, 5 and 6; the first two and the last are computed
    assert computed[id(network.input_blocks[1][0])] == computed[id(network.output_blocks[-1][0])] == STEPS
    deep = [network.input_blocks[-1][0], network.middle_block[0], network.output_blocks[0][0]]
    assert {computed[id(layer)] for layer in deep} == {STEPS - 4}
    upsamplers = [layer for layer in network.modules() if type(layer).__name__ == "Upsample"]
    assert {computed[id(layer)] for layer in upsamplers} == {STEPS - 4}
    more = Cached(model, "deep cache 6")
    assert 0 < distance(found, plain) < distance(sampled(more.patcher, family), plain) < 0.1
    assert not any("forward" in vars(layer) for layer in network.modules())


def test_steps_are_skipped_around_it() -> None:
    model = model_of("sd15")
    cached = Cached(model, "deep cache 2", step_list="0 2 3 4 5 7")
    sampled(cached.patcher, "sd15")
    assert cached.said == ["deep cache 2: 2 of 6 calls of the model reused blocks"]


def test_step_skip_sampler_does_it_too() -> None:
    model, said = model_of("sd15"), list[str]()
    sampler = SkippingSampler(
        comfy.samplers.sampler_object("euler"), caching("deep cache 3"), lambda skipped: said.append(skipped.caching)
    )
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "normal", STEPS)
    prompts = tiny.conditioning("sd15", 1), tiny.conditioning("sd15", 2)
    latent = tiny.latent()["samples"]
    noise = comfy.sample.prepare_noise(latent, 7)
    found = comfy.sample.sample_custom(model, noise, 2.0, sampler, sigmas, *prompts, latent, seed=7)
    assert said == ["deep cache 3: 4 of 8 calls of the model reused blocks"]
    assert torch.equal(found, sampled(Cached(model, "deep cache 3").patcher, "sd15"))


def test_other_samplers_of_one_call_a_step_reuse_and_the_rest_do_not() -> None:
    cached = Cached(model_of("sd15"), "deep cache 2")
    sampled(cached.patcher, "sd15", sampler="dpmpp_2m")
    assert cached.reused == 3
    sampled(cached.patcher, "sd15", sampler="heun")
    assert cached.said[-1] == ""


# ---- that pictures and prompts keep apart


@pytest.mark.parametrize(("family", "text"), [("sd15", "deep cache 3"), ("flux", "block cache 1")])
def test_nothing_of_a_picture_is_left_for_the_next(family: str, text: str) -> None:
    model = model_of(family)
    cached = Cached(model, text)
    cases: list[dict[str, Any]] = [{}, {"seed": 5}, {"size": 2 * tiny.size_of(family)}, {"batch": 2}, {}]
    alone = [sampled(Cached(model, text).patcher, family, **case) for case in cases]
    for case, found in zip(cases, alone, strict=True):
        assert torch.equal(sampled(cached.patcher, family, **case), found), case
    name, weight = next((n, w) for n, w in model.model.named_parameters() if n.endswith("weight") and w.ndim == 2)
    changed = cached.patcher.clone()
    changed.add_patches({name: ("diff", (torch.full_like(weight, 0.05),))})
    assert not torch.equal(sampled(changed, family), alone[0])
    assert torch.equal(sampled(cached.patcher, family), alone[0])


@pytest.mark.parametrize(("family", "text"), [("sd15", "deep cache 3"), ("pixart", "block cache 1")])
def test_prompts_that_are_called_apart_have_each_their_own(
    family: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Cached(model_of(family), text)
    together = sampled(cached.patcher, family)
    assert cached.reused == 4
    monkeypatch.setattr(comfy.samplers, "can_concat_cond", lambda one, other: one is other)
    apart = sampled(cached.patcher, family)
    assert cached.reused == 8
    assert distance(apart, together) < 1e-4


def test_a_prompt_that_begins_has_its_step_computed() -> None:
    model = model_of("sd15")
    early = tiny.conditioning("sd15", 1, start_percent=0.0, end_percent=0.5)
    late = tiny.conditioning("sd15", 3, start_percent=0.5, end_percent=1.0)
    cached = Cached(model, "deep cache 6")
    sampled(cached.patcher, "sd15")
    assert cached.reused == 5
    sampled(cached.patcher, "sd15", positive=early + late)
    assert cached.reused == 4  # in whose first step nothing is reused


def test_a_noise_level_that_rises_is_computed() -> None:
    @torch.no_grad()
    def restart(model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any, **_: Any) -> torch.Tensor:
        for step in (0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7):
            x = x + 0.1 * (model(x, sigmas[step] * x.new_ones(len(x)), **extra_args) - x)
        return x

    cached = Cached(model_of("sd15"), "deep cache 10")
    model, latent = cached.patcher, tiny.latent()["samples"]
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "normal", STEPS)
    prompts = tiny.conditioning("sd15", 1), tiny.conditioning("sd15", 2)
    comfy.sample.sample_custom(
        model, latent + 1, 2.0, comfy.samplers.KSAMPLER(restart), sigmas, *prompts, latent, seed=7
    )
    assert cached.said == ["deep cache 10: 7 of 11 calls of the model reused blocks"]


# ---- when nothing is reused


def with_controlnet(model: Any) -> tuple[Any, dict[str, Any]]:
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    control = tiny.controlnet().copy().set_cond_hint(hint, 1.0)
    return model, {"positive": tiny.conditioning("sd15", 1, control=control, control_apply_to_uncond=True)}


def with_patch(model: Any) -> tuple[Any, dict[str, Any]]:
    clone = model.clone()
    clone.set_model_output_block_patch(lambda h, skip, options: (1.1 * h, 0.9 * skip))
    return clone, {}


def with_replacement(model: Any) -> tuple[Any, dict[str, Any]]:
    clone = model.clone()
    clone.set_model_attn1_replace(lambda q, k, v, options: v, "middle", 0)
    return clone, {}


def with_unknown_option(model: Any) -> tuple[Any, dict[str, Any]]:
    clone = model.clone()
    clone.model_options["transformer_options"]["mystery"] = 1
    return clone, {}


def with_replaced_layer(model: Any) -> tuple[Any, dict[str, Any]]:
    clone = model.clone()
    clone.add_object_patch("diffusion_model.middle_block.0", model.model.diffusion_model.middle_block[0])
    return clone, {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_controlnet, "a ControlNet takes part"),
        (with_patch, "another node patches the model (output_block_patch)"),
        (with_replacement, "another node replaces parts of the model (attn1), as IP-Adapter and PAG do"),
        (with_unknown_option, "the model is told 'mystery', which may change what its blocks give"),
        (with_replaced_layer, "another node replaces diffusion_model.middle_block.0 of the model"),
    ],
)
def test_calls_that_others_reach_into_are_computed_whole(change: Any, reason: str) -> None:
    model, options = change(model_of("sd15"))
    plain = sampled(model, "sd15", **options)
    cached = Cached(model, "deep cache 3")
    assert torch.equal(sampled(cached.patcher, "sd15", **options), plain)
    calls = f"deep cache 3: 0 of {STEPS} calls of the model reused blocks"
    assert cached.said == [f"{calls}; computed whole: {reason} ({STEPS})"]


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    [
        ("sd15", "block cache 0.1", "block cache 0.1 is not for a UNet; write deep cache 3"),
        ("pixart", "deep cache 3", "deep cache 3 is not for a transformer; write block cache 0.08"),
    ],
)
def test_the_wrong_cache_for_a_model_says_which_is_right(family: str, text: str, reason: str) -> None:
    model = model_of(family)
    cached = Cached(model, text)
    assert torch.equal(sampled(cached.patcher, family), sampled(model, family))
    assert reason in cached.said[0]


def test_what_others_compute_between_blocks_is_not_left_out() -> None:
    model = model_of("pixart")
    block = model.model.diffusion_model.blocks[0]
    with block.register_forward_hook(lambda module, args, result: result + 0.1):
        plain = sampled(model, "pixart")
        cached = Cached(model, "block cache 1")
        assert torch.equal(sampled(cached.patcher, "pixart"), plain)
    assert "computed whole: another extension computes the model's blocks in a way of its own (8)" in cached.said[0]


def test_blocks_of_an_unknown_form_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("flux")
    block = model.model.diffusion_model.double_blocks[1]
    plain = block.forward
    monkeypatch.setitem(vars(block), "forward", lambda **given: iter(plain(**given)))
    cached = Cached(model, "block cache 1")
    assert torch.equal(sampled(cached.patcher, "flux"), sampled(model, "flux"))
    assert "computed whole: another extension computes the model's blocks in a way of its own (8)" in cached.said[0]


def test_memory_that_does_not_suffice_ends_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(streams: Any) -> Any:
        raise torch.OutOfMemoryError("as a test wants it")

    model = model_of("pixart")
    monkeypatch.setattr(cached_blocks, "_copies", copies)
    cached = Cached(model, "block cache 1")
    assert torch.equal(sampled(cached.patcher, "pixart"), sampled(model, "pixart"))
    assert "computed whole: memory does not suffice for what would be reused (8)" in cached.said[0]


def test_another_attention_function_is_no_reason() -> None:
    model = model_of("pixart").clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda function, *args, **kwargs: (
        function(*args, **kwargs)
    )
    cached = Cached(model, "block cache 1")
    sampled(cached.patcher, "pixart")
    assert cached.reused == 4


# ---- beside engines


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_block_provider(EngineStore(tmp_path_factory.mktemp("cached"))) as made:
        yield made


@pytest.mark.parametrize("is_outside", [True, False], ids=["cache outside", "cache inside"])
@pytest.mark.parametrize(
    ("family", "text", "whole", "reusing"),
    [
        pytest.param("flux", "block cache 1", 5, 1, marks=pytest.mark.slow),
        ("pixart", "block cache 1", 2, 1),
        pytest.param("sd15", "deep cache 3", 11, 5, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_are_computed_are_on_engines(
    family: str, text: str, whole: int, reusing: int, is_outside: bool, provider: EngineProvider
) -> None:
    model = model_of(family)
    wanted = sampled(Cached(model, text).patcher, family)
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE, optimize=Optimize.BLOCKS))
    if is_outside:
        cached = Cached(accelerate_model(model, module), text)
    else:
        cached = Cached(model, text)
        cached.patcher = accelerate_model(cached.patcher, module)
    sampled(cached.patcher, family)  # which builds and compares engines
    calls, backend = Counter[int](), provider.blocks.backend
    noted = cached.patcher.clone()

    def note(executor: Any, *args: Any, **kwargs: Any) -> Any:
        before = backend.calls
        result = executor(*args, **kwargs)
        calls[backend.calls - before] += 1
        return result

    noted.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "noted", note)
    blocks_before = module.status.block_calls
    assert distance(sampled(noted, family), wanted) < 1e-5
    assert cached.reused == 4 and module.status.block_calls - blocks_before == STEPS
    assert calls == {whole: 4, reusing: 4}
    assert "computed block by block" in module.status.to_json()["now"]


def test_an_engine_of_the_whole_model_gives_way_to_it(tmp_path: Any) -> None:
    model = model_of("sd15")
    with quick_provider(EngineStore(tmp_path)) as made:
        module = AcceleratedModule(made, Settings(policy=BuildPolicy.FIRST_USE))
        fast = accelerate_model(model, module)
        sampled(fast, "sd15")
        assert module.status.engine_calls == STEPS
        cached = Cached(fast, "deep cache 3")
        assert torch.equal(sampled(cached.patcher, "sd15"), sampled(Cached(model, "deep cache 3").patcher, "sd15"))
        assert cached.reused == 4 and module.status.engine_calls == STEPS
        reason = "Step Skip's block cache has the model computed block by block"
        assert module.status.to_json()["reasons"] == {reason: STEPS}


def test_what_is_chosen_on_the_node() -> None:
    assert preset_of(CUSTOM).caching is None
    assert preset_of(CUSTOM, block_cache="block cache 0.08").caching == FirstBlockCache(0.08)
    assert preset_of(CUSTOM, block_cache="deep cache 3").caching == DeepCache(3)
    with pytest.raises(ValueError, match="'quick' is no block cache. Write block cache and a threshold"):
        preset_of(CUSTOM, block_cache="quick")
