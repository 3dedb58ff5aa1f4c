"""Attentions that are called out of a block's engine as a whole: functions before them may change their tokens."""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable
from typing import Any

import comfy.ops
import pytest
import torch
from comfy.ldm.modules.attention import BasicTransformerBlock

from slipstream.hosts.comfy.blocks.block_classes import block_class_of
from slipstream.hosts.comfy.blocks.computed_outside import outside_of
from slipstream.hosts.comfy.blocks.led_network import LedNetwork
from slipstream.hosts.comfy.run import asked_once
from slipstream.runtime.provider import EngineProvider
from slipstream.tests.comfyui.blocks.test_block_calls import accelerated, share_of
from slipstream.tests.comfyui.blocks.test_graphed_network import graphs  # noqa: F401
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

STEPS = 9
EVERYWHERE = [("input", 1), ("input", 2), ("middle", 0), ("output", 3), ("output", 4), ("output", 5)]

Patching = Callable[[Any, list[Any]], None]
"""Given a clone of a model, and a list for what functions note."""


@pytest.fixture(params=["by engines", "by graphs"])
def provider(request: pytest.FixtureRequest, shared_provider: EngineProvider) -> EngineProvider:
    if request.param == "by graphs":
        request.getfixturevalue("graphs")
    return shared_provider


def assert_same(provider: EngineProvider, patch: Patching) -> None:
    """Pictures, and what functions note, are as ComfyUI has them."""
    model = tiny.model(depth=2)
    fast, module = accelerated(provider, model)

    def sampled(patcher: Any) -> tuple[torch.Tensor, list[Any]]:
        noted: list[Any] = []
        clone = patcher.clone()
        patch(clone, noted)
        torch.manual_seed(5)
        return tiny.sample(clone, steps=STEPS), noted

    wanted, there = sampled(model)
    assert distance(wanted, tiny.sample(model, steps=STEPS)) > 1e-3
    for _ in range(2):
        found, here = sampled(fast)
        assert distance(found, wanted) < 1e-5 and here == there
    assert share_of(module)[0] > 0


@pytest.mark.parametrize("layer", ["attn1", "attn2"])
def test_functions_before_a_replaced_attention_may_give_none(layer: str, provider: EngineProvider) -> None:
    def patch(clone: Any, noted: list[Any]) -> None:
        none = {"attn1": lambda n, k, v, extra: (0.5 * n, None, None), "attn2": lambda n, k, v, extra: (n, k, None)}
        clone.set_model_patch(none[layer], f"{layer}_patch")
        for place in EVERYWHERE:
            clone.set_model_patch_replace(lambda q, k, v, extra: q + v.mean(1, keepdim=True), layer, *place)

    assert_same(provider, patch)


def test_functions_of_a_block_tell_one_another_by_its_options(provider: EngineProvider) -> None:
    def patch(clone: Any, noted: list[Any]) -> None:
        def before(n: torch.Tensor, k: Any, v: Any, extra: dict[str, Any]) -> Any:
            extra["mine"] = len(noted)
            return 0.9 * n, k, v

        def later(n: torch.Tensor, k: Any, v: Any, extra: dict[str, Any]) -> Any:
            noted.append(extra.get("mine"))
            return n, k, v

        clone.set_model_attn1_patch(before)
        clone.set_model_attn1_output_patch(lambda n, extra: n if extra["mine"] == len(noted) else 0 * n)
        clone.set_model_attn2_patch(later)

    assert_same(provider, patch)


