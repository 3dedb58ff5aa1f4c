"""A VAE's decoder and encoder as architectures: an engine computes what the VAE itself does."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.models.autoencoders import DECODER, ENCODER, Half
from slipstream.hosts.comfy.models.vae import open_vae, source_of, vae_call
from slipstream.runtime.building.job_file import as_plain, from_plain
from slipstream.runtime.checking.verify import relative_error
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings.model_settings import BuildPolicy, Resolution, Settings
from slipstream.tests.comfyui.support.models import tiny
from slipstream.tests.tensors import distance

KINDS = {
    "with convolutions around latents": lambda: tiny.vae(),
    "without": lambda: tiny.vae(quantised=False),
    "taesd": lambda: tiny.taesd(),
}
HALVES = [pytest.param(DECODER, id="decoder"), pytest.param(ENCODER, id="encoder")]


def inputs_of(half: Half, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if half is DECODER:
        return {"z": torch.randn(1, 4, 8, 12, generator=generator)}
    return {"pixels": torch.rand(1, 3, 64, 96, generator=generator) * 2 - 1}


@pytest.mark.slow
def test_an_engine_decodes_what_the_vae_does(engine_store: EngineStore) -> None:
    vae = tiny.vae()
    source = open_vae(vae)
    module = AcceleratedModule(EngineProvider(engine_store), Settings(policy=BuildPolicy.FIRST_USE))
    assert vae_call(source, Resolution(96, 64), batch=1).shapes == {"z": (1, 4, 8, 12)}
    z = inputs_of(DECODER)["z"]
    with torch.no_grad(), module.run(source) as run:
        found = run({"z": z}, lambda: source.eager({"z": z}))["out"]
    wanted = vae.decode(z)  # pictures from 0 to 1, channels last
    assert (module.status.engine_calls, module.status.eager_calls) == (1, 0), module.status.to_json()["reasons"]
    found = vae.process_output(found.clone()).movedim(1, -1)
    assert found.shape == wanted.shape == (1, 64, 96, 3)
    assert wanted.std() > 0.1 and distance(found, wanted) < 1e-4
    assert "VAE decoder 96×64 batch 1" in module.status.to_json()["now"]


def test_the_call_of_an_encoder() -> None:
    source = open_vae(tiny.vae(), ENCODER)
    assert vae_call(source, Resolution(96, 64), batch=2).shapes == {"pixels": (2, 3, 64, 96)}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_traced_computes_what_the_vae_does(kind: str, half: Half) -> None:
    source = open_vae(KINDS[kind](), half)
    architecture = from_plain(json.loads(json.dumps(as_plain(source.architecture))))  # as in the build process
    assert architecture.fingerprint == source.architecture.fingerprint
    inputs = inputs_of(half)
    placeholder = architecture.placeholder(source.precision, source.device)
    with torch.no_grad():
        found = torch.func.functional_call(placeholder, dict(source.bind(source.precision).tensors), (), inputs)[0]
        wanted = source.eager(inputs)
        assert wanted["out"].std() > 0.05
        assert relative_error({"out": found}, wanted) < 1e-5
        assert relative_error(source.reference(inputs), wanted) < 1e-5
    program = torch.export.export(placeholder, (), inputs, strict=False)
    operators = [str(node.target) for node in program.graph.nodes]
    assert any("scaled_dot_product" in name for name in operators) == (kind != "taesd")
    assert not any("rand" in name for name in operators), "an encoder gives the mean"


def test_every_half_of_every_kind_is_an_architecture_of_its_own() -> None:
    found = {open_vae(make(), half).architecture.fingerprint for make in KINDS.values() for half in (DECODER, ENCODER)}
    assert len({each.architecture for each in found}) == 6
    names = {each.architecture_name for each in found}
    assert names == {"VAE decoder", "VAE encoder", "TAESD decoder", "TAESD encoder"}


def test_weights_of_the_other_half_do_not_matter() -> None:
    vae, other = tiny.vae(), tiny.vae()
    other.first_stage_model.encoder.conv_in.bias.data += 1
    assert open_vae(vae).weights_digest() == open_vae(other).weights_digest()
    assert open_vae(vae, ENCODER).weights_digest() != open_vae(other, ENCODER).weights_digest()


# ---------------------------------------------------------------------------------------------- other VAEs


def subclassed_decoder(model: Any) -> None:
    model.decoder.__class__ = type("OtherDecoder", (type(model.decoder),), {})


def subclassed(model: Any) -> None:
    model.__class__ = type("OtherVae", (type(model),), {})


def circular(model: Any) -> None:
    """As nodes for seamless textures do it."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_mode = "circular"


