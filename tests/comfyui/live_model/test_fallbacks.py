"""What an engine cannot honour runs on the plain model, with one reason, and the picture is right."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sample
import pytest
import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.patcher_extension import CallbacksMP, PatcherInjection

from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate import accelerate_model
from slipstream.hosts.comfy.node_state.status_text import describe
from slipstream.hosts.comfy.run import model_calls
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Settings, parse_resolutions
from slipstream.tests.comfyui.support.changes import attention_override, compiled_elsewhere
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

Patcher = Any
FIRST_USE = Settings(policy=BuildPolicy.FIRST_USE)


def same(patcher: Patcher) -> Patcher:
    return patcher


def attention_patch(patcher: Patcher) -> Patcher:
    clone = patcher.clone()
    clone.set_model_attn1_patch(lambda q, k, v, options: (q * 0.5, k, v))
    return clone


def attention_replacement(patcher: Patcher) -> Patcher:
    """As IP-Adapter and PAG do."""
    clone = patcher.clone()
    clone.set_model_attn2_replace(lambda q, k, v, options: v.mean(1, keepdim=True).expand_as(q), "input", 1)
    return clone


def free_u(patcher: Patcher) -> Patcher:
    clone = patcher.clone()
    clone.set_model_output_block_patch(lambda hidden, skip, options: (hidden * 1.1, skip))
    return clone


def replaced_layer(patcher: Patcher) -> Patcher:
    clone = patcher.clone()
    layer = clone.get_model_object("diffusion_model.out.0")
    clone.add_object_patch("diffusion_model.out.0", torch.nn.Sequential(layer, torch.nn.Hardtanh(-0.5, 0.5)))
    return clone


def hooked_prompt() -> list[Any]:
    """A prompt that brings a LoRA of its own (Create Hook LoRA)."""
    hook = comfy.hooks.WeightHook()
    weight = "diffusion_model.out.2.weight"
    hook.weights = {weight: ("diff", (torch.randn(4, 32, 3, 3, generator=torch.Generator().manual_seed(3)),))}
    hook.need_weight_init = False
    group = comfy.hooks.HookGroup()
    group.add(hook)
    return tiny.conditioning(seed=1, hooks=group)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        says: words of the reason.
    """

    says: str
    change: Callable[[Patcher], Patcher] = same
    sample: Callable[[], dict[str, Any]] = field(default=dict)
    settings: Settings = FIRST_USE


CASES = {
    "weight hooks": Case("hooks", sample=lambda: {"positive": hooked_prompt()}),
    "attention patch": Case("attn1_patch", attention_patch),
    "attention replacement": Case("attn2", attention_replacement),
    "attention override": Case("attention function", attention_override),
    "output patch": Case("output_block_patch", free_u),
    "replaced layer": Case("diffusion_model.out.0", replaced_layer),
    "TorchCompileModel": Case("TorchCompileModel", compiled_elsewhere),
    "manual": Case("Build Engine", settings=Settings(policy=BuildPolicy.MANUAL)),
    "another resolution": Case(
        "512×512", settings=Settings(policy=BuildPolicy.FIRST_USE, resolutions=parse_resolutions("512x512"))
    ),
    "tensorrt": Case("TensorRT", settings=Settings(backend=BackendChoice.TENSORRT, policy=BuildPolicy.FIRST_USE)),
}


def accelerated(store: EngineStore, patcher: Patcher, settings: Settings) -> tuple[Patcher, AcceleratedModule]:
    module = AcceleratedModule(EngineProvider(store), settings)
    return accelerate_model(patcher, module), module


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ["before", "after"])
def test_plain_model_takes_over_with_one_reason(name: str, place: str, tmp_path: Any, caplog: Any) -> None:
    case = CASES[name]
    model = tiny.model()
    wanted = tiny.sample(case.change(model), **case.sample())
    before, after = (case.change, same) if place == "before" else (same, case.change)
    fast, module = accelerated(EngineStore(tmp_path), before(model), case.settings)
    found = tiny.sample(after(fast), **case.sample())
    assert torch.equal(found, wanted)
    status = module.status.to_json()
    assert status["engine_calls"] == 0 and status["eager_calls"] >= 3
    assert len(status["reasons"]) == 1 and case.says in next(iter(status["reasons"]))
    assert case.says in describe(module)
    assert sum("Slipstream runs your model without an engine" in record.getMessage() for record in caplog.records) == 1


