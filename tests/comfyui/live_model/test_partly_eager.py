"""Of a picture that another node has a part in, only the calls that it changes go to the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.tensors import distance

STEPS = 20


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    with quick_provider(EngineStore(tmp_path_factory.mktemp("quick"))) as made:
        yield made


def accelerated(provider: EngineProvider, patcher: Any) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE))
    return accelerate_model(patcher, module), module


def deep_shrink(patcher: Any, after_skip: bool, end: float = 0.35) -> Any:
    from comfy_extras.nodes_model_downscale import PatchModelAddDownscale

    return PatchModelAddDownscale.execute(patcher, 2, 2.0, 0.0, end, after_skip, "bicubic", "bicubic")[0]


@pytest.mark.parametrize("after_skip", [True, False])
def test_deep_shrink_leaves_most_steps_to_the_engine(after_skip: bool, provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    found = tiny.sample(deep_shrink(fast, after_skip), steps=STEPS, size=128)
    wanted = tiny.sample(deep_shrink(model, after_skip), steps=STEPS, size=128)
    assert distance(found, wanted) < 1e-5
    assert distance(wanted, tiny.sample(model, steps=STEPS, size=128)) > 1e-2
    assert module.status.engine_calls + module.status.eager_calls == STEPS
    assert 0.6 * STEPS <= module.status.engine_calls <= 0.7 * STEPS, module.status.to_json()["reasons"]
    assert "input_block_patch" in "".join(module.status.to_json()["reasons"])


def test_deep_shrink_beside_another_patch_runs_plain(provider: EngineProvider) -> None:
    fast, module = accelerated(provider, tiny.model())
    both = deep_shrink(fast, True)
    both.set_model_attn1_patch(lambda q, k, v, options: (0.5 * q, k, v))
    tiny.sample(both, steps=4, size=128)
    assert (module.status.engine_calls, module.status.eager_calls) == (0, 4)


def test_perturbed_attention_leaves_the_unperturbed_half_to_the_engine(provider: EngineProvider) -> None:
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    def perturbed(patcher: Any) -> Any:
        return PerturbedAttentionGuidance.execute(patcher, 3.0)[0]

    model = tiny.model()
    fast, module = accelerated(provider, model)
    found, wanted = tiny.sample(perturbed(fast), steps=6), tiny.sample(perturbed(model), steps=6)
    assert distance(found, wanted) < 1e-5 < 1e-2 < distance(wanted, tiny.sample(model, steps=6))
    assert (module.status.engine_calls, module.status.eager_calls) == (6, 6)


def test_a_node_that_walks_the_blocks_itself_is_told(provider: EngineProvider) -> None:
    """As DeepCache does it."""

    def walking(patcher: Any) -> Any:
        clone = patcher.clone()

        def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
            base, options = clone.model, given["c"]["transformer_options"]
            options = {name: value for name, value in options.items() if name != "wrappers"}
            x = base.model_sampling.calculate_input(given["timestep"], given["input"])
            times = base.model_sampling.timestep(given["timestep"]).float()
            unet = base.diffusion_model
            result = unet._forward(x, times, given["c"]["c_crossattn"], transformer_options=options)
            denoised: torch.Tensor = base.model_sampling.calculate_denoised(given["timestep"], result, given["input"])
            return denoised

        clone.set_model_unet_function_wrapper(wrapper)
        return clone

    model = tiny.model()
    fast, module = accelerated(provider, model)
    assert torch.equal(tiny.sample(walking(fast)), tiny.sample(walking(model)))
    assert module.status.engine_calls == 0
    assert "another node computes the model's parts itself" in module.status.to_json()["now"]