def longer(model: Any) -> None:
    model.decoder.up[0].block.append(torch.nn.Identity())


def other_width(model: Any) -> None:
    model.decoder.conv_out = torch.nn.Conv2d(32, 3, 5, padding=2)


def hooked(model: Any) -> None:
    model.decoder.register_forward_hook(lambda module, args, result: result * 0.5)


def other_forward(model: Any) -> None:
    model.decoder.forward = lambda z: z


def other_convolution(model: Any) -> None:
    layer = model.decoder.conv_in
    layer._conv_forward = lambda *args: torch.zeros(1)


def compiled_in_place(model: Any) -> None:
    model.decoder.conv_in._compiled_call_impl = lambda x: torch.zeros(1)


def other_scale(model: Any) -> None:
    model.decoder.up[1].upsample.scale_factor = 1.5


def odd_settings(model: Any) -> None:
    """What cannot be compared with a number."""
    model.decoder.norm_out.eps = torch.ones(2)


def raising(model: Any) -> None:
    class Odd(type(model.decoder.conv_in)):  # type: ignore[misc]
        @property
        def loss(self) -> float:
            raise RuntimeError("not to be asked")

    model.decoder.conv_in.__class__ = Odd


def other_attention(model: Any) -> None:
    model.decoder.mid.attn_1.optimized_attention = lambda q, k, v: v


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (subclassed_decoder, "AutoencoderKL with OtherDecoder"),
        (subclassed, r"\(OtherVae\)"),
        (circular, r"decoder\.conv_in is not as"),
        (longer, "VAE's decoder.* is not as"),
        (other_width, r"decoder\.conv_out is not as"),
        (hooked, "hooks into decoder"),
        (other_forward, r"changed how decoder computes \(forward\)"),
        (other_convolution, r"changed how decoder\.conv_in computes \(_conv_forward\)"),
        (other_attention, r"changed optimized_attention of decoder\.mid\.attn_1"),
        (compiled_in_place, r"changed how decoder\.conv_in computes"),
        (other_scale, r"decoder\.up\.1\.upsample is not as"),
        (odd_settings, r"decoder\.norm_out is not as"),
        (raising, r"decoder\.conv_in is not as"),
    ],
)
def test_other_vaes_have_no_engines(change: Any, reason: str) -> None:
    vae = tiny.vae()
    source_of(vae, DECODER)
    change(vae.first_stage_model)
    with pytest.raises(UnsupportedModel, match=reason):
        source_of(vae, DECODER)


def known_by_its_layers_class() -> weakref.ref[torch.nn.Module]:
    """A VAE that was refused, as nodes change one whose functions make classes."""
    vae = tiny.vae()
    model = vae.first_stage_model

    class Watched(type(model.decoder.conv_out)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), model

    model.decoder.conv_out.__class__ = Watched
    with pytest.raises(UnsupportedModel, match=r"decoder\.conv_out is not as"):
        source_of(vae, DECODER)
    return weakref.ref(model)


def test_a_vae_that_was_refused_is_let_go_of() -> None:
    gone = known_by_its_layers_class()
    gc.collect()
    assert gone() is None


def test_an_encoder_that_draws_random_numbers_has_no_engine() -> None:
    vae = tiny.vae()
    vae.first_stage_model.regularization.sample = True
    source_of(vae, DECODER)
    with pytest.raises(UnsupportedModel, match="random"):
        source_of(vae, ENCODER)


def test_a_taesd_of_another_form_has_no_engine() -> None:
    vae = tiny.taesd()
    vae.first_stage_model.taesd_decoder.append(torch.nn.ReLU())
    source_of(vae, ENCODER)
    with pytest.raises(UnsupportedModel, match=r"taesd_decoder\.\d+ is not as"):
        source_of(vae, DECODER)


def object_patch(vae: Any) -> None:
    vae.patcher.add_object_patch("decoder.conv_in", torch.nn.Identity())


def other_model(vae: Any) -> None:
    vae.first_stage_model = tiny.vae().first_stage_model


@pytest.mark.parametrize(
    ("change", "reason"), [(object_patch, r"replaces decoder\.conv_in"), (other_model, "replaced the VAE's model")]
)
def test_patched_vaes_have_no_engines(change: Any, reason: str) -> None:
    vae = tiny.vae()
    change(vae)
    with pytest.raises(UnsupportedModel, match=reason):
        source_of(vae, DECODER)