def test_a_model_without_an_engine_is_looked_at_once_a_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, why_changed = [], model_calls.why_changed

    def counted(*args: Any, **kwargs: Any) -> Any:
        looks.append(args)
        return why_changed(*args, **kwargs)

    monkeypatch.setattr(model_calls, "why_changed", counted)
    model = tiny.model()
    fast, module = accelerated(EngineStore(tmp_path), model, Settings(policy=BuildPolicy.MANUAL))
    assert torch.equal(tiny.sample(fast, steps=8), tiny.sample(model, steps=8))
    assert module.status.eager_calls == 8 and len(looks) == 1, "each look costs a large model milliseconds"


def replaced_function(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = openaimodel.timestep_embedding
    monkeypatch.setattr(
        openaimodel, "timestep_embedding", lambda t, *args, **kwargs: embedding(0.5 * t, *args, **kwargs)
    )


def replaced_method(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = attention.BasicTransformerBlock.forward
    monkeypatch.setattr(
        attention.BasicTransformerBlock,
        "forward",
        functools.wraps(forward)(lambda self, x, *args, **kwargs: forward(self, 1.05 * x, *args, **kwargs)),
    )


def disguised_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes for ComfyUI's own: only its results tell."""
    names = dict(vars(attention))
    names["_before"] = attention.BasicTransformerBlock.forward
    exec("def forward(self, x, *args, **kwargs): return _before(self, 1.05 * x, *args, **kwargs)", names)  # noqa: S102
    monkeypatch.setattr(attention.BasicTransformerBlock, "forward", names["forward"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replaced_function, "test_fallbacks) replaced comfy.ldm.modules.diffusionmodules.openaimodel"),
        (replaced_method, "test_fallbacks) replaced comfy.ldm.modules.attention.BasicTransformerBlock.forward"),
        (disguised_method, "was right when it was built, but differs from the model"),
    ],
)
def test_an_extension_that_changes_comfyuis_own_code(
    engine_store: EngineStore, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], says: str
) -> None:
    """The engine is there and was verified; the extension came with this start of ComfyUI."""
    tiny.sample(accelerated(engine_store, tiny.model(), FIRST_USE)[0])
    change(monkeypatch)
    model = tiny.model()
    fast, module = accelerated(engine_store, model, FIRST_USE)
    assert torch.equal(tiny.sample(fast), tiny.sample(model))
    assert module.status.engine_calls == 0 and says in describe(module)
    monkeypatch.undo()
    fast, module = accelerated(engine_store, model, FIRST_USE)
    tiny.sample(fast)
    assert (module.status.engine_calls, module.status.eager_calls) == (3, 0)


def injected(patcher: Patcher) -> Patcher:
    """As bypass LoRA and motion modules: layers change when ComfyUI loads the model, and are put back afterwards."""

    def inject(owner: Any) -> None:
        layer = owner.model.diffusion_model.input_blocks[0][0]
        vars(layer)["forward"] = lambda x, plain=layer.forward: plain(x) * 1.2

    def eject(owner: Any) -> None:
        vars(owner.model.diffusion_model.input_blocks[0][0]).pop("forward", None)

    clone = patcher.clone()
    clone.set_injections("another pack", [PatcherInjection(inject=inject, eject=eject)])
    return clone


def changed_at_load(patcher: Patcher) -> Patcher:
    """The same by other means, which nobody but the layer itself tells of."""

    def change(owner: Any, *_: Any) -> None:
        layer = owner.model.diffusion_model.input_blocks[0][0]
        if "forward" not in vars(layer):
            vars(layer)["forward"] = lambda x, plain=layer.forward: plain(x) * 1.2

    clone = patcher.clone()
    clone.add_callback_with_key(CallbacksMP.ON_LOAD, "another pack", change)
    return clone


