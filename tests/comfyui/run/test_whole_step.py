"""A step as a whole, replayed: on a CPU by calling what a graph would hold, which shows that it is the step."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.models.unet_halves import ComfyUNetHalfSource
from slipstream.hosts.comfy.node_state.node_states import state_of
from slipstream.hosts.comfy.step_graph import first_step, graphed_steps
from slipstream.runtime.loaded.cuda_graphs import CudaGraphs, _call_of
from slipstream.runtime.module import AcceleratedModule, Run
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Levers, Settings
from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

from ..models.test_controlnet import applied, chained, hint, prompts
from ..models.test_unet_engines import easy_cache, masked, with_lora

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def provider(engine_store: EngineStore) -> EngineProvider:
    return EngineProvider(engine_store)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was replayed: kinds of steps, and their inputs' names."""
    done: list[Any] = []
    held: dict[Any, Any] = {}

    def run(graphs: Any, compute: Any, generation: Any, tensors: Any, what: Any, constant: Any, or_raise: bool) -> Any:
        assert or_raise
        result = compute(**tensors)
        done.append((what, sorted(tensors), frozenset(constant), generation))
        held[_call_of(tensors, what)] = generation
        return result

    def holds(graphs: Any, generation: Any, tensors: Any, what: Any) -> bool:
        return held.get(_call_of(tensors, what)) == generation

    monkeypatch.setattr(graphed_steps, "can_replay", lambda device: True)
    monkeypatch.setattr(CudaGraphs, "are_possible", True)
    monkeypatch.setattr(CudaGraphs, "run", run)
    monkeypatch.setattr(CudaGraphs, "holds", holds)
    yield done


