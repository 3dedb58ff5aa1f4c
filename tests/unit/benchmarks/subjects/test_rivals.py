"""diffusers' models beside ComfyUI's: their layout, where weights go, what the recipe asks of the compiler."""

from __future__ import annotations

import importlib.util
from operator import attrgetter
from typing import Any

import pytest
import torch

from slipstream.benchmarks.subjects import rivals
from slipstream.benchmarks.subjects.cases import CASES
from slipstream.benchmarks.subjects.models import PIXART_ALPHA, SD15, SDXL, SSD1B, TINY_SD15, VEGA, Model, _Decoder
from slipstream.benchmarks.subjects.variants import Variant
from slipstream.core.errors import UnsupportedModel

SD15_HEADS, SDXL_HEADS = {"num_heads": 8, "num_head_channels": -1}, {"num_heads": -1, "num_head_channels": 64}
"""What ComfyUI's classes of these models add."""


def test_sd15_is_laid_out_as_it_was_published() -> None:
    assert rivals.unet_layout({**SD15, **SD15_HEADS}) == {
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "down_block_types": (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
        "transformer_layers_per_block": (1, 1, 1, 1),
        "attention_head_dim": (8, 8, 8, 8),
        "cross_attention_dim": 768,
        "use_linear_projection": False,
    }


def test_sdxl_is_laid_out_as_it_was_published() -> None:
    found = rivals.unet_layout({**SDXL, **SDXL_HEADS})
    assert found["transformer_layers_per_block"] == (1, 2, 10) and found["attention_head_dim"] == (5, 10, 20)
    assert found["down_block_types"] == ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    assert found["up_block_types"] == ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    assert found["projection_class_embeddings_input_dim"] == 2816 and found["use_linear_projection"]


@pytest.mark.parametrize(("config", "heads"), [(TINY_SD15, SD15_HEADS), (SSD1B, SDXL_HEADS), (VEGA, SDXL_HEADS)])
def test_levels_of_unlike_blocks_are_refused(config: dict[str, Any], heads: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModel, match="the blocks of a level are not alike"):
        rivals.unet_layout({**config, **heads})


def test_a_middle_that_differs_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="the middle is not like the last level"):
        rivals.unet_layout({**SDXL, **SDXL_HEADS, "transformer_depth_middle": 4})


class UNetModel(torch.nn.Module):
    """By this name a UNet is known."""


class _Source:
    device = torch.device("cuda")


class _Patcher:
    def __init__(self, config: dict[str, Any]) -> None:
        self.model = self.model_config = self
        self.unet_config = config


def model(network: torch.nn.Module, config: dict[str, Any]) -> Model:
    return Model(_Source(), network, lambda module, inputs: inputs, {}, _Patcher(config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missing", "name", "network", "config", "why"),
    [
        ("diffusers", "diffusers", UNetModel(), SD15, "diffusers is not installed"),
        ("torchao", "diffusers:compile+int8", UNetModel(), SD15, "torchao is not installed"),
        ("torchao", "diffusers:compile", UNetModel(), SD15, None),
        ("", "diffusers:compile+int8", UNetModel(), SD15, None),
        ("", "diffusers", UNetModel(), VEGA, "the blocks of a level are not alike"),
        ("", "diffusers", torch.nn.Identity(), PIXART_ALPHA, "only UNets and the VAE's decoder"),
        ("", "diffusers:compile", _Decoder(None), {}, None),
    ],
)
def test_where_there_is_no_rival_it_is_said(
    missing: str, name: str, network: torch.nn.Module, config: dict[str, Any], why: str | None, monkeypatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == missing else package)
    found = Variant.of(name).why_left_out(CASES["sd15-512-b2"], model(network, {**config, **SD15_HEADS}))
    assert found is None if why is None else why in (found or "")


def test_the_recipe_is_given_to_one_compilation_alone() -> None:
    import torch._inductor.config as config

    names = [*rivals.OPTIONS, *rivals.OPTIONS_OF_EIGHT_BITS, "max_autotune", "triton.cudagraphs"]
    before = {name: attrgetter(name)(config) for name in names}
    found, eight = rivals.compiler_options(False), rivals.compiler_options(True)
    assert set(found) == set(names) - {"force_fuse_int_mm_with_mul"} and set(eight) == set(names)
    assert not eight["epilogue_fusion"] and all(on for name, on in eight.items() if name != "epilogue_fusion")
    assert before == {name: attrgetter(name)(config) for name in names} and not before["max_autotune"]
    torch.compile(torch.nn.Identity(), fullgraph=True, options=eight)  # a name that torch lacks is an error


class _Made(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.to_q = torch.nn.Linear(4, 3)


def test_weights_are_copies_in_their_places() -> None:
    state = {"q.weight": torch.randn(3, 4, 1, 1), "q.bias": torch.randn(3)}
    names = {"to_q.weight": "q.weight", "to_q.bias": "q.bias", "to_k.bias": "k.bias"}
    made = rivals._filled(_Made(), state, names)
    given = torch.randn(2, 4)
    expected = torch.nn.functional.linear(given, state["q.weight"][:, :, 0, 0], state["q.bias"])
    assert torch.equal(made.to_q(given), expected)
    state["q.weight"].zero_()
    assert torch.equal(made.to_q(given), expected) and not any(each.requires_grad for each in made.parameters())


def test_a_weight_without_a_place_is_told_on() -> None:
    state = {"q.weight": torch.randn(3, 4), "q.bias": torch.randn(3)}
    names = {"to_q.weight": "q.weight", "to_q.bias": "q.bias"}
    with pytest.raises(ValueError, match="no place for gate.weight"):
        rivals._filled(_Made(), {**state, "gate.weight": torch.randn(3)}, names)
    with pytest.raises(ValueError, match="has no to_q.bias"):
        rivals._filled(_Made(), {"q.weight": state["q.weight"]}, names)
    with pytest.raises(ValueError, match=r"\[4, 3\] is no weight of shape \[3, 4\]"):
        rivals._filled(_Made(), {**state, "q.weight": torch.randn(4, 3)}, names)


def test_only_layers_of_many_rows_multiply_in_8_bits() -> None:
    layer = torch.nn.Linear(4, 4)
    assert rivals._is_large(layer, "down_blocks.0.attentions.1.transformer_blocks.0.ff.net.2")
    assert not rivals._is_large(layer, "time_embedding.linear_1")
    assert not rivals._is_large(torch.nn.Conv2d(4, 4, 1), "down_blocks.0.attentions.1.proj_in")