def compiled_at_load(patcher: Patcher) -> Patcher:
    """As torch itself replaces what a layer computes."""

    def change(owner: Any, *_: Any) -> None:
        layer = owner.model.diffusion_model.input_blocks[0][0]
        if layer._compiled_call_impl is None:
            layer._compiled_call_impl = lambda x, plain=layer._call_impl: plain(x) * 1.2

    clone = patcher.clone()
    clone.add_callback_with_key(CallbacksMP.ON_LOAD, "another pack", change)
    return clone


@pytest.mark.parametrize(
    ("change", "reason"),
    [(injected, "injects layers"), (changed_at_load, "changed how"), (compiled_at_load, "changed how")],
)
def test_layers_that_change_while_the_model_is_loaded(
    change: Callable[[Patcher], Patcher], reason: str, engine_store: EngineStore
) -> None:
    """The engine is known and was checked in this process; the first picture after the change must be right."""
    model = tiny.model(seed=31)
    fast, module = accelerated(engine_store, model, FIRST_USE)
    before = tiny.sample(fast)
    assert module.status.engine_calls == 3, module.status.to_json()["reasons"]
    comfy.model_management.unload_all_models()
    for _ in range(2):
        found = tiny.sample(change(fast))
        wanted = tiny.sample(change(model))
        assert torch.equal(found, wanted) and not torch.equal(found, before)
    assert module.status.engine_calls == 3
    assert any(reason in why for why in module.status.to_json()["reasons"])


def test_training_runs_plain(engine_store: EngineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "in_training", True, raising=False)
    fast, module = accelerated(engine_store, tiny.model(), FIRST_USE)
    tiny.sample(fast)
    assert module.status.engine_calls == 0 and "trained" in "".join(module.status.to_json()["reasons"])


def test_off_leaves_everything_alone(tmp_path: Any) -> None:
    model = tiny.model()
    fast, module = accelerated(EngineStore(tmp_path), model, Settings(backend=BackendChoice.OFF))
    assert torch.equal(tiny.sample(fast), tiny.sample(model))
    assert module.status.engine_calls == 0


def test_unsupported_architecture_says_so(tmp_path: Any) -> None:
    model = tiny.model()
    kind = type(model.model.diffusion_model)
    model.model.diffusion_model.__class__ = type("OtherUNet", (kind,), {})
    fast, module = accelerated(EngineStore(tmp_path), model, FIRST_USE)
    found = tiny.sample(fast)
    assert torch.isfinite(found).all()
    assert "OtherUNet" in module.status.to_json()["now"]


def test_interrupt_during_sampling_leaves_the_engine_usable(engine_store: EngineStore) -> None:
    model = tiny.model()
    fast, module = accelerated(engine_store, model, FIRST_USE)
    wanted = tiny.sample(fast)

    def interrupt(step: int, *_: Any) -> None:
        if step == 1:
            raise comfy.model_management.InterruptProcessingException()

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(fast, callback=interrupt)
    assert torch.equal(tiny.sample(fast), wanted)
    assert module.status.eager_calls == 0


def test_interrupt_during_a_build_ends_it_and_leaves_nothing(tmp_path: Any) -> None:
    fast, module = accelerated(EngineStore(tmp_path), tiny.model(), FIRST_USE)
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(fast)
    comfy.model_management.interrupt_current_processing(False)
    provider = module.provider
    for ticket in provider.queue.pending():
        assert ticket.token.cancelled and ticket.wait(5)
    assert provider.queue.pending() == [] and provider.store.list() == []
    assert not any(path.is_file() for path in (tmp_path / "tmp").rglob("*"))