class Fast:
    def __init__(
        self,
        provider: EngineProvider,
        family: str = "sd15",
        levers: Levers | None = None,
        policy: BuildPolicy = BuildPolicy.FIRST_USE,
        **sampling: Any,
    ) -> None:
        settings = Settings(policy=policy, levers=levers or Levers())
        self.model_module, self.control_module = (AcceleratedModule(provider, settings) for _ in range(2))
        self.model = accelerate_model(tiny.model(family, **sampling), self.model_module)
        self.control = accelerate_controlnet(tiny.controlnet(family), self.control_module)

    @property
    def calls(self) -> tuple[int, int]:
        modules = self.model_module, self.control_module
        assert [module.status.eager_calls for module in modules] == [0, 0]
        return self.model_module.status.engine_calls, self.control_module.status.engine_calls


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        control: puts the ControlNet into the prompts; None for none.
        replayed: of the steps.
    """

    replayed: int
    control: Callable[[Any], Any] | None = None
    family: str = "sd15"
    v_prediction: bool = False
    change: Callable[[Any], Any] = lambda model: model
    sample: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(4),
    "v-prediction": Case(4, family="sd2", v_prediction=True),
    "sdxl": Case(4, family="sdxl"),
    "cfg 1": Case(4, sample={"cfg": 1.0}),
    "batch of two": Case(4, sample={"batch": 2}),
    "lora": Case(4, change=with_lora),
    "long prompt": Case(4, sample={"positive": tiny.conditioning(seed=1, tokens=154)}),
    "inpaint mask": Case(4, sample={"noise_mask": torch.ones(1, 1, 64, 64).tril()}),
    "img2img": Case(4, sample={"denoise": 0.5}),
    "second-order sampler": Case(8, sample={"sampler": "heun"}),
    "stochastic sampler": Case(4, sample={"sampler": "euler_ancestral"}),
    "multistep sampler": Case(4, sample={"sampler": "dpmpp_2m", "scheduler": "karras"}),
    "controlnet": Case(4, applied),
    "controlnet of full strength": Case(4, lambda control: applied(control, 1.0)),
    "controlnet sdxl": Case(4, applied, family="sdxl"),
    # The first of each kind of step goes the usual way: with the first alone, with both, with the second alone.
    "two controlnets with overlapping ranges": Case(5, chained, sample={"steps": 8}),
    "controlnet for part of the run": Case(3, lambda control: applied(control, start=0.4, end=0.8)),
    # Not the same work in every step:
    "area": Case(0, sample={"positive": tiny.conditioning(seed=1, area=(4, 8, 0, 0), strength=1.0)}),
    "mask": Case(0, sample={"positive": masked(1, 1.0)}),
    "easycache": Case(0, change=easy_cache),
    "post cfg": Case(0, sample={"sampler": "euler_cfg_pp"}),
}


@pytest.mark.parametrize("name", with_slow(CASES, "v-prediction", "cfg 1", "long prompt", "area", "controlnet sdxl"))
def test_picture_is_the_plain_one(name: str, provider: EngineProvider, replays: list[Any]) -> None:
    case = CASES[name]
    sample = {"steps": 5, **case.sample}
    fast = Fast(provider, case.family, v_prediction=case.v_prediction)
    model, control = tiny.model(case.family, v_prediction=case.v_prediction), tiny.controlnet(case.family)

    def given(of: Any) -> dict[str, Any]:
        return prompts(case.control(of), case.family) if case.control else {}

    wanted = tiny.sample(case.change(model), case.family, **given(control), **sample)
    found = tiny.sample(case.change(fast.model), case.family, **given(fast.control), **sample)
    assert wanted.std() > 0.1 and distance(found, wanted) < TOLERANCE
    calls, of_control = fast.calls
    assert len(replays) == case.replayed
    assert calls >= (sample["steps"] if name not in ("easycache",) else 1)
    assert bool(of_control) == bool(case.control)
    again = tiny.sample(case.change(fast.model), case.family, **given(fast.control), **sample)
    assert distance(again, wanted) < TOLERANCE
    known = calls if case.replayed else 0
    assert len(replays) - case.replayed in ((case.replayed, known) if name == "lora" else (known,))
    assert fast.calls == (2 * calls, 2 * of_control)


def test_counts_are_as_without(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider)
    tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))
    assert fast.calls == (5, 5) and len(replays) == 4


def kinds_of(fast: Fast, replays: list[Any], **sample: Any) -> set[Any]:
    """Of the steps that a picture replays."""
    replays.clear()
    tiny.sample(fast.model, steps=3, **sample)
    return {what for what, *_ in replays}


def test_what_is_told_apart(provider: EngineProvider, replays: list[Any]) -> None:
    """Prompts, hints and seeds are inputs of one graph; strengths and CFG are part of it."""
    fast = Fast(provider)
    kinds = functools.partial(kinds_of, fast, replays)
    first = kinds(**prompts(applied(fast.control)))
    assert len(first) == 1
    assert kinds(seed=3, **prompts(applied(fast.control, seed=8))) == first
    other = prompts(applied(fast.control))
    other["positive"][0][0] = tiny.conditioning(seed=9)[0][0]
    assert kinds(**other) == first
    assert kinds(**prompts(applied(fast.control, 0.5))) != first
    assert kinds(cfg=3.0, **prompts(applied(fast.control))) != first
    assert kinds() != first


@pytest.mark.slow
def test_a_controlnet_for_one_of_both_prompts_is_told_apart(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider)
    both = prompts(applied(fast.control))
    first = kinds_of(fast, replays, **both)
    alone = tiny.conditioning(seed=9, control=both["positive"][0][1]["control"])
    assert kinds_of(fast, replays, positive=alone) != first


def test_what_conditions_a_picture_is_put_in_place_once(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider)
    tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))
    (_, names, constant, _) = replays[0]
    assert set(names) == {"x", "sigma", "cond_c_crossattn", "hint_0_guided_hint"}
    assert constant == {"cond_c_crossattn", "hint_0_guided_hint"}


def test_a_part_that_fails_leaves_the_usual_way(
    provider: EngineProvider, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Fast(provider)
    wanted = tiny.sample(fast.model, steps=4)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CudaGraphs, "run", broken)
    assert torch.equal(tiny.sample(fast.model, steps=4), wanted)
    assert fast.calls[0] == 8


def half_as_much(cond_pred: Any, uncond_pred: Any, cond_scale: float, *_: Any, **__: Any) -> Any:
    """Another way to combine prompts, as an extension may put it into ComfyUI's place."""
    return uncond_pred + (cond_pred - uncond_pred) * cond_scale / 2