@pytest.mark.parametrize("block_index", [0, 1])
def test_what_functions_gave_before_an_engine_failed_stands(block_index: int, provider: EngineProvider) -> None:
    """Late in each picture a result has another shape, with which a block goes on, and an engine does not."""

    def patch(clone: Any, noted: list[Any]) -> None:
        noise = torch.Generator().manual_seed(2)

        def before(n: torch.Tensor, k: Any, v: Any, extra: dict[str, Any]) -> Any:
            noted.append((extra["block"], extra["block_index"]))
            return n + 0.05 * torch.randn(n.shape, generator=noise), k, v

        def behind(n: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            noted.append("behind")
            is_odd = len(noted) > 80 and (extra["block"], extra["block_index"]) == (("middle", 0), block_index)
            return n[:, :1] if is_odd else n

        clone.set_model_attn1_patch(before)
        clone.set_model_attn1_output_patch(behind)

    assert_same(provider, patch)


@pytest.mark.parametrize("change", [0.0, 0.1])
def test_functions_in_each_block_ask_for_the_sigma_and_the_host_waits_once_a_call(
    change: float, provider: EngineProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that writes to it, which none should, is answered as ComfyUI has it."""
    made: list[_Asked] = []
    monkeypatch.setattr(asked_once, "is_waited_for", lambda device: True)
    monkeypatch.setattr(asked_once, "_Numbers", lambda tensor: made.append(_Asked(tensor)) or made[-1])

    def patch(clone: Any, noted: list[Any]) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            noted.append(extra["sigmas"].detach().cpu()[0].item())
            if change:
                extra["sigmas"].add_(change)
            return q + v.mean(1, keepdim=True) if extra["sigmas"][0] > 2 else 0.5 * q

        for place in EVERYWHERE:
            clone.set_model_patch_replace(attend, "attn2", *place)

    assert_same(provider, patch)
    assert len(made) == 2 * STEPS
    # In the first picture engines are compared; behind a write the tensor itself is asked.
    assert all(each.times == 1 for each in made[STEPS:])


class _Asked(asked_once._Numbers):
    times = 0

    @functools.cached_property
    def found(self) -> torch.Tensor:
        self.times += 1
        return super().found


def test_tiles_of_all_sizes_share_their_engines(shared_provider: EngineProvider) -> None:
    node = importlib.import_module("comfy_extras.nodes_hypertile").HyperTile
    tile = getattr(node, "execute", None) or node().patch  # older ComfyUIs
    model = tiny.model()
    fast, module = accelerated(shared_provider, model)
    built = [len(shared_provider.store.digests())]
    for size in (96, 128, 192):
        for _ in range(2):
            torch.manual_seed(3)
            wanted = tiny.sample(tile(model, 32, 4, 1, False)[0], steps=STEPS, size=size)
            torch.manual_seed(3)
            found = tiny.sample(tile(fast, 32, 4, 1, False)[0], steps=STEPS, size=size)
            assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, tiny.sample(model, steps=STEPS, size=size))
        built.append(len(shared_provider.store.digests()))
    assert share_of(module)[0] == share_of(module)[1]
    assert built[-1] <= built[1] + 1, "engines of the first size serve in others, but where sizes are equal by chance"


def test_an_engine_takes_no_weights_of_what_is_called_out(shared_provider: EngineProvider) -> None:
    fast, _ = accelerated(shared_provider, tiny.model())
    clone = fast.clone()
    clone.set_model_attn1_patch(lambda n, k, v, extra: (0.5 * n, k, v))
    tiny.sample(clone, steps=STEPS)
    led = [each for each in gc.get_objects() if isinstance(each, LedNetwork)]
    around = {
        offer.engine
        for network in led
        for block in network.blocks
        for (form, *_), offer in block.offers.items()
        if "whole:attn1" in str(form) and offer.engine is not None
    }
    names = {name for engine in around for name, *_ in engine.weights}
    assert around and not any("attn1." in name for name in names) and any("attn2." in name for name in names)


def test_a_layer_that_is_none_is_not_called_out() -> None:
    operations = comfy.ops.disable_weight_init
    block = BasicTransformerBlock(8, 2, 4, disable_temporal_crossattention=True, operations=operations)
    kind = block_class_of(block)
    assert kind is not None
    options = {"patches": {f"{name}_patch": [print] for name in kind.wholes}}
    outside = outside_of(block, kind, options, {}, kind.names_outside)
    assert outside is not None and outside.places == ("whole:attn1",)


def test_a_scripted_layer_in_the_place_of_a_group_is_left_alone(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, _ = accelerated(provider, model)
    tiny.sample(fast, steps=STEPS)
    model.model.diffusion_model.input_blocks[1][1] = torch.jit.script(torch.nn.Sequential(torch.nn.Identity()))
    assert distance(tiny.sample(fast, steps=STEPS), tiny.sample(model, steps=STEPS)) < 1e-5
