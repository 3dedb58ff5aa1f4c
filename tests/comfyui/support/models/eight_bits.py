"""Tiny models whose weights are stored in 8 bits, as ComfyUI loads them."""

from __future__ import annotations

from typing import Any

import comfy.sd
import torch

from . import tiny

FP8 = torch.float8_e4m3fn


def in_fp8() -> Any:
    """Return a `ModelPatcher` of SD3, as UNETLoader gives one with such a weight dtype."""
    model = comfy.sd.load_diffusion_model_state_dict(_weights(), model_options={"dtype": FP8})
    assert {parameter.dtype for parameter in model.model.diffusion_model.parameters()} == {FP8}
    model.model.requires_grad_(False)  # older ComfyUIs round LoRAs by what has no gradient
    return model


def scaled_fp8() -> Any:
    """Return one of a checkpoint whose linear layers are stored so, with scales, and are to be multiplied in more."""
    state = _weights()
    for name in [name for name, tensor in state.items() if "joint_blocks" in name and tensor.ndim == 2]:
        scale = state[name].abs().max().float() / 100
        state[name] = (state[name] / scale).to(FP8)
        state[name.removesuffix(".weight") + ".scale_weight"] = scale
    state["scaled_fp8"] = torch.zeros(2, dtype=FP8)
    return comfy.sd.load_diffusion_model_state_dict(state)


def _weights() -> dict[str, torch.Tensor]:
    state = tiny.transformer("sd3").model.diffusion_model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}