def test_code_that_another_extension_replaced_is_not_gone_round(
    provider: EngineProvider, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tiny.sample(tiny.model(), steps=4)

    def replaced(model: Any, cond_pred: Any, uncond_pred: Any, cond_scale: float, *rest: Any, **options: Any) -> Any:
        return half_as_much(cond_pred, uncond_pred, cond_scale)

    monkeypatch.setattr(comfy.samplers, "cfg_function", replaced)
    fast = Fast(provider)
    wanted, found = tiny.sample(tiny.model(), steps=4), tiny.sample(fast.model, steps=4)
    assert distance(found, wanted) < TOLERANCE < distance(usual, wanted) / 100
    assert not replays and fast.calls[0] == 4


def test_a_guider_that_is_changed_in_place_is_not_gone_round(provider: EngineProvider, replays: list[Any]) -> None:
    def change(patcher: Any) -> Any:
        clone = patcher.clone()

        def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
            guider = executor.class_obj
            plain = guider.predict_noise
            guider.predict_noise = lambda *given, **options: 0.9 * plain(*given, **options)
            return executor(*args, **kwargs)

        clone.add_wrapper_with_key("outer_sample", "test", outer)
        return clone

    fast = Fast(provider)
    wanted, found = tiny.sample(change(tiny.model()), steps=4), tiny.sample(change(fast.model), steps=4)
    assert distance(found, wanted) < TOLERANCE and not replays


def test_conditioning_that_is_replaced_in_the_midst_of_a_run_counts(
    provider: EngineProvider, replays: list[Any]
) -> None:
    def change(patcher: Any) -> Any:
        clone = patcher.clone()

        def each(executor: Any, x: Any, timestep: Any, options: Any = None, seed: Any = None) -> Any:
            conds = executor.class_obj.conds["positive"][0]["model_conds"]
            conds["c_crossattn"] = type(conds["c_crossattn"])(conds["c_crossattn"].cond * 0.7)
            return executor(x, timestep, options, seed)

        clone.add_wrapper_with_key("predict_noise", "test", each)
        return clone

    fast = Fast(provider)
    wanted, found = tiny.sample(change(tiny.model()), steps=4), tiny.sample(change(fast.model), steps=4)
    assert distance(found, wanted) < TOLERANCE and len(replays) == 3


def at_two_sizes(patcher: Any) -> Any:
    clone = patcher.clone()

    def each(executor: Any, x: Any, timestep: Any, options: Any = None, seed: Any = None) -> Any:
        small = executor(x[..., ::2, ::2].contiguous(), timestep, options, seed)
        return executor(x, timestep, options, seed) + 0.01 * small.mean()

    clone.add_wrapper_with_key("predict_noise", "test", each)
    return clone


@pytest.mark.slow
def test_two_sizes_in_one_run_are_two_kinds_of_steps(provider: EngineProvider, replays: list[Any]) -> None:
    """As samplers do that look at a smaller picture now and then."""
    fast = Fast(provider)
    wanted = tiny.sample(at_two_sizes(tiny.model()), steps=4, **prompts(applied(tiny.controlnet())))
    found = tiny.sample(at_two_sizes(fast.model), steps=4, **prompts(applied(fast.control)))
    assert distance(found, wanted) < TOLERANCE and len({what for what, *_ in replays}) <= 2


def test_a_second_half_without_an_engine_leaves_the_model_whole(
    provider: EngineProvider, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Fast(provider, levers=Levers(parallel="on"))
    ask = Run.ask
    asked: list[str] = []

    def no_decoder(run: Run, inputs: Any) -> Any:
        asked.append("decoder" if "emb" in inputs else "encoder or whole")
        return "the decoder is being built" if "emb" in inputs else ask(run, inputs)

    monkeypatch.setattr(Run, "ask", no_decoder)
    wanted = tiny.sample(tiny.model(), steps=5, **prompts(applied(tiny.controlnet())))
    found = tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))
    assert distance(found, wanted) < TOLERANCE
    assert asked.count("decoder") == 1 and len(replays) == 3 and fast.calls == (5, 5)


