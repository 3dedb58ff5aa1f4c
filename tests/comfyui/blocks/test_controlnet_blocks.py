"""ControlNets of transformers, whose blocks alone run on engines: pictures stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.model_management
import pytest
import torch

from slipstream.core.spec import Optimize, Quantised, Role
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.block_calls.block_calls import BlockCalls
from slipstream.hosts.comfy.block_calls.run_weights import RunWeights
from slipstream.hosts.comfy.blocks import computed_outside
from slipstream.hosts.comfy.models.controlnet import ComfyControlNet
from slipstream.hosts.comfy.run import controlnet_calls
from slipstream.hosts.comfy.run.controlnet_calls import BLOCKS_ALONE, NOT_CHOSEN
from slipstream.hosts.comfy.run.model_calls import ModelCalls
from slipstream.runtime.building.job_file import as_plain, from_plain
from slipstream.runtime.checking.step_timers import is_on_purpose
from slipstream.runtime.checking.step_times import StepTimes
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BLOCKS_VARIABLE, BackendChoice, BuildPolicy, Settings
from slipstream.tests.comfyui.blocks.host_graphs import HostGraphs, host_graphs
from slipstream.tests.comfyui.blocks.quick_blocks import quick_block_provider
from slipstream.tests.comfyui.blocks.test_block_calls import accelerated as accelerated_model
from slipstream.tests.comfyui.support import staging
from slipstream.tests.comfyui.support.models import tiny, tiny_controlnets
from slipstream.tests.comfyui.support.models.tiny_controlnets import KINDS, applied, prompts
from slipstream.tests.fakes import FakeClock
from slipstream.tests.tensors import distance

FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)
STEPS = 5
"""Of which the first asks for engines where there are none, and the next one compares them."""
Control = Any
Load = Callable[[str], Control]


@pytest.fixture
def provider(shared_provider: EngineProvider) -> EngineProvider:
    return shared_provider


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """As Load ControlNet Model does."""
    return lambda name: tiny_controlnets.controlnet(name, tmp_path, monkeypatch)


def accelerated(
    provider: EngineProvider, control: Control, settings: Settings = FIRST_USE
) -> tuple[Control, AcceleratedModule]:
    module = AcceleratedModule(provider, settings)
    return accelerate_controlnet(control, module), module


def sampled(model: Any, control: Control, name: str, **options: Any) -> torch.Tensor:
    options = {"steps": STEPS, "cfg": 2.0, **options}
    return tiny.sample(model, KINDS[name].family, **prompts(control, name), **options)


def share_of(module: AcceleratedModule) -> tuple[int, int]:
    """Calls of blocks that engines computed in the last call of the network, and all of them."""
    words = module.status.standing.blocks.split()
    return int(words[0]), int(words[2])


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_is_the_plain_one_and_engines_of_blocks_made_it(
    name: str, provider: EngineProvider, load: Load
) -> None:
    model, control = tiny_controlnets.model(name), load(name)
    fast, module = accelerated(provider, control)
    found, wanted = sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name)
    assert distance(found, wanted) < 1e-5 < 1e-3 < distance(wanted, sampled(model, None, name))
    assert module.status.block_calls >= STEPS - 2, module.status.to_json()
    assert module.status.block_calls + module.status.eager_calls == STEPS
    blocks = 3 if KINDS[name].family == "flux" else 2
    assert share_of(module) == (blocks, blocks), module.status.to_json()
    assert all(reason.startswith(BLOCKS_ALONE) for reason in module.status.to_json()["reasons"])
    assert not [layer for layer in control.control_model.modules() if "forward" in vars(layer)]


@pytest.mark.parametrize("name", KINDS)
def test_its_whole_call_is_one_graph_and_the_models_another(name: str, provider: EngineProvider, load: Load) -> None:
    """But for a Union, which makes a tensor of its types in each call."""
    model, control = tiny_controlnets.model(name), load(name)
    steps, are_graphs = 9, not KINDS[name].types
    wanted = [sampled(model, applied(control, name, seed=seed), name, steps=steps) for seed in (3, 4)]
    assert distance(*wanted) > 1e-4
    with host_graphs(provider) as graphs:
        (fast_model, _), (fast, module) = accelerated_model(provider, model), accelerated(provider, control)
        for seed in (3, 4):
            before = graphs.replays
            found = sampled(fast_model, applied(fast, name, seed=seed), name, steps=steps)
            assert distance(found, wanted[seed - 3]) < 1e-5
        assert graphs.captures == 1 + are_graphs and graphs.replays - before == steps * (1 + are_graphs)
        assert module.status.block_calls >= 2 * steps - 2, module.status.to_json()


def test_a_residual_that_several_blocks_take_is_one_in_a_graph(provider: EngineProvider, load: Load) -> None:
    """Of three blocks' residuals ComfyUI makes lists of 19 and 38, and scales each once."""
    name = "flux instantx"
    model, control = tiny_controlnets.model(name), load(name)
    named: list[str] = []
    with host_graphs(provider) as graphs, pytest.MonkeyPatch.context() as patch:
        run = graphs.run

        def noted(compute: Any, generation: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            found = run(compute, generation, tensors, *args, **kwargs)
            named.extend(names for names in (*tensors, *found) if "put_" in names)
            return found

        patch.setattr(graphs, "run", noted)
        (fast_model, _), (fast, _) = accelerated_model(provider, model), accelerated(provider, control)
        found = sampled(fast_model, applied(fast, name, 0.6), name, steps=9)
        assert distance(found, sampled(model, applied(control, name, 0.6), name, steps=9)) < 1e-5
    given = {names for names in named if names.startswith("control_")}
    for residuals in given, {*named} - given:
        assert len(residuals) == 3 and sum(len(names.split()) for names in residuals) == 19 + 38, residuals


def test_a_union_behind_a_node_that_sets_no_type_has_a_graph(provider: EngineProvider, load: Load) -> None:
    """As Set Union ControlNet Type has it, set to auto."""
    name = "flux union"
    model, control = tiny_controlnets.model(name), load(name)
    control.set_extra_arg("control_type", [])
    fast, module = accelerated(provider, control)
    with host_graphs(provider) as graphs:
        found, wanted = (sampled(model, applied(each, name), name, steps=9) for each in (fast, control))
    assert distance(found, wanted) < 1e-5 and graphs.captures == 1, module.status.to_json()


def test_a_chain_of_which_one_ends_early_is_replayed(provider: EngineProvider, load: Load) -> None:
    """Sums of two are no residuals that blocks share; those of the one that is left are."""
    name = "flux xlabs"
    model, control = tiny_controlnets.model(name), load(name)

    def chained(network: Control) -> Control:
        first, second = applied(network, name, 0.6, (0.0, 0.5)), applied(network, name, 0.8, seed=4)
        return second.set_previous_controlnet(first)

    with host_graphs(provider) as graphs:
        (fast_model, _), (fast, _) = accelerated_model(provider, model), accelerated(provider, control)
        wanted = sampled(model, chained(control), name, steps=20)
        for _ in range(2):
            before, captures = graphs.replays, graphs.captures
            assert distance(sampled(fast_model, chained(fast), name, steps=20), wanted) < 1e-5
    assert graphs.captures == captures == 3, "one of the ControlNet's, and the model's with a sum and without"
    assert graphs.replays - before == 20 + 20 + 10


def without_its_comparison(graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.factor = 1.5


def with_attention_that_rounds(graphs: HostGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed_outside, "_EXACT", frozenset())


@pytest.mark.parametrize("case", [without_its_comparison, with_attention_that_rounds])
def test_where_the_whole_call_has_no_graph_its_blocks_have(
    case: Callable[..., None], load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sd3"
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider, host_graphs(provider) as graphs:
        case(graphs, monkeypatch)
        (fast_model, _), (fast, _) = accelerated_model(provider, model), accelerated(provider, control)
        of_model = (fast_model, None), (model, None)
        of_control = (model, applied(fast, name)), (model, applied(control, name))
        for ours, plain in (of_model, of_control):
            before = graphs.parts.replays
            assert distance(sampled(*ours, name, steps=14), sampled(*plain, name, steps=14)) < 1e-5
            assert graphs.parts.replays >= before + 10


@pytest.mark.parametrize("name", KINDS)
def test_its_architecture_is_the_same_in_the_build_process(name: str, load: Load) -> None:
    network = load(name).control_model
    architecture = ComfyControlNet.of(network)
    again = from_plain(json.loads(json.dumps(as_plain(architecture))))
    assert again.fingerprint == architecture.fingerprint
    assert {key: tensor.shape for key, tensor in network.state_dict().items()} == dict(again.weight_shapes)


def test_all_that_apply_controlnet_offers_works_as_ever(provider: EngineProvider, load: Load) -> None:
    """Strength counts once for a residual that several blocks of the model take."""
    name = "flux instantx"
    model, control = tiny.transformer("flux", depth=3, depth_single_blocks=2), load(name)
    fast, module = accelerated(provider, control)

    def chained(network: Control) -> Control:
        first, second = applied(network, name, 0.6, (0.0, 0.5)), applied(network, name, 0.8)
        return second.set_previous_controlnet(first)

    for options in ({}, {"batch": 2}, {"size": 96}, {"cfg": 1.0}):
        before = module.status.block_calls
        found, wanted = (sampled(model, chained(each), name, **options) for each in (fast, control))
        assert distance(found, wanted) < 1e-5
        assert module.status.block_calls >= before + STEPS - 2, options


def test_model_and_controlnet_share_engines(tmp_path: Path, load: Load) -> None:
    name = "flux xlabs"
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        fast_model, of_model = accelerated_model(provider, model)
        sampled(fast_model, None, name)
        known = set(provider.store.digests())
        fast, of_control = accelerated(provider, control)
        found, wanted = sampled(fast_model, applied(fast, name), name), sampled(model, applied(control, name), name)
        assert distance(found, wanted) < 1e-5
        assert of_model.status.block_calls and of_control.status.block_calls >= STEPS - 2
        assert known and set(provider.store.digests()) == known


def test_a_block_that_another_extension_changed_runs_as_it_is(provider: EngineProvider, load: Load) -> None:
    name = "sd35"
    model, control = tiny_controlnets.model(name), load(name)
    before = sampled(model, applied(control, name), name)
    block = control.control_model.transformer_blocks[0]
    forward = type(block).forward
    block.forward = lambda x, c: 0.5 * forward(block, x, c)
    fast, module = accelerated(provider, control)
    found, wanted = sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name)
    assert distance(found, wanted) < 1e-5 < 1e-4 < distance(before, wanted)
    assert share_of(module) == (1, 2), module.status.to_json()


@pytest.mark.parametrize("name", ["sd3", "sd35"])
def test_attention_that_rounds_is_computed_by_comfyui_itself(
    name: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --use-sage-attention; SD3.5's blocks hand no options on to it."""
    monkeypatch.setattr(computed_outside, "_EXACT", frozenset())
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        fast, module = accelerated(provider, control)
        found, wanted = sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name)
        assert distance(found, wanted) < 1e-5
        assert share_of(module) == (2, 2), module.status.to_json()
        made = provider.store.list()
        assert made and all("attention outside" in entry.manifest.label for entry in made)


def test_attention_that_another_extension_replaced_sends_its_blocks_to_the_controlnet(
    provider: EngineProvider, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.ldm.modules.diffusionmodules import mmdit

    name, plain = "sd35", mmdit.optimized_attention
    model, control = tiny_controlnets.model(name), load(name)
    before = sampled(model, applied(control, name), name)
    monkeypatch.setattr(mmdit, "optimized_attention", lambda *args, **kwargs: 0.9 * plain(*args, **kwargs))
    fast, module = accelerated(provider, control)
    found, wanted = sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name)
    assert torch.equal(found, wanted) and distance(before, wanted) > 1e-4
    assert not module.status.block_calls and "optimized_attention" in module.status.standing.reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (replace(FIRST_USE, backend=BackendChoice.TENSORRT), NOT_CHOSEN),
        (replace(FIRST_USE, precision=Quantised.FP8), NOT_CHOSEN),
        (replace(FIRST_USE, policy=BuildPolicy.MANUAL), "builds are asked for by hand"),
        (replace(FIRST_USE, backend=BackendChoice.OFF), "switched off"),
    ],
)
def test_what_the_user_chose_is_honoured_and_told(settings: Settings, reason: str, tmp_path: Path, load: Load) -> None:
    name = "sd3"
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        fast, module = accelerated(provider, control, settings)
        assert torch.equal(sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name))
        assert not provider.store.digests() and not module.status.block_calls
        assert module.status.eager_calls == STEPS and reason in module.status.standing.reason


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCKS_VARIABLE, "off")


