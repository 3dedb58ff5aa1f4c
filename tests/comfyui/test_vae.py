"""The VAE's decoder as an architecture: an engine decodes what the VAE itself does."""

from __future__ import annotations

import pickle

import pytest
import torch

from slipstream.core.errors import UnsupportedModel
from slipstream.engine_cache import EngineStore
from slipstream.hosts.comfy.vae import ComfyVaeSource, open_vae, vae_call
from slipstream.runtime.module import AcceleratedModule
from slipstream.runtime.provider import EngineProvider
from slipstream.runtime.settings import BuildPolicy, Resolution, Settings
from slipstream.runtime.verify import relative_error
from slipstream.tests.comfyui.support import tiny


def latents(seed: int = 1) -> torch.Tensor:
    return torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(seed))


def test_an_engine_decodes_what_the_vae_does(engine_store: EngineStore) -> None:
    vae = tiny.vae()
    source = open_vae(vae)
    module = AcceleratedModule(EngineProvider(engine_store), Settings(policy=BuildPolicy.FIRST_USE))
    assert vae_call(source, Resolution(96, 64), batch=1).shapes == {"z": (1, 4, 8, 12)}
    z = latents()
    with torch.no_grad(), module.run(source) as run:
        found = run({"z": z}, lambda: source.eager({"z": z}))["out"]
    wanted = vae.decode(z)  # pictures from 0 to 1, channels last
    assert (module.status.engine_calls, module.status.eager_calls) == (1, 0), module.status.to_json()["reasons"]
    found = vae.process_output(found.clone()).movedim(1, -1)
    assert found.shape == wanted.shape == (1, 64, 96, 3)
    assert wanted.std() > 0.1 and ((found - wanted).norm() / wanted.norm()).item() < 1e-4
    assert "VAE decoder 96×64 batch 1" in module.status.to_json()["now"]


@pytest.mark.parametrize("quantised", [True, False])
def test_what_is_traced_computes_what_the_vae_does(quantised: bool) -> None:
    source = open_vae(tiny.vae(quantised=quantised))
    architecture = pickle.loads(pickle.dumps(source.architecture))  # as in the build process
    assert architecture.fingerprint == source.architecture.fingerprint
    inputs = {"z": latents()}
    skeleton = architecture.skeleton(source.precision, source.device)
    with torch.no_grad():
        found = torch.func.functional_call(skeleton, dict(source.weights(source.precision)), (), inputs)[0]
        wanted = source.eager(inputs)
        assert relative_error({"out": found}, wanted) < 1e-5
        assert relative_error(source.reference(inputs), wanted) < 1e-5
    program = torch.export.export(skeleton, (), inputs, strict=False)
    assert any("scaled_dot_product" in str(node.target) for node in program.graph.nodes)


def test_vaes_with_and_without_convolutions_around_latents_differ() -> None:
    one, other = (open_vae(tiny.vae(quantised=quantised)).architecture for quantised in (True, False))
    assert one.fingerprint.architecture != other.fingerprint.architecture


def test_other_vaes_have_no_engines() -> None:
    vae = tiny.vae()
    vae.first_stage_model.decoder.__class__ = type("OtherDecoder", (type(vae.first_stage_model.decoder),), {})
    with pytest.raises(UnsupportedModel, match="OtherDecoder"):
        ComfyVaeSource(vae)