def ordered(provider: EngineProvider) -> list[str]:
    """What is to be built; nobody begins to."""
    labels = [str(ticket.plan) for ticket in provider.queue.pending()]
    provider.queue.cancel_all("the test is over")
    return sorted(labels)


HALVES = ["ControlNet 64×64 batch 2", "SD15 decoder 64×64 batch 2 with control", "SD15 encoder 64×64 batch 2"]


def test_in_the_background_both_halves_are_built_and_not_the_whole(tmp_path: Path, replays: list[Any]) -> None:
    provider = EngineProvider(EngineStore(tmp_path), is_idle=lambda: False)
    fast = Fast(provider, levers=Levers(parallel="on"), policy=BuildPolicy.BACKGROUND)
    wanted = tiny.sample(tiny.model(), steps=5, **prompts(applied(tiny.controlnet())))
    found = tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))
    assert torch.equal(found, wanted) and not replays
    assert ordered(provider) == HALVES
    status = fast.model_module.status
    assert (status.engine_calls, status.eager_calls) == (0, 5)
    assert "being built" not in state_of(fast.model_module).text, "nothing is any more"
    (reason,) = status.to_json()["reasons"]
    assert reason.startswith("the engine for SD15 decoder 64×64 batch 2 with control is being built in the background")


@pytest.mark.slow
def test_halves_that_were_built_in_the_background_serve(tmp_path: Path, replays: list[Any]) -> None:
    """The first picture has three engines built, the second runs on them and has none built."""
    provider = EngineProvider(EngineStore(tmp_path))
    fast = Fast(provider, levers=Levers(parallel="on"), policy=BuildPolicy.BACKGROUND)
    modules = fast.model_module, fast.control_module
    wanted = tiny.sample(tiny.model(), steps=5, **prompts(applied(tiny.controlnet())))

    def picture() -> torch.Tensor:
        return tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))

    first, ordered = picture(), provider.queue.pending()
    assert torch.equal(first, wanted) and not replays
    assert sorted(str(ticket.plan) for ticket in ordered) == HALVES
    assert all(ticket.wait(400) for ticket in ordered)
    assert distance(picture(), wanted) < TOLERANCE and len(replays) == 4
    assert [(each.status.engine_calls, each.status.eager_calls) for each in modules] == [(5, 5)] * 2
    assert len(provider.store.list()) == len(HALVES) and not provider.queue.pending()


def test_in_the_background_halves_of_all_sizes_are_built(tmp_path: Path, replays: list[Any]) -> None:
    provider = EngineProvider(EngineStore(tmp_path), is_idle=lambda: False)
    fast = Fast(provider, levers=Levers(parallel="on"), policy=BuildPolicy.BACKGROUND)
    wanted = tiny.sample(at_two_sizes(tiny.model()), steps=4, **prompts(applied(tiny.controlnet())))
    found = tiny.sample(at_two_sizes(fast.model), steps=4, **prompts(applied(fast.control)))
    assert torch.equal(found, wanted)
    assert ordered(provider) == sorted([*HALVES, *(label.replace("64×64", "32×32") for label in HALVES)])