def weights_cast_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that waits for the cast may take longer than the network."""
    monkeypatch.setattr(RunWeights, "are_at_hand", lambda *_: False)
    monkeypatch.setattr(RunWeights, "lying", lambda *_: {})


@pytest.mark.parametrize("case", [switched_off, weights_cast_at_each_call])
@pytest.mark.parametrize("optimize", [Optimize.BALANCED, Optimize.BLOCKS])
def test_blocks_that_nobody_asked_for_do_not_serve(
    optimize: Optimize,
    case: Callable[[pytest.MonkeyPatch], None],
    provider: EngineProvider,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "sd3"
    model, control = tiny_controlnets.model(name), load(name)
    fast, module = accelerated(provider, control, replace(FIRST_USE, optimize=optimize))
    case(monkeypatch)
    assert distance(sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name)) < 1e-5
    assert (module.status.block_calls > 0) == (optimize is Optimize.BLOCKS)


def test_a_network_that_cannot_be_read_runs_as_it_is(provider: EngineProvider, load: Load) -> None:
    name = "flux xlabs"
    model, control = tiny_controlnets.model(name), load(name)
    wanted = sampled(model, applied(control, name), name)
    control.control_model.double_blocks[0].img_mlp[0] = torch.nn.Sequential(
        control.control_model.double_blocks[0].img_mlp[0]
    )
    fast, module = accelerated(provider, control)
    assert type(fast) is comfy.controlnet.ControlNet
    assert torch.equal(sampled(model, applied(fast, name), name), wanted)
    assert "not those of ComfyUI's" in module.status.to_json()["now"]


def test_a_class_of_networks_without_engines_says_so(provider: EngineProvider) -> None:
    network = torch.nn.Linear(2, 2)
    fast, module = accelerated(provider, comfy.controlnet.ControlNet(network, load_device=torch.device("cpu")))
    assert type(fast) is comfy.controlnet.ControlNet
    assert "(Linear) have no engines yet" in module.status.to_json()["now"]


def test_blocks_that_are_slower_are_not_used_any_more(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the network takes 5 ms, and 20 more by engines; a step of the model's takes 10 by engines, else 40."""
    clock, once, by_name, by_model = FakeClock(), BlockCalls.once, controlnet_calls.residuals_by_name, ModelCalls._plain

    def slow_engines(calls: Any, *args: Any) -> Any:
        found = once(calls, *args)
        clock.now += 20 * (calls._owner.role is Role.CONTROLNET and calls.share.engine > 0)
        return found

    def network(control: Any) -> Any:
        clock.now += 5
        return by_name(control)

    def plain(calls: Any, *args: Any) -> Any:
        clock.now += 40 if is_on_purpose() else 10
        return by_model(calls, *args)

    monkeypatch.setattr(BlockCalls, "once", slow_engines)
    monkeypatch.setattr(controlnet_calls, "residuals_by_name", network)
    monkeypatch.setattr(ModelCalls, "_plain", plain)
    name = "sd3"
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        provider.step_times = StepTimes(provider.store, clock_of=lambda device: clock)
        fast_model, _ = accelerated_model(provider, model)
        waiting, _ = accelerated(provider, control, replace(FIRST_USE, policy=BuildPolicy.MANUAL))
        sampled(model, applied(waiting, name), name, steps=9)
        fast, module = accelerated(provider, control)
        for _ in range(8):
            sampled(fast_model, applied(fast, name), name, steps=12)
        slower = "engines of blocks take 25.0 ms a call where your model without Slipstream takes 5.0 ms"
        assert slower in module.status.standing.reason, module.status.to_json()
        before = module.status.block_calls
        assert before >= 5
        found, wanted = sampled(fast_model, applied(fast, name), name), sampled(model, applied(control, name), name)
        assert distance(found, wanted) < 1e-5 and module.status.block_calls == before


