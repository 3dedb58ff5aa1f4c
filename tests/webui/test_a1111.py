"""AUTOMATIC1111: an option of its "SD Unet" setting whose UNet is an engine, or the plain model with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ldm.modules.diffusionmodules import openaimodel
from modules import script_callbacks, sd_unet, shared

from slipstream.hosts.a1111.pictures import ENGINES, begin_picture, end_picture
from slipstream.hosts.a1111.source import LdmUNetSource
from slipstream.hosts.a1111.unet_option import add_options, config_of, module_in_use
from slipstream.hosts.detect import Host, running_host
from slipstream.tests.tensors import distance

CONFIG = """
model:
  params:
    unet_config:
      params:
        image_size: 32
        in_channels: 4
        out_channels: 4
        model_channels: 32
        attention_resolutions: [1, 2]
        num_res_blocks: 1
        channel_mult: [1, 2]
        num_heads: 4
        use_spatial_transformer: true
        transformer_depth: 1
        context_dim: 32
        use_checkpoint: true
        legacy: false
"""
TOLERANCE = 1e-4
FIRST_USE = "[Slipstream] build at first use"


@pytest.fixture(scope="module", autouse=True)
def webui() -> Iterator[None]:
    """As the WebUI's hijack has it: each call of a UNet goes through `sd_unet` first."""
    from omegaconf import OmegaConf

    plain = openaimodel.UNetModel.forward
    openaimodel.copy_of_UNetModel_forward_for_webui = plain
    openaimodel.UNetModel.forward = sd_unet.UNetModel_forward
    script_callbacks.on_list_unets(add_options)
    sd_unet.list_unets()
    assert OmegaConf is not None
    with torch.no_grad():
        yield
    openaimodel.UNetModel.forward = plain


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """What the WebUI calls its `sd_model`."""
    from omegaconf import OmegaConf

    (tmp_path / "v1.yaml").write_text(CONFIG, encoding="utf-8")
    parameters = OmegaConf.to_container(OmegaConf.load(tmp_path / "v1.yaml"))["model"]["params"]["unet_config"][
        "params"
    ]
    torch.manual_seed(1)
    unet = openaimodel.UNetModel(**parameters).eval().requires_grad_(False)
    for tensor in unet.parameters():
        tensor.add_(0.05 * torch.randn_like(tensor))
    shared.sd_model = SimpleNamespace(
        model=SimpleNamespace(diffusion_model=unet), used_config=str(tmp_path / "v1.yaml")
    )
    sd_unet.apply_unet("None")
    yield unet
    sd_unet.apply_unet("None")


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, 4, 8, 8, generator=generator),
        torch.tensor([500.0, 500.0]),
        torch.randn(2, 77, 32, generator=generator),
    )


def test_the_host_is_found() -> None:
    assert running_host() is Host.A1111


def test_the_options_are_listed_and_none_is_chosen_by_itself() -> None:
    labels = [option.label for option in sd_unet.unet_options]
    assert labels == ["[Slipstream] build in the background", FIRST_USE]
    assert all(option.model_name is None for option in sd_unet.unet_options)


def test_an_engine_is_the_plain_model(model: Any) -> None:
    wanted = model(*inputs())
    sd_unet.apply_unet(FIRST_USE)
    p = SimpleNamespace(extra_generation_params={})
    begin_picture(p)
    found = model(*inputs())
    end_picture(p)
    module = module_in_use()
    assert module is not None and module.status.engine_calls >= 1
    assert distance(found, wanted) < TOLERANCE
    assert p.extra_generation_params[ENGINES].startswith("1 calls by engine")


def test_a_lora_is_written_into_the_weights_that_the_engine_reads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model.middle_block[1].transformer_blocks[0].attn2.to_q
    layer.network_layer_name = "middle"
    networks = ModuleType("networks")

    def apply(target: Any) -> None:
        if not getattr(target, "network_current_names", ()):
            target.network_weights_backup = target.weight.clone()
            target.weight += 0.5
            target.network_current_names = ("lora",)

    networks.network_apply_weights = apply  # type: ignore[attr-defined]
    before = model(*inputs())
    monkeypatch.setitem(sys.modules, "networks", networks)
    sd_unet.apply_unet(FIRST_USE)
    module = module_in_use()
    assert module is not None
    calls = module.status.engine_calls
    found = model(*inputs())
    assert module.status.engine_calls == calls + 1
    sd_unet.apply_unet("None")
    assert distance(found, model(*inputs())) < TOLERANCE < distance(found, before)


def test_the_next_checkpoint_in_the_same_layers_has_a_digest_of_its_own(model: Any) -> None:
    def digest(checkpoint: str) -> str:
        shared.sd_model.sd_model_checkpoint = checkpoint
        return LdmUNetSource(model, lambda: config_of(shared.sd_model), torch.device("cpu")).weights_digest()

    first = digest("a.safetensors")
    model.out[2].weight += 0.5
    assert digest("b.safetensors") != first


def test_another_extensions_forward_runs_plain(model: Any) -> None:
    layer = model.out[2]
    layer.forward = lambda x, own=layer.forward: 2 * own(x)
    wanted = model(*inputs())
    sd_unet.apply_unet(FIRST_USE)
    module = module_in_use()
    assert module is not None
    calls = module.status.engine_calls
    assert torch.equal(model(*inputs()), wanted)
    assert module.status.engine_calls == calls
    assert "another extension changed how out.2 computes" in module.status.standing.reason


def test_the_tiling_checkbox_runs_plain(model: Any) -> None:
    """It sets what the WebUI's hijack sets for a picture, and sets it back for the next one."""
    convolutions = [layer for layer in model.modules() if type(layer) is torch.nn.Conv2d]
    before = model(*inputs())
    sd_unet.apply_unet(FIRST_USE)
    module = module_in_use()
    assert module is not None
    assert distance(model(*inputs()), before) < TOLERANCE
    calls = module.status.engine_calls
    for mode, served in (("circular", calls), ("zeros", calls + 1)):
        for layer in convolutions:
            layer.padding_mode = mode
        found = model(*inputs())
        assert module.status.engine_calls == served
        assert (distance(found, before) > 0.01) == (mode == "circular")
    assert "changed padding_mode of input_blocks.0.0 (circular instead of zeros)" in str(module.status.to_json())


def test_weights_elsewhere_run_plain(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from modules import devices

    wanted = model(*inputs())
    sd_unet.apply_unet(FIRST_USE)
    monkeypatch.setattr(devices, "device", torch.device("meta"))
    assert torch.equal(model(*inputs()), wanted)
    module = module_in_use()
    assert module is not None and "--lowvram" in module.status.standing.reason
