"""What other extensions do to a live model is honoured or leads to the plain model, with a reason that names it.

Engines are made and used before the change: the first picture after it must be right.
"""

from __future__ import annotations

import copy
import functools
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import comfy.model_management
import pytest
import torch
import torch.nn.functional as F
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.accelerate_controlnet import accelerate_controlnet
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae
from slipstream.hosts.comfy.models.autoencoders import DECODER, ENCODER
from slipstream.hosts.comfy.models.controlnet import ComfyControlNetSource
from slipstream.hosts.comfy.models.diffusion_model import ComfyDiffusionModel
from slipstream.hosts.comfy.models.vae import ComfyVaeSource
from slipstream.hosts.live_model.account import LiveModel, live_model
from slipstream.hosts.live_model.layer_walk import layers_of
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.comfyui.support.quick import quick_provider
from slipstream.tests.tensors import distance

FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)
Change = Callable[[Any, pytest.MonkeyPatch], None]
"""Changes a live model, and what a `MonkeyPatch` puts back."""


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProvider]:
    from slipstream.engine_cache import EngineStore

    with quick_provider(EngineStore(tmp_path_factory.mktemp("quick"))) as made:
        yield made


def accelerated(provider: EngineProvider, patcher: Any) -> tuple[Any, AcceleratedModule]:
    module = AcceleratedModule(provider, FIRST_USE)
    return accelerate_model(patcher, module), module


# -------------------------------------------------------------------------------------------------- the model