def test_blocks_that_were_there_from_the_start_are_compared_without_an_accelerated_model(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, once, by_name = FakeClock(), BlockCalls.once, controlnet_calls.residuals_by_name

    def slow_engines(calls: Any, *args: Any) -> Any:
        found = once(calls, *args)
        clock.now += 20 * (calls.share.engine > 0)
        return found

    def network(control: Any) -> Any:
        clock.now += 5
        return by_name(control)

    monkeypatch.setattr(BlockCalls, "once", slow_engines)
    monkeypatch.setattr(controlnet_calls, "residuals_by_name", network)
    name = "sd3"
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        sampled(model, applied(accelerated(provider, control)[0], name), name)
        provider.step_times = StepTimes(provider.store, clock_of=lambda device: clock)
        fast, module = accelerated(provider, control)
        wanted = sampled(model, applied(control, name), name, steps=12)
        for _ in range(10):
            assert distance(sampled(model, applied(fast, name), name, steps=12), wanted) < 1e-5
        slower = "engines of blocks take 25.0 ms a call where your model without Slipstream takes 5.0 ms"
        assert slower in module.status.standing.reason, module.status.to_json()
        before = module.status.block_calls
        sampled(model, applied(fast, name), name)
        assert module.status.block_calls == before > 0


def test_the_button_builds_all_that_a_controlnet_needs(tmp_path: Path, load: Load) -> None:
    name = "qwen"
    model, control = tiny_controlnets.model(name), load(name)
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        module = AcceleratedModule(provider, Settings(), by_hand=True)
        sampled(model, applied(accelerate_controlnet(control, module), name), name, steps=1)
        assert share_of(module) == (2, 2) and len(provider.store.digests()) == 1


def test_weights_that_comfyui_stages_reach_engines(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic VRAM."""
    name = "flux xlabs"
    kind = staging.switch_on(monkeypatch)
    model, control = tiny_controlnets.model(name), load(name)
    comfy.model_management.archive_model_dtypes(control.control_model)
    control.control_model_wrapped = kind(control.control_model, staging.DEVICE, torch.device("cpu"))
    with quick_block_provider(EngineStore(tmp_path / "store")) as provider:
        fast, module = accelerated(provider, control)
        found, wanted = sampled(model, applied(fast, name), name), sampled(model, applied(control, name), name)
        assert distance(found, wanted) < 1e-5
        assert module.status.block_calls >= STEPS - 2, module.status.to_json()