def test_no_compiler_runs_plain_with_the_way_to_get_one(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert shutil.which("g++") is None
    model = tiny.model()
    fast, module = accelerated(EngineStore(tmp_path / "store"), model, FIRST_USE)
    assert torch.equal(tiny.sample(fast), tiny.sample(model))
    assert "C++ compiler" in module.status.to_json()["now"]


def test_a_cached_engine_runs_where_nothing_can_be_compiled(engine_store: EngineStore, monkeypatch: Any) -> None:
    """Loading from the cache never compiles: there is no compiler, and no process can be started."""
    import subprocess

    model = tiny.model()
    fast, module = accelerated(engine_store, model, FIRST_USE)
    wanted = tiny.sample(fast)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(torch.export, "export", refuse)
    fast, module = accelerated(engine_store, model, FIRST_USE)  # a new provider: nothing is loaded yet
    assert torch.equal(tiny.sample(fast), wanted)
    assert module.status.engine_calls == 3 and module.status.eager_calls == 0


def test_a_store_that_cannot_be_written_runs_plain(tmp_path: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    model = tiny.model()
    fast, module = accelerated(EngineStore(blocked), model, FIRST_USE)
    assert torch.equal(tiny.sample(fast), tiny.sample(model))
    assert module.status.engine_calls == 0 and str(blocked) in module.status.to_json()["now"]


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "missing"])
def test_a_damaged_engine_is_set_aside_and_the_plain_model_runs(
    damage: str, engine_store: EngineStore, tmp_path: Any
) -> None:
    model = tiny.model()
    warm, _ = accelerated(engine_store, model, FIRST_USE)
    wanted = tiny.sample(warm)
    shutil.copytree(engine_store.root, tmp_path / "copy")
    store = EngineStore(tmp_path / "copy")
    package = next(entry for entry in store.list() if "64×64 batch 2" in entry.manifest.label).path("package.pt2")
    content = bytearray(package.read_bytes())
    if damage == "missing":
        package.unlink()
    elif damage == "truncated":
        package.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        package.write_bytes(content)
    before = {entry.digest for entry in store.list()}
    fast, module = accelerated(store, model, Settings(policy=BuildPolicy.MANUAL))
    found = tiny.sample(fast)
    assert module.status.engine_calls == 0 and module.status.eager_calls == 3
    assert distance(found, wanted) < 1e-4
    assert {entry.digest for entry in store.list()} < before or damage != "flipped byte"
    assert list((tmp_path / "copy" / "quarantine").iterdir())


def test_an_engine_that_computes_something_else_is_refused(engine_store: EngineStore, monkeypatch: Any) -> None:
    from slipstream.compile_backend.engine import CompiledEngine

    model = tiny.model(seed=77)  # weights that no engine has been checked with
    compute = CompiledEngine.__call__
    monkeypatch.setattr(
        CompiledEngine,
        "__call__",
        lambda self, **inputs: {name: out * 1.001 for name, out in compute(self, **inputs).items()},
    )
    fast, module = accelerated(engine_store, model, FIRST_USE)
    found = tiny.sample(fast)
    assert torch.equal(found, tiny.sample(model))
    assert module.status.engine_calls == 0 and "differs from the model" in module.status.to_json()["now"]


def test_every_weight_reaches_the_engine(engine_store: EngineStore) -> None:
    """A compiler may write small or shared weights into its code: each tensor is changed once."""
    from slipstream.hosts.comfy.models.unet_source import ComfyUNetSource
    from slipstream.runtime.planning.plan import CallShape
    from slipstream.runtime.provider import HostHooks

    model = tiny.model()
    provider = EngineProvider(engine_store)
    comfy.model_management.load_models_gpu([model])
    source = ComfyUNetSource(model)
    shapes = {"x": (2, 4, 8, 8), "timesteps": (2,), "context": (2, 77, 64)}
    dtypes = dict.fromkeys(shapes, torch.float32)
    inputs = source.architecture.random_inputs(shapes, dtypes, source.device, seed=1)
    offer = provider.offer(source, CallShape.of(inputs), FIRST_USE, HostHooks())
    assert offer.engine is not None, offer.reason
    engine = offer.engine.engine
    unchanged = engine(**inputs)["out"].clone()
    for name, parameter in source.unet.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
            engine.update_weights(source.bind(source.precision).tensors)
            found, wanted = engine(**inputs)["out"], source.eager(inputs)["out"]
            parameter.copy_(kept)
        assert distance(found, wanted) < 1e-5, name
        assert not torch.equal(found, unchanged), f"{name} does not reach the output: the test proves nothing"
    provider.pool.give_back(offer.engine)