def test_a_first_half_that_fails_by_itself_has_the_whole_built(
    tmp_path: Path, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fail(source: Any, inputs: Any) -> Any:
        tried.append(source.owner)
        raise RuntimeError("no room")

    monkeypatch.setattr(ComfyUNetHalfSource, "eager", fail)
    provider = EngineProvider(EngineStore(tmp_path), is_idle=lambda: False)
    fast = Fast(provider, levers=Levers(parallel="on"), policy=BuildPolicy.BACKGROUND)
    tiny.sample(fast.model, steps=4, **prompts(applied(fast.control)))
    assert tried == ["encoder"], "once a run"
    assert ordered(provider) == sorted([HALVES[0], HALVES[2], "SD15 64×64 batch 2 with control"])


def test_in_the_background_the_steps_without_a_controlnet_have_an_engine_built_too(
    tmp_path: Path, replays: list[Any]
) -> None:
    provider = EngineProvider(EngineStore(tmp_path), is_idle=lambda: False)
    fast = Fast(provider, levers=Levers(parallel="on"), policy=BuildPolicy.BACKGROUND)
    tiny.sample(fast.model, steps=4, **prompts(applied(fast.control, end=0.5)))
    assert ordered(provider) == sorted([*HALVES, "SD15 64×64 batch 2"])


def test_while_halves_are_being_built_a_whole_engine_that_is_there_serves(
    provider: EngineProvider, tmp_path: Path, replays: list[Any]
) -> None:
    whole = Fast(provider, levers=Levers(parallel="off"))
    tiny.sample(whole.model, steps=2, **prompts(applied(whole.control)))
    (digest,) = (use["digest"] for use in whole.model_module.status.to_json()["engines"])
    known = provider.store.lookup(digest)
    assert known is not None
    shutil.copytree(known.directory, tmp_path / "engines" / digest)
    other = EngineProvider(EngineStore(tmp_path), is_idle=lambda: False)
    fast = Fast(other, levers=Levers(parallel="on"), policy=BuildPolicy.BACKGROUND)
    wanted = tiny.sample(tiny.model(), steps=5, **prompts(applied(tiny.controlnet())))
    found = tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))
    assert distance(found, wanted) < TOLERANCE
    status = fast.model_module.status
    assert (status.engine_calls, status.eager_calls) == (5, 0)
    assert ordered(other) == HALVES


def test_halves_give_the_same_picture(provider: EngineProvider, replays: list[Any]) -> None:
    """The model in two engines, as where a ControlNet runs beside the first: asked for by name on a CPU."""
    fast = Fast(provider, levers=Levers(parallel="on"))
    wanted = tiny.sample(tiny.model(), steps=5, **prompts(applied(tiny.controlnet())))
    found = tiny.sample(fast.model, steps=5, **prompts(applied(fast.control)))
    assert distance(found, wanted) < TOLERANCE
    assert fast.calls == (5, 5) and len(replays) == 4
    uses = fast.model_module.status.to_json()["engines"]
    assert sorted(use["label"].split()[1] for use in uses) == ["decoder", "encoder"]


def test_halves_switch_over_in_the_midst_of_a_run(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider, levers=Levers(parallel="on"))
    sample = {"steps": 6, "sampler": "dpmpp_2m"}
    wanted = tiny.sample(tiny.model(), **sample, **prompts(applied(tiny.controlnet(), end=0.5)))
    found = tiny.sample(fast.model, **sample, **prompts(applied(fast.control, end=0.5)))
    assert distance(found, wanted) < TOLERANCE
    assert fast.calls[0] == 6 and 0 < fast.calls[1] < 6


def test_where_steps_are_not_whole_the_model_runs_whole(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider, levers=Levers(parallel="on"))
    sample = prompts(applied(fast.control))
    sample["positive"] += tiny.conditioning(seed=3, area=(4, 8, 0, 0), strength=1.0)
    tiny.sample(fast.model, **sample)
    labels = [use["label"] for use in fast.model_module.status.to_json()["engines"]]
    assert not replays and labels and not any("encoder" in label or "decoder" in label for label in labels)


def test_lora_reaches_both_halves(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider, levers=Levers(parallel="on"))
    wanted = tiny.sample(with_lora(tiny.model()), **prompts(applied(tiny.controlnet())))
    found = tiny.sample(with_lora(fast.model), **prompts(applied(fast.control)))
    assert distance(found, wanted) < TOLERANCE and fast.calls == (3, 3)


def test_a_cancel_in_the_midst_leaves_everything_usable(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider)
    wanted = tiny.sample(fast.model, **prompts(applied(fast.control)))

    def stop(step: int, *_: Any) -> None:
        if step == 1:
            raise comfy.model_management.InterruptProcessingException()

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(fast.model, callback=stop, **prompts(applied(fast.control)))
    assert not provider.pool.in_use(torch.device("cpu"))
    assert torch.equal(tiny.sample(fast.model, **prompts(applied(fast.control))), wanted)


# ----------------------------------------------------------------------------------- from picture to picture


