"""ControlNets: their residuals in the model's engine, and their own networks on engines."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.model_management
import comfy.ops
import pytest
import torch

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet, accelerated_controlnet_module
from slipstream.hosts.comfy.models.controlnet import ComfyControlNetSource
from slipstream.hosts.control_residuals import control_of, residuals_of
from slipstream.runtime.building.job_file import as_plain, from_plain
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.cases import with_slow
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.models.weights import randomise, randomise_controlnet
from slipstream.tests.tensors import distance

from .test_unet_engines import with_lora

TOLERANCE = 1e-4
FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)
Control = Any


@pytest.fixture(scope="module")
def provider(engine_store: EngineStore) -> EngineProvider:
    return EngineProvider(engine_store)


def hint(seed: int = 4, size: int = 64, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def applied(control: Control, strength: float = 0.8, start: float = 0.0, end: float = 1.0, seed: int = 4) -> Control:
    """As Apply ControlNet does it."""
    return control.copy().set_cond_hint(hint(seed), strength, (start, end))


def prompts(control: Control, family: str = "sd15") -> dict[str, Any]:
    """Both prompts with control, as Apply ControlNet (Advanced) gives them."""
    return {
        "positive": tiny.conditioning(family, seed=1, control=control, control_apply_to_uncond=False),
        "negative": tiny.conditioning(family, seed=2, control=control, control_apply_to_uncond=False),
    }


def union(seed: int = 1) -> Control:
    """A ControlNet Union; its type tells what the hint shows."""
    shape = tiny.FAMILIES["sdxl"]
    # The layers that merge hints are 320 wide in every Union.
    config = {**shape.config(), "model_channels": 320, "channel_mult": [1, 1]}
    del config["out_channels"]
    network = comfy.cldm.cldm.ControlNet(
        **config,
        num_heads=-1,
        num_head_channels=64,
        hint_channels=3,
        union_controlnet_num_control_type=6,
        operations=comfy.ops.disable_weight_init,
    )
    randomise_controlnet(network, seed)
    return comfy.controlnet.ControlNet(network, load_device=comfy.model_management.get_torch_device())


class Adapter(torch.nn.Module):
    """Gives features where a T2I adapter does: after the first block and after the last, nothing in between."""

    unshuffle_amount = 8

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(192, 32, 1), torch.nn.Conv2d(192, 64, 2, stride=2)

    def forward(self, picture: torch.Tensor) -> dict[str, list[Any]]:
        x = torch.nn.functional.pixel_unshuffle(picture, 8)
        return {"input": [self.last(x), None, None, self.first(x)]}


def t2i_adapter(seed: int = 1) -> Control:
    network = Adapter()
    randomise(network, seed)
    return comfy.controlnet.T2IAdapter(network, 3, 8, "nearest-exact", comfy.model_management.get_torch_device())


class Fast:
    """An accelerated model and ControlNet, and what they did."""

    def __init__(self, provider: EngineProvider, family: str = "sd15", control: Control | None = None) -> None:
        self.model_module = AcceleratedModule(provider, FIRST_USE)
        self.control_module = AcceleratedModule(provider, FIRST_USE)
        self.model = accelerate_model(tiny.model(family), self.model_module)
        self.control = accelerate_controlnet(control or tiny.controlnet(family), self.control_module)

    @property
    def calls(self) -> tuple[int, int]:
        return self.model_module.status.engine_calls, self.control_module.status.engine_calls

    def check_all_served(self) -> None:
        for module in (self.model_module, self.control_module):
            assert module.status.engine_calls > 0
            assert module.status.eager_calls == 0, module.status.to_json()["reasons"]


@dataclass(frozen=True)
class Case:
    """A way to apply a ControlNet; `controls` makes what is put into the prompts."""

    controls: Callable[[Control], Control] = applied
    family: str = "sd15"
    sample: dict[str, Any] = field(default_factory=dict)


def chained(control: Control) -> Control:
    first = applied(control, 0.7, 0.0, 0.6)
    second = applied(control, 0.4, 0.3, 1.0, seed=5)
    second.set_previous_controlnet(first)
    return second


CASES = {
    "plain": Case(),
    "sdxl": Case(family="sdxl"),
    "for part of the run": Case(lambda control: applied(control, start=0.4, end=0.8), sample={"steps": 6}),
    "two with overlapping ranges": Case(chained, sample={"steps": 6}),
    "cfg 1": Case(sample={"cfg": 1.0}),
    "batch of two": Case(sample={"batch": 2}),
    "inpaint mask": Case(sample={"noise_mask": torch.ones(1, 1, 64, 64).tril()}),
    "second-order sampler": Case(lambda control: applied(control, start=0.2), sample={"sampler": "heun"}),
    "no strength": Case(lambda control: applied(control, 0.0)),
}


@pytest.mark.parametrize(
    "name", with_slow(CASES, "sdxl", "cfg 1", "batch of two", "for part of the run", "second-order sampler")
)
def test_picture_is_the_plain_one_and_both_engines_made_it(name: str, provider: EngineProvider) -> None:
    case = CASES[name]
    control = tiny.controlnet(case.family)
    wanted = tiny.sample(
        tiny.model(case.family), case.family, **prompts(case.controls(control), case.family), **case.sample
    )
    fast = Fast(provider, case.family, control)
    found = tiny.sample(fast.model, case.family, **prompts(case.controls(fast.control), case.family), **case.sample)
    fast.check_all_served()
    assert wanted.std() > 0.1 and distance(found, wanted) < TOLERANCE
    if name != "no strength":
        without = tiny.sample(tiny.model(case.family), case.family, **case.sample)
        assert distance(without, wanted) > 10 * TOLERANCE, "the ControlNet changes nothing: no proof"


def test_calls_are_as_many_as_comfyui_asks_for(provider: EngineProvider) -> None:
    fast = Fast(provider)
    tiny.sample(fast.model, **prompts(applied(fast.control, end=0.5)), steps=6)
    with_control = [use for use in fast.model_module.status.to_json()["engines"] if "with control" in use["label"]]
    calls, of_control = fast.calls
    assert calls == 6 and 0 < of_control < 6
    assert sum(use["calls"] for use in with_control) == of_control


def test_hint_is_embedded_once_a_picture(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    embed = ComfyControlNetSource.embed
    monkeypatch.setattr(ComfyControlNetSource, "embed", lambda *given: times.append(1) or embed(*given))
    fast = Fast(provider)
    first = tiny.sample(fast.model, **prompts(applied(fast.control)), steps=5)
    assert len(times) == 1
    other = tiny.sample(fast.model, **prompts(applied(fast.control, seed=9)), steps=5)
    assert len(times) == 2 and not torch.equal(first, other)


def test_lora_on_the_model_reaches_engines_with_control(provider: EngineProvider) -> None:
    control, model = tiny.controlnet(), tiny.model()
    plain = tiny.sample(model, **prompts(applied(control)))
    wanted = tiny.sample(with_lora(model), **prompts(applied(control)))
    fast = Fast(provider, control=control)
    found = tiny.sample(with_lora(fast.model), **prompts(applied(fast.control)))
    fast.check_all_served()
    assert distance(found, wanted) < TOLERANCE
    assert distance(wanted, plain) > 100 * TOLERANCE
    again = tiny.sample(fast.model, **prompts(applied(fast.control)))
    assert distance(again, plain) < TOLERANCE


def test_plain_controlnet_beside_an_accelerated_model(provider: EngineProvider) -> None:
    control = tiny.controlnet()
    wanted = tiny.sample(tiny.model(), **prompts(applied(control)))
    fast = Fast(provider)
    found = tiny.sample(fast.model, **prompts(applied(control)))
    assert fast.calls == (3, 0) and fast.model_module.status.eager_calls == 0
    assert distance(found, wanted) < TOLERANCE


def test_accelerated_controlnet_beside_a_plain_model(provider: EngineProvider) -> None:
    control = tiny.controlnet()
    wanted = tiny.sample(tiny.model(), **prompts(applied(control)))
    fast = Fast(provider, control=control)
    found = tiny.sample(tiny.model(), **prompts(applied(fast.control)))
    assert fast.calls == (0, 3) and fast.control_module.status.eager_calls == 0
    assert distance(found, wanted) < TOLERANCE


@pytest.mark.slow
def test_t2i_adapter_through_the_same_residuals(provider: EngineProvider) -> None:
    wanted = tiny.sample(tiny.model(), **prompts(applied(t2i_adapter())))
    fast = Fast(provider)
    found = tiny.sample(fast.model, **prompts(applied(t2i_adapter())))
    assert fast.model_module.status.engine_calls == 3 and fast.model_module.status.eager_calls == 0
    assert distance(found, wanted) < TOLERANCE
    assert distance(tiny.sample(tiny.model()), wanted) > 10 * TOLERANCE


def test_all_types_of_a_union_share_one_engine(provider: EngineProvider) -> None:
    network = union()
    fast = accelerate_controlnet(network, module := AcceleratedModule(provider, FIRST_USE))
    x, context, y = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 64), torch.randn(2, 2816)
    given = {"x": x, "hint": hint(), "timesteps": torch.tensor([500.0, 500.0]), "context": context, "y": y}
    calls = fast.acceleration.calls_of(fast)
    answers = []
    for types in ([0], [3], []):
        wanted = network.control_model(**given, control_type=types)
        found = calls(**given, control_type=types)
        assert {kind: len(found[kind]) for kind in found} == {kind: len(wanted[kind]) for kind in wanted}
        for kind in wanted:
            for one, other in zip(found[kind], wanted[kind], strict=True):
                assert distance(one, other) < TOLERANCE
        answers.append(found["middle"][0])
    fast.acceleration.leave(fast)
    assert (module.status.engine_calls, module.status.eager_calls) == (3, 0), module.status.to_json()["reasons"]
    assert len(module.status.to_json()["engines"]) == 1
    assert not torch.allclose(answers[0], answers[1]) and not torch.allclose(answers[0], answers[2])


def test_a_type_that_a_union_does_not_know_is_said_by_comfyui(provider: EngineProvider) -> None:
    fast = accelerate_controlnet(union(), module := AcceleratedModule(provider, FIRST_USE))
    given = {"x": torch.randn(2, 4, 8, 8), "hint": hint(), "timesteps": torch.tensor([5.0, 5.0])}
    calls = fast.acceleration.calls_of(fast)
    with pytest.raises(ValueError, match="out of range"):
        calls(**given, context=torch.randn(2, 77, 64), y=torch.randn(2, 2816), control_type=[7])
    fast.acceleration.leave(fast)
    assert module.status.engine_calls == 0


def test_a_network_that_is_used_no_more_is_let_go(provider: EngineProvider) -> None:
    fast = Fast(provider)
    clone = fast.control.copy()
    clone.control_model = copy.deepcopy(clone.control_model)  # as for a second GPU
    clone.calls()
    clone.cleanup()
    gone = weakref.ref(clone.control_model)
    del clone
    gc.collect()
    assert gone() is None


def test_a_kind_without_engines_runs_as_ever_and_says_why(provider: EngineProvider) -> None:
    lora = comfy.controlnet.ControlLora({"input_hint_block.0.weight": torch.zeros(16, 3, 3, 3)})
    module = AcceleratedModule(provider, FIRST_USE)
    made = accelerate_controlnet(lora, module)
    assert type(made) is comfy.controlnet.ControlLora and made is not lora
    assert "ControlLora" in module.status.to_json()["now"]
    assert accelerated_controlnet_module(made) is module


def test_copies_and_their_settings_stay_apart(provider: EngineProvider) -> None:
    fast = Fast(provider)
    one, other = applied(fast.control, 0.3), applied(fast.control, 0.9, start=0.5)
    assert (one.strength, other.strength) == (0.3, 0.9)
    assert other.timestep_percent_range == (0.5, 1.0) and one.timestep_percent_range == (0.0, 1.0)
    assert isinstance(one, comfy.controlnet.ControlNet)
    assert accelerated_controlnet_module(one) is fast.control_module
    assert one.control_model is fast.control.control_model is other.control_model


@pytest.mark.parametrize("ends", ["cancel", "error"])
def test_a_run_that_breaks_off_gives_engines_back(ends: str, provider: EngineProvider) -> None:
    fast = Fast(provider)
    error = comfy.model_management.InterruptProcessingException() if ends == "cancel" else RuntimeError("out of it")
    wanted = tiny.sample(fast.model, **prompts(applied(fast.control)))

    def stop(step: int, *_: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        tiny.sample(fast.model, callback=stop, **prompts(applied(fast.control)))
    assert not provider.pool.in_use(torch.device("cpu"))
    assert not fast.model.get_all_callbacks("on_cleanup")
    assert torch.equal(tiny.sample(fast.model, **prompts(applied(fast.control))), wanted)


@pytest.mark.parametrize("make", [tiny.controlnet, lambda: tiny.controlnet("sdxl"), union])
def test_what_is_traced_computes_what_the_network_does(make: Callable[[], Control]) -> None:
    source = ComfyControlNetSource(make())
    architecture = from_plain(json.loads(json.dumps(as_plain(source.architecture))))  # as in the build process
    assert architecture.fingerprint == source.architecture.fingerprint
    config, network = source.architecture.config, source.network
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(2, 4, 8, 8, generator=generator),
        "timesteps": torch.tensor([3.0, 900.0]),
        "context": torch.randn(2, 77, config["context_dim"], generator=generator),
    }
    if config["num_classes"]:
        inputs["y"] = torch.randn(2, config["adm_in_channels"], generator=generator)
    types = [1] if network.control_add_embedding is not None else None
    wanted = network(hint=hint(), **inputs, **({"control_type": types} if types else {}))
    flat = dict(zip(architecture.outputs, [*wanted["output"], *wanted["middle"]], strict=True))
    embedded = inputs | source.embed(hint(), types)
    placeholder = architecture.placeholder(source.precision, source.device)
    with torch.no_grad():
        found = torch.func.functional_call(placeholder, dict(source.bind(source.precision).tensors), (), embedded)
        assert relative_error(dict(zip(architecture.outputs, found, strict=True)), flat) < 1e-5
        assert relative_error(source.eager(embedded), flat) < 1e-5
        assert relative_error(source.reference(embedded), flat) < 1e-5
    assert "input_hint_block.0.weight" in dict(network.named_parameters()), "the live network was left changed"


def test_residuals_keep_their_places() -> None:
    x = torch.zeros(2, 4, 8, 8)
    one, other = torch.randn(2, 8, 8, 8), torch.randn(1, 8, 8, 8)
    control = {"input": [None, one, None], "middle": [], "output": [other, None]}
    found = residuals_of(control, x)
    assert set(found) == {"control_input_1_of_3", "control_output_0_of_2"}
    assert found["control_output_0_of_2"].shape == (2, 8, 8, 8)
    back, rest = control_of({"x": x, **found})
    assert set(rest) == {"x"}
    assert [entry is None for entry in back["input"]] == [True, False, True] and back["middle"] == []
    assert torch.equal(back["output"][0][:1], other) and back["output"][1] is None
    assert residuals_of(None, x) == {} and control_of({"x": x}) == (None, {"x": x})
    assert isinstance(residuals_of({"strange": [one]}, x), str)
    assert isinstance(residuals_of({"output": [torch.zeros(3, 8, 8, 8)]}, x), str)


class ControlNetAdvanced(comfy.controlnet.ControlNet):
    """As Advanced-ControlNet has them: each has methods of its own, which call others of its class."""

    share = 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        of_comfyui: Any = super()

        def get_control(*given: Any) -> Any:
            found = self.get_control_advanced(*given)
            return {kind: [self.share * each for each in found[kind]] for kind in found}

        def pre_run(*given: Any) -> None:
            of_comfyui.pre_run(*given)
            self.pre_run_advanced(*given)

        def cleanup() -> None:
            of_comfyui.cleanup()
            self.cleanup_advanced()

        self.get_control, self.pre_run, self.cleanup = get_control, pre_run, cleanup

    def get_control_advanced(self, *given: Any) -> Any:
        return comfy.controlnet.ControlNet.get_control(self, *given)

    def pre_run_advanced(self, *given: Any) -> None:
        self.cleanup_advanced()

    def cleanup_advanced(self) -> None:
        """Has nothing to give back."""

    def copy(self) -> Control:
        made = ControlNetAdvanced(self.control_model, load_device=self.load_device)
        made.control_model_wrapped, made.share = self.control_model_wrapped, self.share
        self.copy_to(made)
        return made


def advanced(control: Control, share: float) -> Control:
    """As Apply Advanced ControlNet does it."""
    made = control.copy()
    if type(made) == comfy.controlnet.ControlNet:  # noqa: E721 (that is how the pack asks)
        made = ControlNetAdvanced(control.control_model, load_device=control.load_device)
        control.copy_to(made)
        made.control_model_wrapped = control.control_model_wrapped.clone()
    made.share = share
    return made.set_cond_hint(hint(), 0.8, (0.0, 1.0))


@pytest.mark.parametrize("is_loaded_by_the_pack", [False, True])
def test_what_another_pack_makes_of_an_accelerated_controlnet_is_one_and_keeps_what_it_does(
    is_loaded_by_the_pack: bool, provider: EngineProvider
) -> None:
    model, network = tiny.model(), tiny.controlnet()
    loaded = advanced(network, 1.0).copy() if is_loaded_by_the_pack else network
    fast = accelerate_controlnet(loaded, module := AcceleratedModule(provider, FIRST_USE))

    def sampled(control: Control, share: float) -> torch.Tensor:
        return tiny.sample(model, **prompts(advanced(control, share).copy()))

    wanted = [sampled(network, share) for share in (1.0, 0.3)]
    assert distance(*wanted) > 1e-3
    for share, picture in zip((1.0, 0.3), wanted, strict=True):
        before = module.status.engine_calls
        assert distance(sampled(fast, share), picture) < TOLERANCE
        assert module.status.engine_calls > before, module.status.to_json()
    assert not fast.acceleration.runs
    assert accelerated_controlnet_module(advanced(fast, 1.0)) is module
