"""What people do with a VAE, each on engines: pictures and latents equal the plain ones, and engines made them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy.patcher_extension import CallbacksMP

import nodes
from slipstream.core.spec import Optimize, Precision
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.accelerate_vae import accelerate_vae, accelerated_vae_module
from slipstream.hosts.comfy.models.autoencoders import DECODER, ENCODER, Half
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BackendChoice, BuildPolicy, Resolution, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

TOLERANCE = 1e-4
KINDS = {"vae": tiny.vae, "taesd": tiny.taesd}
Vae = Any


@pytest.fixture(scope="module")
def provider(engine_store: EngineStore) -> EngineProvider:
    return EngineProvider(engine_store)


def settings(**choices: Any) -> Settings:
    return Settings(**{"policy": BuildPolicy.FIRST_USE, "optimize": Optimize.FAST_BUILD, **choices})


@pytest.fixture(autouse=True)
def _as_comfyui_runs_nodes() -> Iterator[None]:
    with torch.inference_mode():
        yield


def accelerated(provider: EngineProvider, vae: Vae, **choices: Any) -> tuple[Vae, AcceleratedModule]:
    module = AcceleratedModule(provider, settings(**choices))
    return accelerate_vae(vae, module), module


def latents(batch: int = 1, size: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 4, size, size, generator=torch.Generator().manual_seed(seed))


def pictures(batch: int = 1, size: int = 64, seed: int = 1) -> torch.Tensor:
    """As ComfyUI's IMAGE: from 0 to 1, channels last."""
    return torch.rand(batch, size, size, 3, generator=torch.Generator().manual_seed(seed))


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert wanted.std() > 0.02 and distance(found, wanted) < TOLERANCE


def assert_calls(module: AcceleratedModule, engine: int, eager: int = 0) -> None:
    counted = module.status.engine_calls, module.status.eager_calls
    assert counted == (engine, eager), module.status.to_json()["reasons"]


def reason_of(module: AcceleratedModule) -> str:
    (reason,) = module.status.to_json()["reasons"]
    return str(reason)


# ----------------------------------------------------------------------------------------------- on engines