def pictures(
    fast: Fast,
    plain: Any,
    control: Any,
    replays: list[Any],
    apply: Callable[[Any], Any] = applied,
    change: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> int:
    """Make one picture both ways; how many of its five steps were replayed."""
    before = len(replays)

    def made(model: Any, network: Any) -> torch.Tensor:
        given = {} if control is None else prompts(apply(network))
        picture: torch.Tensor = tiny.sample(change(model), **{"steps": 5, **given, **options})
        return picture

    wanted, found = made(plain, control), made(fast.model, fast.control)
    assert wanted.std() > 0.1 and distance(found, wanted) < TOLERANCE
    return len(replays) - before


@pytest.mark.parametrize("parallel", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_the_next_picture_begins_with_what_was_recorded(
    provider: EngineProvider, replays: list[Any], parallel: str
) -> None:
    fast = Fast(provider, levers=Levers(parallel=parallel))
    plain, control = tiny.model(), tiny.controlnet()
    assert pictures(fast, plain, control, replays) == 4
    assert pictures(fast, plain, control, replays) == 5
    assert fast.calls == (10, 10)
    other = {"sampler": "dpmpp_2m", "scheduler": "karras", "seed": 7}
    assert pictures(fast, plain, control, replays, lambda control: applied(control, seed=9), **other) == 5
    assert pictures(fast, plain, control, replays, change=with_lora) in (4, 5), "weights may lie elsewhere"
    assert pictures(fast, plain, control, replays) in (4, 5)
    longer = tiny.conditioning(seed=1, tokens=154)
    assert pictures(fast, plain, None, replays, positive=longer) == 4, "without a ControlNet, and of another length"
    assert pictures(fast, plain, None, replays, positive=longer) == 5
    assert pictures(fast, plain, None, replays) == 4, "another length"
    assert pictures(fast, plain, control, replays, cfg=3.0) == 4
    assert pictures(fast, plain, control, replays, lambda control: applied(control, strength=0.3)) == 4
    assert pictures(fast, plain, control, replays) == 5


def test_a_window_begins_with_what_was_recorded(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider)
    plain, control = tiny.model(), tiny.controlnet()
    for replayed in (3, 5):
        assert pictures(fast, plain, control, replays, lambda control: applied(control, start=0.4, end=0.8)) == replayed


def test_what_another_extension_changed_since_is_not_replayed(
    provider: EngineProvider, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, changed, dropped = Fast(provider), tiny.model(), []

    def run(self: Any, compute: Any, generation: Any, tensors: Any, *_: Any, **__: Any) -> Any:
        dropped.append(tensors)  # as a GPU does, which asks nobody
        return {"denoised": torch.full_like(tensors["x"], 7.0)}

    assert pictures(fast, tiny.model(), None, replays) == 4
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(CudaGraphs, "run", run)
        for model in (fast.model, changed):
            layer = model.model.diffusion_model.middle_block[0]
            meanwhile.setattr(layer, "forward", functools.partial(_halved, layer.forward))
        wanted, found = tiny.sample(changed, steps=5), tiny.sample(fast.model, steps=5)
    assert distance(found, wanted) < TOLERANCE and len(replays) == 4 and len(dropped) == 1
    assert fast.model_module.status.eager_calls == 5
    assert fast.model_module.status.engine_calls == 5, "what was dropped does not count"
    again, usual = tiny.sample(fast.model, steps=5), tiny.sample(tiny.model(), steps=5)
    assert distance(again, usual) < TOLERANCE and len(replays) == 4 + 5, "it is known still"


def _halved(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return 0.5 * forward(*args, **kwargs)


def test_a_first_step_that_cannot_be_replayed_goes_the_usual_way(
    provider: EngineProvider, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Fast(provider)
    plain, control = tiny.model(), tiny.controlnet()
    assert pictures(fast, plain, control, replays) == 4
    with monkeypatch.context() as patched:
        patched.setattr(first_step.Step, "prepare_hints", failing)
        assert pictures(fast, plain, control, replays) == 4
    assert pictures(fast, plain, control, replays) == 5, "it is known again"
    with monkeypatch.context() as patched:
        patched.setattr(CudaGraphs, "holds", lambda *args: False)
        assert pictures(fast, plain, control, replays) == 4
    assert fast.calls == (20, 20)


def test_halves_that_come_later_are_used(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider, levers=Levers(parallel="off"))
    plain, control = tiny.model(), tiny.controlnet()
    assert [pictures(fast, plain, control, replays) for _ in range(2)] == [4, 5]
    for module in (fast.model_module, fast.control_module):
        module.chosen = Settings(policy=BuildPolicy.FIRST_USE, levers=Levers(parallel="on"))
    assert [pictures(fast, plain, control, replays) for _ in range(2)] == [4, 5]
    use = [each["label"] for each in fast.model_module.status.to_json()["engines"]]
    assert any("encoder" in what for what in use) and any("decoder" in what for what in use)


def test_without_the_lever_first_steps_go_the_usual_way(provider: EngineProvider, replays: list[Any]) -> None:
    fast = Fast(provider, levers=Levers(first_step=False))
    assert [pictures(fast, tiny.model(), None, replays) for _ in range(2)] == [4, 4]


def guided(patcher: Any, has_negative: bool) -> torch.Tensor:
    """By a guider as another node may make it: with CFG, but perhaps nothing to guide away from."""
    guider = comfy.samplers.CFGGuider(patcher)
    guider.inner_set_conds({"positive": tiny.conditioning(seed=1)})
    if has_negative:
        guider.set_conds(tiny.conditioning(seed=1), tiny.conditioning(seed=2))
    guider.set_cfg(7.0)
    empty = tiny.latent()["samples"]
    sigmas = comfy.samplers.KSampler(patcher, 4, patcher.load_device, "euler", "normal", 1.0).sigmas
    sampler = comfy.samplers.sampler_object("euler")
    result: torch.Tensor = guider.sample(
        comfy.sample.prepare_noise(empty, 7), empty, sampler, sigmas, disable_pbar=True, seed=7
    )
    return result


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_negative_prompt_that_comes_or_goes(provider: EngineProvider, replays: list[Any], first: bool) -> None:
    fast = Fast(provider)
    wanted = {each: guided(tiny.model(), each) for each in (True, False)}
    assert distance(wanted[True], wanted[False]) > 0.1
    for has_negative in (first, not first, first):
        assert distance(guided(fast.model, has_negative), wanted[has_negative]) < TOLERANCE
    assert len(replays) == 3 + 3 + 4


@pytest.mark.slow
def test_another_dtype_or_number_of_hints_is_other_work(
    provider: EngineProvider, replays: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no engine is built or taken for calls that nobody makes."""
    taken: list[str] = []
    take = provider.pool.take

    def noting(plan: Any, entry: Any, device: Any) -> Any:
        taken.append(str(plan.spec.profile))
        return take(plan, entry, device)

    monkeypatch.setattr(provider.pool, "take", noting)
    fast = Fast(provider)
    plain, control = tiny.model(), tiny.controlnet()

    def two_hints(control: Any) -> Any:
        return control.copy().set_cond_hint(torch.cat([hint(4), hint(5)]), 0.8, (0.0, 1.0))

    found = []
    for apply in (applied, applied, two_hints, two_hints, applied):
        taken.clear()
        found.append((pictures(fast, plain, control, replays, apply, batch=2), len(taken)))
    assert [count for count, _ in found[:4]] == [4, 5, 4, 5] and {engines for _, engines in found} == {2}
    ordered = provider.queue.submit
    submitted: list[str] = []
    monkeypatch.setattr(
        provider.queue, "submit", lambda plan, **how: [submitted.append(str(plan)), ordered(plan, **how)][1]
    )

    def in_bf16(model: Any) -> Any:
        clone = model.clone()
        clone.set_model_compute_dtype(torch.bfloat16)
        return clone

    assert [pictures(fast, plain, None, replays) for _ in range(2)] == [4, 5]
    submitted.clear()
    tiny.sample(in_bf16(fast.model), steps=5)
    assert len(submitted) <= 1, submitted


def failing(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the hint cannot be made ready")
