"""Random changes of a loaded model and of the code that it runs: none of them gives a wrong picture.

Each is made once the engine is there, was checked and has served. Then the picture is the plain model's, and where an
engine computed it although the change lies in code that both run in this process, the change does nothing.
"""

from __future__ import annotations

import functools
import random
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel, util
from comfy.patcher_extension import PatcherInjection, WrappersMP

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.tensors import distance

Patcher = Any
Mutation = Callable[[random.Random, Patcher, pytest.MonkeyPatch], Patcher]
"""Changes a patcher, or the model in it, which several patchers share; what it says of itself is its name."""

TOLERANCE = 1e-4
STEPS = 2


def scaled(result: Any, factor: float) -> Any:
    """A result of anything, its tensors of numbers made larger."""
    if isinstance(result, torch.Tensor):
        return factor * result if result.is_floating_point() else result
    if isinstance(result, (tuple, list)):
        return type(result)(scaled(each, factor) for each in result)
    return result


def louder(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> Any:
        return scaled(function(*args, **kwargs), factor)

    return changed


def factor_of(rng: random.Random) -> float:
    return rng.choice([0.5, 0.9, 1.02, 1.3])


def layers_of(patcher: Patcher) -> dict[str, torch.nn.Module]:
    return dict(patcher.model.diffusion_model.named_modules())


def layer_of(rng: random.Random, patcher: Patcher, *kinds: type) -> tuple[str, Any]:
    wanted = kinds or (torch.nn.Module,)
    containers = torch.nn.ModuleList, torch.nn.Dropout, torch.nn.Identity
    layers = [
        (name, layer)
        for name, layer in layers_of(patcher).items()
        if name and isinstance(layer, wanted) and not isinstance(layer, containers)
    ]
    return rng.choice(layers)


# ---------------------------------------------------------------------------------- what patchers are made for


def object_patch(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    name, layer = layer_of(rng, patcher, torch.nn.Conv2d, torch.nn.Linear, torch.nn.GroupNorm)
    patcher.add_object_patch(f"diffusion_model.{name}", torch.nn.Sequential(layer, torch.nn.Hardtanh(-0.5, 0.5)))
    return patcher


def method_patch(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    name, layer = layer_of(rng, patcher)
    patcher.add_object_patch(f"diffusion_model.{name}.forward", louder(layer.forward, factor_of(rng)))
    return patcher


def wrapper(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    kinds = ("OUTER_SAMPLE", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH", "APPLY_MODEL", "DIFFUSION_MODEL")
    kind, factor = rng.choice(kinds), factor_of(rng)

    def wrap(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return scaled(executor(*args, **kwargs), factor)

    patcher.add_wrapper_with_key(getattr(WrappersMP, kind), "another pack", wrap)
    return patcher


def model_function(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    factor = factor_of(rng)
    patcher.set_model_unet_function_wrapper(
        lambda apply, given: factor * apply(given["input"], given["timestep"], **given["c"])
    )
    return patcher


def guidance(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    factor = factor_of(rng)
    if rng.random() < 0.5:
        patcher.set_model_sampler_cfg_function(lambda args: args["uncond"] + factor * (args["cond"] - args["uncond"]))
    else:
        patcher.set_model_sampler_post_cfg_function(lambda args: factor * args["denoised"])
    return patcher


def patch(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    factor = factor_of(rng)
    patches: list[Callable[[], Any]] = [
        lambda: patcher.set_model_attn1_patch(lambda q, k, v, options: (factor * q, k, v)),
        lambda: patcher.set_model_attn2_patch(lambda q, k, v, options: (factor * q, k, v)),
        lambda: patcher.set_model_attn1_output_patch(lambda out, options: factor * out),
        lambda: patcher.set_model_attn2_output_patch(lambda out, options: factor * out),
        lambda: patcher.set_model_input_block_patch(lambda hidden, options: factor * hidden),
        lambda: patcher.set_model_output_block_patch(lambda hidden, skip, options: (factor * hidden, skip)),
        lambda: patcher.set_model_attn1_replace(lambda q, k, v, options: factor * v, "input", 1),
        lambda: patcher.set_model_attn2_replace(lambda q, k, v, options: factor * q, "output", 1),
    ]
    rng.choice(patches)()
    return patcher


def lora(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    names = [name for name in patcher.model.state_dict() if name.startswith("diffusion_model.")]
    name = rng.choice(names)
    weight = patcher.model.state_dict()[name]
    patcher.add_patches({name: ("diff", (torch.full_like(weight, 0.1),))}, factor_of(rng))
    return patcher


def weight_wrapper(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    name, _layer = layer_of(rng, patcher, torch.nn.Conv2d, torch.nn.Linear)
    factor = factor_of(rng)
    patcher.add_weight_wrapper(f"diffusion_model.{name}.weight", lambda weight: factor * weight)
    return patcher


def injection(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    name, _layer = layer_of(rng, patcher)
    factor = factor_of(rng)

    def inject(owner: Any) -> None:
        layer = owner.model.diffusion_model.get_submodule(name)
        vars(layer)["forward"] = louder(layer.forward, factor)

    def eject(owner: Any) -> None:
        vars(owner.model.diffusion_model.get_submodule(name)).pop("forward", None)

    patcher.set_injections("another pack", [PatcherInjection(inject=inject, eject=eject)])
    return patcher


# ---------------------------------------------------------------------------------------------- the model itself


def hook(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    _name, layer = layer_of(rng, patcher)
    factor = factor_of(rng)
    if rng.random() < 0.5:
        layer.register_forward_hook(lambda layer, args, result: scaled(result, factor))
    else:
        layer.register_forward_pre_hook(lambda layer, args: scaled(args, factor))
    return patcher


def global_hook(rng: random.Random, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> Patcher:
    kind, factor = type(layer_of(rng, patcher)[1]), factor_of(rng)

    def watch(layer: Any, args: Any, result: Any) -> Any:
        return scaled(result, factor) if type(layer) is kind else None

    monkeypatch.setitem(torch.nn.modules.module._global_forward_hooks, -1, watch)
    return patcher


def own_method(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    _name, layer = layer_of(rng, patcher)
    names = ["forward", *(name for name in ("_forward", "_conv_forward") if hasattr(layer, name))]
    name = rng.choice(names)
    setattr(layer, name, louder(getattr(layer, name), factor_of(rng)))
    return patcher


def compiled(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    _name, layer = layer_of(rng, patcher)
    layer._compiled_call_impl = louder(layer._call_impl, factor_of(rng))
    return patcher


def setting(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    """Any number, text or tuple of numbers that a layer holds."""
    own = [
        (layer, key)
        for layer in layers_of(patcher).values()
        for key, value in vars(layer).items()
        if not key.startswith("_") and isinstance(value, (bool, int, float, tuple)) and key != "training"
    ]
    layer, key = rng.choice(own)
    value = getattr(layer, key)
    if isinstance(value, bool):
        changed: Any = not value
    elif isinstance(value, tuple):
        changed = tuple(2 * each if isinstance(each, int) else each for each in value)
    else:
        changed = rng.choice([2 * value, value / 2 if isinstance(value, float) else value // 2, value + 1])
    setattr(layer, key, changed)
    return patcher


def padding(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    _name, layer = layer_of(rng, patcher, torch.nn.Conv2d)
    layer.padding_mode = rng.choice(["circular", "reflect", "replicate"])
    return patcher


def exchanged_layer(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    name, layer = layer_of(rng, patcher, torch.nn.Conv2d, torch.nn.Linear, torch.nn.GroupNorm, torch.nn.SiLU)
    parent = patcher.model.diffusion_model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], torch.nn.Sequential(layer, torch.nn.Hardtanh(-0.5, 0.5)))
    return patcher


def layer_class(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    _name, layer = layer_of(rng, patcher)
    factor, kind = factor_of(rng), type(layer)
    body = {"forward": lambda self, *args, **kwargs: scaled(kind.forward(self, *args, **kwargs), factor)}
    layer.__class__ = type(kind.__name__, (kind,), body)
    return patcher


def weight(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    """Written into, or put in the place of another."""
    _name, layer = layer_of(rng, patcher, torch.nn.Conv2d, torch.nn.Linear, torch.nn.GroupNorm)
    factor = factor_of(rng)
    with torch.no_grad():
        if rng.random() < 0.5:
            layer.weight.mul_(factor)
        else:
            layer.weight = torch.nn.Parameter(factor * layer.weight, requires_grad=False)
    return patcher


def parametrisation(rng: random.Random, patcher: Patcher, _: pytest.MonkeyPatch) -> Patcher:
    _name, layer = layer_of(rng, patcher, torch.nn.Conv2d, torch.nn.Linear)
    scale = torch.nn.Hardtanh(-0.01, 0.01)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", scale)
    return patcher


# ------------------------------------------------------------------------------------------- code of the process


def class_method(rng: random.Random, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> Patcher:
    kinds = {base for layer in layers_of(patcher).values() for base in type(layer).__mro__}
    methods = [
        (kind, name)
        for kind in sorted(kinds - {torch.nn.Module, object}, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
        for name in ("forward", "_forward", "_conv_forward", "forward_comfy_cast_weights", "extra")
        if name in vars(kind)
    ]
    kind, name = rng.choice(methods)
    monkeypatch.setattr(kind, name, louder(vars(kind)[name], factor_of(rng)))
    return patcher


def added_method(rng: random.Random, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> Patcher:
    """One that the class had from its base."""
    _name, layer = layer_of(rng, patcher, torch.nn.Conv2d, torch.nn.Linear, torch.nn.SiLU, torch.nn.Sequential)
    kind, before = type(layer), type(layer).__call__
    monkeypatch.setattr(kind, "__call__", louder(before, factor_of(rng)), raising=False)
    return patcher


def module_function(rng: random.Random, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> Patcher:
    functions = [
        (module, name)
        for module in (attention, openaimodel, util)
        for name, value in sorted(vars(module).items())
        if isinstance(value, types.FunctionType)
    ]
    module, name = rng.choice(functions)
    function, factor = getattr(module, name), factor_of(rng)
    changed = functools.partial(louder(function, factor)) if rng.random() < 0.3 else louder(function, factor)
    monkeypatch.setattr(module, name, changed)
    return patcher


def torch_function(rng: random.Random, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> Patcher:
    names = ("scaled_dot_product_attention", "silu", "gelu", "linear", "conv2d", "group_norm", "layer_norm", "pad")
    where: Any = F
    name = rng.choice((*names, "cat", "cos", "exp"))
    if name not in names:
        where = torch
    monkeypatch.setattr(where, name, louder(getattr(where, name), factor_of(rng)))
    return patcher


PATCHERS = object_patch, method_patch, wrapper, model_function, guidance, patch, lora, weight_wrapper, injection
MODELS = (
    hook, own_method, compiled, setting, padding, exchanged_layer, layer_class, weight, parametrisation,
)  # fmt: skip
CODE = global_hook, class_method, added_method, module_function, torch_function
ALL: tuple[Mutation, ...] = (*PATCHERS, *MODELS, *CODE)


class Trial:
    """One change: before it the engine served."""

    def __init__(self, store: EngineStore, number: int) -> None:
        self._store = store
        self._seed = number
        self.change = ALL[number % len(ALL)]

    def outcome(self) -> str:
        """ "engine", "eager", "mixed", "does not run", or what is wrong."""
        with quick_provider(self._store) as provider, pytest.MonkeyPatch.context() as monkeypatch:
            model = tiny.model()
            module = AcceleratedModule(provider, Settings(policy=BuildPolicy.FIRST_USE))
            fast = accelerate_model(model, module)
            before = tiny.sample(fast, steps=STEPS)
            assert module.status.engine_calls == STEPS, module.status.to_json()["reasons"]
            clones = [fast.clone(), model.clone()]
            changed = self.change(random.Random(self._seed), clones[0], monkeypatch)
            # A change of the model is there for both; one of a patcher is made on each.
            plain = self.change(random.Random(self._seed), clones[1], monkeypatch) if self._is_of_patcher else clones[1]
            try:
                wanted = tiny.sample(plain, steps=STEPS)
            except Exception:  # whatever torch says to a change that makes no sense
                return "does not run"
            served = module.status.engine_calls
            return self._judged(module, served, before, tiny.sample(changed, steps=STEPS), wanted)

    @property
    def _is_of_patcher(self) -> bool:
        return self.change in PATCHERS

    def _judged(
        self, module: AcceleratedModule, served: int, before: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor
    ) -> str:
        by_engine, reasons = module.status.engine_calls - served, list(module.status.to_json()["reasons"])
        if not torch.equal(torch.isfinite(found), torch.isfinite(wanted)):
            return f"wrong: not finite ({reasons})"
        if torch.isfinite(wanted).all() and distance(found, wanted) > TOLERANCE:
            return f"wrong: {distance(found, wanted):.1e} off ({reasons})"
        if by_engine < STEPS and not reasons:
            return "wrong: no reason"
        if by_engine and self.change in CODE and distance(wanted, before) > TOLERANCE:
            return f"unnoticed: the engine served although the code is another ({reasons})"
        if any("in the midst of use" in reason for reason in reasons):
            return "compared"
        return "engine" if by_engine >= STEPS else "mixed" if by_engine else "eager"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStore]:
    yield EngineStore(tmp_path_factory.mktemp("quick"))


def run(store: EngineStore, numbers: range) -> None:
    outcomes: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for number in numbers:
        trial = Trial(store, number)
        outcome = trial.outcome()
        outcomes.setdefault(trial.change.__name__, Counter())[outcome.partition(":")[0]] += 1
        if ":" in outcome:
            wrong.append(f"{number} {trial.change.__name__}: {outcome}")
    assert not wrong, "\n".join(wrong)
    assert sum(found["eager"] for found in outcomes.values()) > len(numbers) // 3
    assert sum(found["does not run"] for found in outcomes.values()) < len(numbers) // 3


def test_some_random_changes(store: EngineStore) -> None:
    run(store, range(2 * len(ALL)))


@pytest.mark.slow
def test_three_hundred_random_changes(store: EngineStore) -> None:
    run(store, range(1000, 1300))
