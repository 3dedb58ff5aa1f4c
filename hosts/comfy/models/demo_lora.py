"""The demo model's LoRA inside ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ....core.errors import UnsupportedModel
from ....demo import model as demo


def add_demo_lora(model: Any, strength: float, folder: Path = demo.WEIGHTS) -> Any:
    """A clone of ComfyUI's MODEL with the LoRA `night`, added by ComfyUI's own code.

    Raises:
        UnsupportedModel: this is not the demo model, or the LoRA's file is missing.
    """
    import comfy.sd

    if not _is_demo(model):
        raise UnsupportedModel("Demo LoRA fits the demo model alone. For other models use Load LoRA")
    file = folder / "night.safetensors"
    if not file.is_file():
        raise UnsupportedModel(f"The demo LoRA is missing: {file}. Reinstall Slipstream, or run demo/train_lora.py")
    changed, _ = comfy.sd.load_lora_for_models(model, None, load_file(file), strength, 0.0)
    return changed


def _is_demo(model: Any) -> bool:
    """Whether the network has the demo model's sizes: where a LoRA does not fit, ComfyUI only warns in its log."""
    has, wants = getattr(model.model.model_config, "unet_config", {}), demo.comfy_unet_config()
    return all(has.get(name) == wants[name] for name in ("model_channels", "channel_mult", "context_dim"))