@pytest.mark.parametrize("kind", KINDS)
def test_decode(kind: str, provider: EngineProvider) -> None:
    vae = KINDS[kind]()
    fast, module = accelerated(provider, vae)
    assert_same(fast.decode(latents()), vae.decode(latents()))
    assert_calls(module, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_encode(kind: str, provider: EngineProvider) -> None:
    vae = KINDS[kind]()
    fast, module = accelerated(provider, vae)
    assert_same(fast.encode(pictures()), vae.encode(pictures()))
    assert_calls(module, 1)


def test_a_batch_runs_picture_by_picture_on_one_engine(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    assert_same(fast.decode(latents(3)), vae.decode(latents(3)))
    assert_calls(module, 3)
    assert_same(fast.encode(pictures(2)), vae.encode(pictures(2)))
    assert_calls(module, 5)
    assert [use["calls"] for use in module.status.to_json()["engines"]] == [3, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "given", "scale", "part"),
    [("decode_tiled", latents, 1, "decoder"), ("encode_tiled", pictures, 8, "encoder")],
)
def test_every_tile_of_a_picture_is_on_an_engine(
    method: str, given: Any, scale: int, part: str, provider: EngineProvider
) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    tiles = {"tile_x": 8 * scale, "tile_y": 8 * scale, "overlap": 2 * scale}
    whole = given(size=14 * scale)
    runs = count_runs(module)
    assert_same(getattr(fast, method)(whole, **tiles), getattr(vae, method)(whole, **tiles))
    assert_calls(module, 4 + 6 + 6)
    labels = {use["label"] for use in module.status.to_json()["engines"]}
    assert labels == {f"VAE {part} {size} batch 1" for size in ("64×64", "32×112", "112×32")}
    assert len(runs) == 1, "all tiles share one run"


def count_runs(module: AcceleratedModule) -> list[Any]:
    """Sources of the runs that begin from now on."""
    began: list[Any] = []
    run = module.run

    def counted(source: Any, *args: Any, **kwargs: Any) -> Any:
        began.append(source)
        return run(source, *args, **kwargs)

    module.run = counted  # type: ignore[method-assign]
    return began


@pytest.mark.parametrize("tiled", [False, True])
def test_comfyuis_nodes_decode(tiled: bool, provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    samples = {"samples": latents()}
    if tiled:  # one tile takes it all, in each of the three shapes
        found, wanted = (nodes.VAEDecodeTiled().decode(each, samples, 128, 32)[0] for each in (fast, vae))
    else:
        found, wanted = (nodes.VAEDecode().decode(each, samples)[0] for each in (fast, vae))
    assert_same(found, wanted)
    assert_calls(module, 3 if tiled else 1)


def test_img2img_by_comfyuis_nodes(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    found, wanted = (nodes.VAEEncode().encode(each, pictures())[0]["samples"] for each in (fast, vae))
    assert_same(found, wanted)
    assert_calls(module, 1)


def test_inpainting_by_comfyuis_nodes(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    mask = torch.ones(1, 64, 64).tril()
    found, wanted = (nodes.VAEEncodeForInpaint().encode(each, pictures(), mask)[0] for each in (fast, vae))
    assert_same(found["samples"], wanted["samples"])
    assert torch.equal(found["noise_mask"], wanted["noise_mask"])
    assert_calls(module, 1)


def test_a_picture_with_odd_sides_is_cropped_as_ever(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    odd = pictures(size=70)
    assert_same(fast.encode(odd), vae.encode(odd))
    assert_calls(module, 1)


def test_nodes_that_call_the_model_itself(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    comfy.model_management.load_models_gpu([fast.patcher])
    with torch.inference_mode():
        assert_same(fast.first_stage_model.decode(latents()), vae.first_stage_model.decode(latents()))
        pixels = pictures().movedim(-1, 1) * 2 - 1
        assert_same(fast.first_stage_model.encode(pixels), vae.first_stage_model.encode(pixels))
    assert_calls(module, 2)


def test_a_changed_weight_is_in_the_next_picture(provider: EngineProvider) -> None:
    """One engine serves every VAE of an architecture, with the weights that are there."""
    fast, module = accelerated(provider, tiny.vae())
    other, other_module = accelerated(provider, tiny.vae(seed=2))
    wanted = [tiny.vae().decode(latents()), tiny.vae(seed=2).decode(latents())]
    assert_same(fast.decode(latents()), wanted[0])
    assert_same(other.decode(latents()), wanted[1])
    assert_same(fast.decode(latents()), wanted[0])
    assert_calls(module, 2)
    assert_calls(other_module, 1)
    assert (wanted[0] - wanted[1]).abs().max() > 0.1


def test_a_patch_of_weights_is_honoured(provider: EngineProvider) -> None:
    def patched() -> Vae:
        vae = tiny.vae()
        weight = vae.first_stage_model.state_dict()["decoder.conv_out.weight"]
        assert vae.patcher.add_patches({"decoder.conv_out.weight": ("diff", (torch.ones_like(weight) * 0.05,))})
        return vae

    wanted, plain = patched().decode(latents()), tiny.vae().decode(latents())
    fast, module = accelerated(provider, patched())
    assert_same(fast.decode(latents()), wanted)
    assert_calls(module, 1)
    assert (wanted - plain).abs().max() > 0.05


def test_two_nodes_in_a_row(provider: EngineProvider) -> None:
    vae = tiny.vae()
    first, first_module = accelerated(provider, vae)
    second, second_module = accelerated(provider, first)
    assert_same(second.decode(latents()), vae.decode(latents()))
    assert_calls(first_module, 0)
    assert_calls(second_module, 1)
    assert type(second) is type(first)


# ------------------------------------------------------------------------------------ it is ComfyUI's VAE still


def test_it_is_a_vae_with_the_real_weights(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, _ = accelerated(provider, vae)
    assert isinstance(fast, comfy.sd.VAE) and isinstance(fast.first_stage_model, type(vae.first_stage_model))
    assert fast.patcher is vae.patcher
    saved, real = fast.get_sd(), vae.get_sd()
    assert saved.keys() == real.keys() and all(saved[name] is not None for name in saved)
    assert all(saved[name].data_ptr() == real[name].data_ptr() for name in real)
    ours, theirs = list(fast.first_stage_model.parameters()), list(vae.first_stage_model.parameters())
    assert len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))
    assert fast.first_stage_model.decoder is vae.first_stage_model.decoder


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_accelerated_too(copied: Callable[[Vae], Vae], provider: EngineProvider) -> None:
    fast, module = accelerated(provider, tiny.vae())
    made = copied(fast)
    assert_same(made.decode(latents()), tiny.vae().decode(latents()))
    assert_calls(module, 1)
    assert accelerated_vae_module(made) is module


def test_a_copy_of_its_model_is_a_plain_one(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    made = copy.deepcopy(fast.first_stage_model)
    assert type(made) is type(vae.first_stage_model)
    with torch.no_grad():
        assert_same(made.decode(latents()), vae.first_stage_model.decode(latents()))
    assert_calls(module, 0)


def test_what_is_set_on_its_model_is_set_on_the_real_one(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    fast.first_stage_model.decoder = torch.nn.Identity()
    assert type(vae.first_stage_model.decoder) is torch.nn.Identity
    fast.first_stage_model = other = tiny.vae(seed=2).first_stage_model
    assert fast.first_stage_model.decoder is other.decoder
    fast.first_stage_model = fast.first_stage_model
    assert vars(fast)["first_stage_model"] is other


def test_the_plain_vae_is_left_alone(provider: EngineProvider) -> None:
    vae = tiny.vae()
    model, before = vae.first_stage_model, {name: tensor.clone() for name, tensor in vae.get_sd().items()}
    fast, module = accelerated(provider, vae)
    fast.decode(latents())
    vae.decode(latents())
    assert_calls(module, 1)
    assert type(vae) is comfy.sd.VAE and vae.first_stage_model is model and accelerated_vae_module(vae) is None
    assert "decode" not in vars(model) and "slipstream" not in vars(vae)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vae.get_sd().items())


def test_another_device_may_be_chosen_behind_it(provider: EngineProvider) -> None:
    """As ComfyUI's Select VAE Device: a copy with a patcher of its own and the model that this holds."""
    fast, module = accelerated(provider, tiny.vae())
    made = copy.copy(fast)
    made.patcher = fast.patcher.clone()
    made.first_stage_model = made.patcher.model
    assert_same(made.decode(latents()), tiny.vae().decode(latents()))
    assert_calls(module, 1)


# ----------------------------------------------------------------------------------------- on the plain model


def without_engines(vae: Vae) -> None:
    vae.first_stage_model.decoder.__class__ = type("OtherDecoder", (type(vae.first_stage_model.decoder),), {})


def circular(vae: Vae) -> None:
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_mode = "circular"
            layer._reversed_padding_repeated_twice = [layer.padding[0]] * 4


def object_patched(vae: Vae) -> None:
    vae.patcher.add_object_patch("decoder.mid.block_1.dropout", torch.nn.Identity())


def hooked(vae: Vae) -> None:
    vae.first_stage_model.decoder.register_forward_hook(lambda module, args, result: result * 0.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_engines, "OtherDecoder"),
        (circular, "is not as ComfyUI makes it"),
        (object_patched, "another node replaces"),
        (hooked, "hooks into decoder"),
    ],
)
def test_a_changed_vae_decodes_as_it_is(
    change: Callable[[Vae], None], reason: str, provider: EngineProvider, caplog: pytest.LogCaptureFixture
) -> None:
    vae = tiny.vae()
    change(vae)
    fast, module = accelerated(provider, vae)
    assert reason in module.status.to_json()["now"], "said before anything runs"
    wanted = vae.decode(latents(2))
    assert torch.equal(fast.decode(latents(2)), wanted)
    assert torch.equal(fast.decode(latents(2)), wanted)
    assert_calls(module, 0, 2)
    assert reason in reason_of(module)
    told = [record for record in caplog.records if "Slipstream runs your VAE without an engine" in record.getMessage()]
    assert len(told) == 1
    assert (wanted - tiny.vae().decode(latents(2))).abs().max() > 0.01 or change in (without_engines, object_patched)


def test_what_is_changed_while_comfyui_loads_the_vae_is_seen(provider: EngineProvider) -> None:
    """ComfyUI asks what memory a VAE needs before it loads it: what was seen then may no longer be so."""
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    fast.decode(latents())
    assert_calls(module, 1)
    comfy.model_management.unload_all_models()
    vae.patcher.add_callback(CallbacksMP.ON_LOAD, lambda *_: hooked(vae))
    changed = fast.decode(latents())
    assert_calls(module, 1, 1)
    assert "hooks into decoder" in reason_of(module)
    assert torch.equal(changed, vae.decode(latents()))


def test_a_method_that_another_node_replaced_later_is_what_runs(provider: EngineProvider) -> None:
    fast, module = accelerated(provider, tiny.vae())
    model = fast.first_stage_model
    decode = model.decode
    model.decode = lambda z, **kwargs: decode(z, **kwargs) * 0.5
    wanted = tiny.vae()
    with torch.inference_mode():
        comfy.model_management.load_models_gpu([wanted.patcher])
        half = wanted.first_stage_model.decode(latents()) * 0.5
    assert_same(fast.decode(latents()), wanted.process_output(half.clone()).movedim(1, -1))
    assert_calls(module, 1)


def test_a_vae_of_another_kind_works(provider: EngineProvider) -> None:
    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def decode(self, z: torch.Tensor) -> torch.Tensor:
            return z[:, :3].repeat_interleave(8, 2).repeat_interleave(8, 3) * self.scale

    vae = tiny.vae()
    vae.first_stage_model = Flat()
    vae.patcher = comfy.model_patcher.ModelPatcher(vae.first_stage_model, vae.device, vae.patcher.offload_device)
    fast, module = accelerated(provider, vae)
    assert torch.equal(fast.decode(latents()), vae.decode(latents()))
    assert_calls(module, 0, 1)
    assert "VAEs of this kind (Flat) have no engines yet" in reason_of(module)


def test_an_empty_vae_says_what_comfyui_says(provider: EngineProvider) -> None:
    vae = comfy.sd.VAE(sd={})
    assert vae.first_stage_model is None
    fast, module = accelerated(provider, vae)
    with pytest.raises(RuntimeError, match="VAE is invalid"):
        fast.decode(latents())
    assert_calls(module, 0)


def test_acceleration_switched_off(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae, backend=BackendChoice.OFF)
    assert torch.equal(fast.decode(latents()), vae.decode(latents()))
    assert_calls(module, 0, 1)
    assert "switched off" in reason_of(module)


def test_a_size_that_is_not_listed(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae, resolutions=(Resolution(64, 64),))
    assert_same(fast.decode(latents()), vae.decode(latents()))
    assert_same(fast.encode(pictures()), vae.encode(pictures()))
    assert_calls(module, 2)
    assert_same(fast.decode(latents(size=16)), vae.decode(latents(size=16)))
    assert_same(fast.encode(pictures(size=128)), vae.encode(pictures(size=128)))
    assert_calls(module, 2, 2)
    assert reason_of(module) == "128×128 is not in the node's list of resolutions (64×64)"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model: model.decode(latents(), wavelength=3), "is given 'wavelength'"),
        (lambda model: model.decode(latents().double()), "is given torch.float64"),
        (lambda model: model.encode(pictures().movedim(-1, 1), True), "is given True"),
        (lambda model: model.decode(latents()[:, :3]), "is given 1×3×8×8"),
    ],
)
def test_calls_that_engines_do_not_take(call: Any, reason: str, provider: EngineProvider) -> None:
    fast, module = accelerated(provider, tiny.vae())
    comfy.model_management.load_models_gpu([fast.patcher])
    outcomes = []
    for model in (fast.first_stage_model, vars(fast)["first_stage_model"]):
        try:
            outcomes.append(call(model))
        except (RuntimeError, TypeError) as error:  # as the plain model has it
            outcomes.append(str(error))
    found, wanted = (outcome[0] if isinstance(outcome, tuple) else outcome for outcome in outcomes)
    assert torch.equal(found, wanted) if torch.is_tensor(wanted) else found == wanted
    assert_calls(module, 0, 1)
    assert reason in reason_of(module)


def test_gradients_are_the_plain_models(provider: EngineProvider) -> None:
    with torch.inference_mode(False):
        fast, module = accelerated(provider, tiny.vae())
        comfy.model_management.load_models_gpu([fast.patcher])
        z = latents().requires_grad_()
        fast.first_stage_model.decode(z).sum().backward()
    assert z.grad is not None and z.grad.abs().max() > 0
    assert_calls(module, 0, 1)
    assert "gradients are asked for" in reason_of(module)


def test_an_interrupted_build_ends_the_call(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        fast.decode(latents(size=24))  # which no other test has an engine for
    assert_calls(module, 0)
    assert not fast.slipstream._open and provider._is_idle() and not provider.queue.pending()
    assert_same(fast.decode(latents()), vae.decode(latents()))
    assert_calls(module, 1)


# ------------------------------------------------------------------------------------------------ fp16, memory


def overflowing() -> Vae:
    """Right for latents of size 1; larger ones are too large for fp16 behind the first layer, and fine in fp32."""
    vae = tiny.vae()
    vae.first_stage_model.decoder.conv_in.weight.data *= 100
    return vae


@pytest.mark.slow
def test_numbers_too_large_for_fp16_give_the_plain_picture(engine_store: EngineStore) -> None:
    provider = EngineProvider(engine_store)
    vae, large = overflowing(), latents() * 3000
    fast, module = accelerated(provider, vae, precision=Precision.FP16)
    found = fast.decode(latents())
    assert distance(vae.decode(latents()), found) < 0.02
    assert_calls(module, 1)
    wanted = vae.decode(large)
    assert wanted.isfinite().all() and wanted.std() > 0.02
    assert torch.equal(fast.decode(large), wanted)
    assert_calls(module, 1, 1)
    assert "computed NaN or Inf in fp16" in reason_of(module) and "set precision to bf16" in reason_of(module)
    fast.decode(latents())
    assert_calls(module, 1, 2)
    assert "overflows in fp16" in module.status.to_json()["now"], "fp16 is not used again"
    again, module = accelerated(EngineProvider(engine_store), vae, precision=Precision.FP16)
    assert torch.equal(again.decode(large), wanted)
    assert_calls(module, 0, 1)


@pytest.mark.parametrize("half", [DECODER, ENCODER], ids=lambda half: half.part)
def test_memory_is_what_an_engine_takes(half: Half, engine_store: EngineStore, provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, module = accelerated(provider, vae)
    estimate, usual = (getattr(each, f"memory_used_{half.method}") for each in (fast, vae))
    shape = (2, 4, 8, 8) if half is DECODER else (2, 3, 64, 64)
    plain = usual(shape, torch.float32)
    other = (2, shape[1], 3 * shape[2], shape[3])
    assert estimate(other, torch.float32) == usual(other, torch.float32), "no engine is there"
    fast.decode(latents()) if half is DECODER else fast.encode(pictures())
    assert_calls(module, 1)
    known = getattr(fast, f"memory_used_{half.method}")(shape, torch.float32)
    assert 0 < known < plain / 10
    # In another process it is compared with the plain model first.
    later, _ = accelerated(EngineProvider(engine_store), vae)
    assert getattr(later, f"memory_used_{half.method}")(shape, torch.float32) == plain + known


def test_memory_for_tiles_and_for_other_vaes_is_comfyuis_own(provider: EngineProvider) -> None:
    vae = tiny.vae()
    fast, _ = accelerated(provider, vae)
    fast.decode(latents())
    shape = (1, 4, 8, 8)
    usual = vae.memory_used_decode(shape, torch.float32)
    assert fast.memory_used_decode(shape, torch.float32) < usual
    with fast.slipstream.session(fast, tiled=True):
        assert fast.memory_used_decode(shape, torch.float32) == usual
    without_engines(vae)
    assert fast.memory_used_decode(shape, torch.float32) == usual


# -------------------------------------------------------------------------------------------------------- nodes


def test_the_node(provider: EngineProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.hosts.comfy.process import shared_provider
    from slipstream.nodes.accelerate_vae import AccelerateVAE
    from slipstream.nodes.engine_info import EngineInfo

    monkeypatch.setattr(shared_provider, "provider", lambda: provider)
    schema = AccelerateVAE.define_schema()
    assert (schema.node_id, schema.display_name) == ("SlipstreamAccelerateVAE", "Accelerate VAE")
    assert [output.io_type for output in schema.outputs] == ["VAE"]
    monkeypatch.setattr(
        AccelerateVAE, "hidden", type("Hidden", (), {"unique_id": "7", "prompt": None, "extra_pnginfo": None})
    )
    chosen = {"backend": "auto", "precision": "auto", "optimize": "fast build", "resolutions": "auto"}
    vae = tiny.vae()
    (fast,) = AccelerateVAE.execute(vae, build="first use", **chosen).result
    assert_same(fast.decode(latents()), vae.decode(latents()))
    assert "calls on engines: 1, on your model: 0" in EngineInfo.execute(vae=fast).result[0]
    assert "place Accelerate VAE" in EngineInfo.execute(vae=vae).result[0]