def seamless_tiling(unet: Any, _: pytest.MonkeyPatch) -> None:
    """As the packs for seamless textures do it."""

    def conv_forward(self: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        padded = F.pad(given, self.padding_around, mode="circular")
        return F.conv2d(padded, weight, bias, self.stride, 0, self.dilation, self.groups)

    for layer in unet.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_around = layer._reversed_padding_repeated_twice
            layer._conv_forward = types.MethodType(conv_forward, layer)


def circular_padding(unet: Any, _: pytest.MonkeyPatch) -> None:
    for layer in unet.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_mode = "circular"


def other_forward(unet: Any, _: pytest.MonkeyPatch) -> None:
    before = unet._forward
    unet._forward = lambda x, *args, **kwargs: 1.1 * before(x, *args, **kwargs)


def pre_hook(unet: Any, _: pytest.MonkeyPatch) -> None:
    unet.middle_block[0].register_forward_pre_hook(lambda layer, args: (0.5 * args[0], *args[1:]))


def hook(unet: Any, _: pytest.MonkeyPatch) -> None:
    unet.middle_block[0].register_forward_hook(lambda layer, args, result: 1.3 * result)


def global_hook(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    monkeypatch.setitem(hooks, -1, lambda layer, args, result: 1.02 * result if torch.is_tensor(result) else None)


def other_eps(unet: Any, _: pytest.MonkeyPatch) -> None:
    for layer in unet.modules():
        if isinstance(layer, torch.nn.GroupNorm):
            layer.eps = 0.1


def other_heads(unet: Any, _: pytest.MonkeyPatch) -> None:
    for layer in unet.modules():
        if isinstance(layer, attention.CrossAttention):
            layer.heads //= 2


def parametrised(unet: Any, _: pytest.MonkeyPatch) -> None:
    class Halved(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 0.5 * weight

    torch.nn.utils.parametrize.register_parametrization(unet.out[2], "weight", Halved())


def appended_layer(unet: Any, _: pytest.MonkeyPatch) -> None:
    unet.out.append(torch.nn.Tanh())


def other_list(unet: Any, _: pytest.MonkeyPatch) -> None:
    """Changed where it is."""
    unet.time_embed[1] = torch.nn.Identity()


def other_class(unet: Any, _: pytest.MonkeyPatch) -> None:
    class Louder(type(unet.out[2])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 1.2 * super().forward(*args, **kwargs)

    unet.out[2].__class__ = Louder


def class_method(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = openaimodel.ResBlock._forward
    monkeypatch.setattr(openaimodel.ResBlock, "_forward", lambda self, *args: 1.1 * before(self, *args))


def attention_function(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = attention.optimized_attention
    monkeypatch.setattr(attention, "optimized_attention", lambda *args, **kwargs: 0.8 * before(*args, **kwargs))


def partial_function(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = openaimodel.timestep_embedding
    monkeypatch.setattr(openaimodel, "timestep_embedding", functools.partial(before, max_period=100))


def torch_method(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.nn.Conv2d._conv_forward
    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", lambda self, *args: 1.05 * before(self, *args))


def torch_function(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: 0.8 * before(*args, **kwargs))


def torch_layer_function(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch's own layers call."""
    before = F.silu
    monkeypatch.setattr(F, "silu", lambda *args, **kwargs: 0.9 * before(*args, **kwargs))


def method_of_tensors(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Tensor.chunk

    def chunk(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tuple(reversed(before(tensor, *args, **kwargs)))

    monkeypatch.setattr(torch.Tensor, "chunk", chunk, raising=False)


def hidden_weight(unet: Any, _: pytest.MonkeyPatch) -> None:
    """An attribute of the instance, which is read in the place of the parameter."""
    vars(unet.out[2])["weight"] = 1.5 * unet.out[2].weight.detach()


def partial_method(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = openaimodel.ResBlock._forward

    def scaled(self: Any, *args: Any, factor: float) -> torch.Tensor:
        return factor * before(self, *args)

    monkeypatch.setattr(openaimodel.ResBlock, "_forward", functools.partialmethod(scaled, factor=1.1))


def descriptor(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = openaimodel.ResBlock._forward

    class Louder:
        def __get__(self, layer: Any, kind: type) -> Any:
            return lambda *args: 1.1 * before(layer, *args)

    monkeypatch.setattr(openaimodel.ResBlock, "_forward", Louder())


def code_of_a_method(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor, emb: torch.Tensor) -> Any:
        return self.skip_connection(x)

    monkeypatch.setattr(openaimodel.ResBlock._forward, "__code__", forward.__code__)


def imported_module(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name by which the model's code knows it."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def cat(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 0.9 * torch.cat(*args, **kwargs)

    monkeypatch.setattr(openaimodel, "th", Torch())


def torch_function_of_functions(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which those of `torch.nn.functional` call."""
    before = torch.group_norm
    monkeypatch.setattr(torch, "group_norm", lambda *args: 0.9 * before(*args))


CHANGES: dict[str, tuple[Change, str]] = {
    "seamless tiling": (seamless_tiling, r"changed how .* computes \(_conv_forward\)"),
    "circular padding": (circular_padding, r"padding_mode of .* \(circular instead of zeros\)"),
    "_forward": (other_forward, r"changed how the model computes \(_forward\)"),
    "pre-hook": (pre_hook, r"hooks into middle_block\.0"),
    "hook": (hook, r"hooks into middle_block\.0"),
    "global hook": (global_hook, "hooks into every layer"),
    "eps": (other_eps, r"changed eps of .* \(0\.1 instead of 1e-0"),
    "heads": (other_heads, r"changed heads of .*attn"),
    "parametrisation": (parametrised, r"replaced out\.2"),
    "appended layer": (appended_layer, r"put out\.3 into the model"),
    "exchanged layer": (other_list, r"replaced time_embed\.1"),
    "class of a layer": (other_class, r"test_live_model\) uses a layer class of its own for out\.2 \(Louder\)"),
    "method of a class": (class_method, r"\(.*test_live_model\) replaced comfy\..*ResBlock\._forward"),
    "optimized_attention": (attention_function, r"test_live_model\) replaced comfy.*attention\.optimized_attention"),
    "partial function": (partial_function, r"replaced comfy.*openaimodel\.timestep_embedding"),
    "Conv2d._conv_forward": (torch_method, r"test_live_model\) replaced torch.*Conv2d\._conv_forward"),
    "scaled_dot_product_attention": (torch_function, r"test_live_model\) replaced torch.*scaled_dot_product_attention"),
    "silu": (torch_layer_function, r"test_live_model\) replaced torch\.nn\.functional\.silu"),
    "weight in the instance": (hidden_weight, r"changed how out\.2 computes \(weight\)"),
    "partial method": (partial_method, r"replaced comfy\..*ResBlock\._forward"),
    "descriptor": (descriptor, r"test_live_model\) replaced comfy\..*ResBlock\._forward"),
    "code of a method": (code_of_a_method, r"\(test_live_model\.py\) replaced comfy\..*ResBlock\._forward"),
    "imported module": (imported_module, r"test_live_model\) replaced comfy\..*openaimodel\.th;"),
    "torch.group_norm": (torch_function_of_functions, r"test_live_model\) replaced torch\.group_norm"),
    "Tensor.chunk": (method_of_tensors, r"test_live_model\) replaced torch.*Tensor\.chunk"),
}


def check(
    module: AcceleratedModule, engine: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor], says: str
) -> None:
    """The engine is not used any more, the picture is that of the changed model."""
    import re

    served = module.status.engine_calls
    found, wanted = engine(), plain()
    assert module.status.engine_calls == served
    assert torch.equal(found, wanted)
    assert re.search(says, "\n".join(module.status.to_json()["reasons"])), module.status.to_json()["reasons"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_loaded_model(name: str, provider: EngineProvider) -> None:
    change, says = CHANGES[name]
    model = tiny.model()
    fast, module = accelerated(provider, model)
    before = tiny.sample(fast)
    assert module.status.engine_calls == 3, module.status.to_json()["reasons"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(model.model.diffusion_model, monkeypatch)
        assert distance(tiny.sample(model), before) > 1e-3, "the change does nothing: the test proves nothing"
        check(module, lambda: tiny.sample(fast), lambda: tiny.sample(model), says)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_from_the_third_call_on(name: str, provider: EngineProvider) -> None:
    change, says = CHANGES[name]

    def changed_in_between(patcher: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as monkeypatch:

            def callback(step: int, *_: Any) -> None:
                if step == 1:
                    change(patcher.model.diffusion_model, monkeypatch)

            return tiny.sample(patcher, steps=4, callback=callback)

    fast, module = accelerated(provider, tiny.model())
    found, wanted = changed_in_between(fast), changed_in_between(tiny.model())
    assert distance(found, wanted) < 1e-5
    assert (module.status.engine_calls, module.status.eager_calls) == (2, 2), module.status.to_json()["reasons"]


def test_what_is_undone_in_between_goes_to_the_engine_again(provider: EngineProvider) -> None:
    model = tiny.model()
    fast, module = accelerated(provider, model)
    before = tiny.sample(fast)
    handle = model.model.diffusion_model.out.register_forward_hook(lambda layer, args, result: 2 * result)
    tiny.sample(fast)
    assert module.status.engine_calls == 3
    handle.remove()
    assert torch.equal(tiny.sample(fast), before) and module.status.engine_calls == 6


# -------------------------------------------------------------------------------------------------- its weights


def other_parameter(unet: Any) -> None:
    unet.out[2].weight = torch.nn.Parameter(1.5 * unet.out[2].weight.detach(), requires_grad=False)


def other_memory(unet: Any) -> None:
    unet.out[2].weight.data = 1.5 * unet.out[2].weight.data


def no_bias(unet: Any) -> None:
    unet.out[2].bias = None


def other_layer(unet: Any) -> None:
    """Of the same class."""
    layer = copy.deepcopy(unet.out[2])
    layer.weight.data.mul_(1.5)
    unet.out[2] = layer


def exchanged_layers(unet: Any) -> None:
    parts = unet.middle_block._modules
    parts["0"], parts["2"] = parts["2"], parts["0"]


def function_of_a_weight(unet: Any) -> None:
    unet.out[2].weight_function = [lambda weight: 1.5 * weight]
    unet.out[2].comfy_cast_weights = True


WEIGHTS = [other_parameter, other_memory, no_bias, other_layer, exchanged_layers, function_of_a_weight]


@pytest.mark.parametrize("change", WEIGHTS)
def test_weights_that_change_from_the_third_call_on(change: Callable[[Any], None], provider: EngineProvider) -> None:
    def changed_in_between(patcher: Any) -> torch.Tensor:
        def callback(step: int, *_: Any) -> None:
            if step == 1:
                change(patcher.model.diffusion_model)

        return tiny.sample(patcher, steps=4, callback=callback)

    model = tiny.model()
    fast, module = accelerated(provider, model)
    found, wanted = changed_in_between(fast), changed_in_between(tiny.model())
    assert distance(wanted, tiny.sample(tiny.model(), steps=4)) > 1e-4 and distance(found, wanted) < 1e-5
    assert (module.status.engine_calls, module.status.eager_calls) == (2, 2)
    assert "weights were changed in the midst of the run" in "".join(module.status.to_json()["reasons"])
    found, wanted = tiny.sample(fast), tiny.sample(model)  # the next run begins with what is there now
    assert distance(found, wanted) < 1e-5
    assert (module.status.engine_calls == 5) == (change is not no_bias)


@pytest.mark.parametrize("change", [other_parameter, function_of_a_weight])
def test_copies_of_weights_are_of_those_that_the_model_holds(
    change: Callable[[Any], None], provider: EngineProvider
) -> None:
    """Kept from one picture to the next while ComfyUI casts them at each call."""
    model = tiny.model()
    for layer in model.model.diffusion_model.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True
            layer.weight_function = [lambda weight: 1.0 * weight]
    fast, module = accelerated(provider, model)
    before = tiny.sample(fast)
    change(model.model.diffusion_model)
    found, wanted = tiny.sample(fast), tiny.sample(model)
    assert distance(wanted, before) > 1e-2 and distance(found, wanted) < 1e-5
    assert module.status.engine_calls == 6


def test_weights_that_compute_by_themselves(provider: EngineProvider) -> None:
    class Louder(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(function, types, args, kwargs or {})
            return 1.2 * result if function is torch.conv2d else result

    model = tiny.model()
    fast, module = accelerated(provider, model)
    before = tiny.sample(fast)
    layer = model.model.diffusion_model.out[2]
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Louder), requires_grad=False)
    wanted = tiny.sample(model).as_subclass(torch.Tensor)
    assert distance(wanted, before) > 1e-3
    found = tiny.sample(fast).as_subclass(torch.Tensor)
    assert torch.equal(found, wanted) and module.status.engine_calls == 3
    assert "of a kind that another extension brought" in "".join(module.status.to_json()["reasons"])


# -------------------------------------------------------------------------------------------------- torch itself


class Louder(TorchFunctionMode):
    """Changes what a function of torch gives, while it is entered."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 1.2 * result if function is F.silu else result


class LouderKernels(TorchDispatchMode):
    """The same where torch chooses a kernel."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 1.2 * result if function is torch.ops.aten.silu.default else result


MODES: dict[str, tuple[Callable[[], Any], str]] = {
    "functions": (Louder, r"changes what torch's functions do \(Louder\)"),
    "kernels": (LouderKernels, r"changes what torch's functions do \(LouderKernels\)"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_of_torch(name: str, provider: EngineProvider) -> None:
    mode, says = MODES[name]

    def inside(patcher: Any) -> torch.Tensor:
        with mode():
            return tiny.sample(patcher)

    model = tiny.model()
    fast, module = accelerated(provider, model)
    before = tiny.sample(fast)
    assert distance(inside(model), before) > 1e-2
    check(module, lambda: inside(fast), lambda: inside(model), says)
    assert torch.equal(tiny.sample(fast), before) and module.status.engine_calls == 6


def test_a_device_by_default_is_no_change(provider: EngineProvider) -> None:
    fast, module = accelerated(provider, tiny.model())
    with torch.device("cpu"):
        tiny.sample(fast)
    assert module.status.engine_calls == 3


# ---------------------------------------------------------------------------------------------- transformers


def replaced_inside_of_calls(patcher: Any) -> Any:
    """As TeaCache and MagCache do it: for the length of each call."""
    clone = patcher.clone()

    def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
        transformer = clone.model.diffusion_model
        before = transformer.forward_orig
        with patch.multiple(transformer, forward_orig=lambda *args, **kwargs: 1.1 * before(*args, **kwargs)):
            return apply_model(given["input"], given["timestep"], **given["c"])

    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def replaced_for_good(patcher: Any) -> Any:
    """As PuLID does it."""
    transformer = patcher.model.diffusion_model
    before = transformer.forward_orig
    transformer.forward_orig = types.MethodType(
        lambda self, *args, **kwargs: 1.1 * before(*args, **kwargs), transformer
    )
    return patcher


@pytest.mark.parametrize("change", [replaced_inside_of_calls, replaced_for_good])
def test_a_change_of_a_transformer(change: Callable[[Any], Any], provider: EngineProvider) -> None:
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    before = tiny.sample(fast, "flux")
    assert module.status.engine_calls > 0, module.status.to_json()["reasons"]
    changed, plain = change(fast), change(model) if change is replaced_inside_of_calls else model
    assert distance(tiny.sample(plain, "flux"), before) > 1e-3
    says = r"changed how the model computes \(forward_orig\)"
    check(module, lambda: tiny.sample(changed, "flux"), lambda: tiny.sample(plain, "flux"), says)


def test_settings_that_change_where_they_are(provider: EngineProvider) -> None:
    model = tiny.transformer("flux")
    fast, module = accelerated(provider, model)
    tiny.sample(fast, "flux")
    assert module.status.engine_calls > 0
    model.model.diffusion_model.pe_embedder.axes_dim.reverse()
    check(module, lambda: tiny.sample(fast, "flux"), lambda: tiny.sample(model, "flux"), "changed params of the model")


# ------------------------------------------------------------------------------------------------ ControlNets


@pytest.mark.parametrize("moment", ["before the run", "in the midst of it"])
def test_a_hook_on_a_controlnet(moment: str, provider: EngineProvider) -> None:
    def picture(control: Any, changed: bool) -> torch.Tensor:
        hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(4)).movedim(-1, 1)
        copied = control.copy().set_cond_hint(hint, 1.0, (0.0, 1.0))
        handles: list[Any] = []

        def change() -> None:
            layer = control.control_model.middle_block[0]
            handles.append(layer.register_forward_hook(lambda layer, args, result: 3 * result))

        def callback(step: int, *_: Any) -> None:
            if changed and moment != "before the run" and step == 0:
                change()

        if changed and moment == "before the run":
            change()
        prompts = {"positive": tiny.conditioning(seed=1, control=copied, control_apply_to_uncond=True)}
        result = tiny.sample(model, callback=callback, **prompts)
        for handle in handles:
            handle.remove()
        return result

    model = tiny.model()
    control = tiny.controlnet()
    module = AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_controlnet(control, module)
    before = picture(fast, False)
    served = module.status.engine_calls
    assert served == 3, module.status.to_json()["reasons"]
    found, wanted = picture(fast, True), picture(control, True)
    assert distance(wanted, before) > 1e-3 and distance(found, wanted) < 1e-5
    assert module.status.engine_calls == served + (0 if moment == "before the run" else 1)
    assert "hooks into middle_block.0" in "".join(module.status.to_json()["reasons"])


# ------------------------------------------------------------------------------------------------------- VAEs


def test_a_vae_whose_model_computes_otherwise_says_so(provider: EngineProvider) -> None:
    """The replaced method calls the model's own, so that no engine is asked."""
    plain, other, module = tiny.vae(), tiny.vae(), AcceleratedModule(provider, FIRST_USE)
    fast = accelerate_vae(plain, module)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    before = fast.decode(latent)
    for vae in (plain, other):
        vae.first_stage_model.decode = functools.partial(
            lambda decode, z, **more: 0.5 * decode(z, **more), vae.first_stage_model.decode
        )
    wanted = other.decode(latent)
    assert distance(wanted, before) > 1e-2
    check(module, lambda: fast.decode(latent), lambda: wanted, "replaced what the VAE computes by")


# ------------------------------------------------------------------------------------------------- the account


@pytest.fixture
def account() -> tuple[Any, LiveModel]:
    model = tiny.model()
    return model.model.diffusion_model, live_model(model.model.diffusion_model, ComfyDiffusionModel.of(model.model))


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl", *tiny.TRANSFORMERS])
def test_nothing_is_found_in_a_model_that_nobody_touched(family: str) -> None:
    model = tiny.transformer(family) if family in tiny.TRANSFORMERS else tiny.model(family)
    comfy.model_management.load_models_gpu([model])
    live = live_model(model.model.diffusion_model, ComfyDiffusionModel.of(model.model))
    assert live.why_changed() is None
    assert [name for name in layers_of(model.model.diffusion_model) if live.why_changed(name)] == []


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_nothing_is_found_in_a_controlnet_that_nobody_touched(family: str) -> None:
    assert ComfyControlNetSource(tiny.controlnet(family)).why_not() is None


@pytest.mark.parametrize("vae", [tiny.vae(), tiny.vae(quantised=False), tiny.taesd()])
def test_nothing_is_found_in_a_vae_that_nobody_touched(vae: Any) -> None:
    for half in (DECODER, ENCODER):
        assert ComfyVaeSource(vae, half).why_not() is None


def test_it_can_be_asked_about_a_block(account: tuple[Any, LiveModel]) -> None:
    unet, live = account
    assert live.why_changed() is None and live.why_changed("middle_block") is None
    unet.input_blocks[1][0].register_forward_hook(lambda *_: None)
    assert "input_blocks.1.0" in str(live.why_changed())
    assert "input_blocks.1.0" in str(live.why_changed("input_blocks.1"))
    assert live.why_changed("middle_block") is None and live.why_changed("input_blocks.10") is None


def test_code_that_a_block_does_not_run_is_none_of_its_business(
    account: tuple[Any, LiveModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, live = account
    monkeypatch.setattr(openaimodel.Downsample, "forward", lambda self, x: x)
    assert "Downsample.forward" in str(live.why_changed())
    assert live.why_changed("middle_block") is None


def test_what_hosts_write_into_layers_is_no_change(account: tuple[Any, LiveModel]) -> None:
    unet, live = account
    for layer in unet.modules():
        layer.comfy_patched_weights = True
        layer.somebodys_note = "never read"
    assert live.why_changed() is None


def test_what_is_added_may_change_later(account: tuple[Any, LiveModel]) -> None:
    """As code does that asks for an attribute which need not be there."""
    unet, live = account
    layer = unet.input_blocks[1][0]
    layer._forward = None
    assert live.why_changed() is None
    layer._forward = lambda *_: None
    assert "input_blocks.1.0" in str(live.why_changed())
    layer._forward = None
    assert live.why_changed() is None


def untouched(unet: Any) -> None:
    pass


def bound_method(unet: Any) -> None:
    unet._forward = types.MethodType(lambda unet, *args, **kwargs: type(unet)._forward(unet, *args, **kwargs), unet)


def class_that_knows_the_model(unet: Any) -> None:
    kind = type(unet.out[2])
    unet.out[2].__class__ = type(
        kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x) + unet.dummy}
    )


@pytest.mark.parametrize("change", [untouched, bound_method, class_that_knows_the_model])
def test_it_holds_no_model_alive(change: Callable[[Any], None]) -> None:
    import gc
    import weakref

    model = tiny.model()
    change(model.model.diffusion_model)
    live = live_model(model.model.diffusion_model, ComfyDiffusionModel.of(model.model))
    assert (live.why_changed() is None) == (change is untouched)
    known = weakref.ref(model.model.diffusion_model)
    del model, live
    gc.collect()
    assert known() is None


def test_a_copy_of_a_model_has_an_account_of_its_own(account: tuple[Any, LiveModel]) -> None:
    unet, live = account
    assert live.why_changed() is None
    copied = copy.deepcopy(unet)
    copied.out.register_forward_hook(lambda *_: None)
    architecture = ComfyDiffusionModel.of(tiny.model().model)
    assert "hooks into out" in str(live_model(copied, architecture).why_changed())
    assert live.why_changed() is None


def test_asking_again_costs_little() -> None:
    """A model as large as SDXL's, by its layers."""
    import comfy.ops

    from slipstream.benchmarks.subjects.models import SDXL

    config = {name: value for name, value in SDXL.items() if name not in ("dtype", "disable_unet_model_creation")}
    config |= {"num_head_channels": 64, "num_heads": -1, "operations": comfy.ops.disable_weight_init}

    def made() -> torch.nn.Module:
        return openaimodel.UNetModel(**config, device="meta", dtype=torch.float32).eval()

    unet = made()
    live = LiveModel(unet, made)
    assert live.why_changed() is None and len(layers_of(unet)) > 2000
    asking, walking = [], []
    for _ in range(20):
        asking.append(_thread_seconds(live.why_changed))
        walking.append(_thread_seconds(lambda: list(unet.modules())))
    assert min(asking) < 6 * min(walking)  # two to three times as long, on any core


def _thread_seconds(work: Callable[[], Any]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


# ------------------------------------------------------------------------------------------------------- copies


def test_a_copy_of_an_accelerated_model(provider: EngineProvider) -> None:
    """Packs for seamless textures change a deep copy."""
    try:
        copy.deepcopy(tiny.model())
    except TypeError:
        pytest.skip("this ComfyUI's own models cannot be copied")
    fast, module = accelerated(provider, tiny.model())
    before = tiny.sample(fast)
    copied = copy.deepcopy(fast)
    seamless_tiling(copied.model.diffusion_model, pytest.MonkeyPatch())
    plain = tiny.model()
    seamless_tiling(plain.model.diffusion_model, pytest.MonkeyPatch())
    assert torch.equal(tiny.sample(copied), tiny.sample(plain))
    assert module.status.engine_calls == 3
    assert torch.equal(tiny.sample(fast), before) and module.status.engine_calls == 6
