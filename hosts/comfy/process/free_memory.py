"""Free memory on a device, as ComfyUI's memory management counts it."""

from __future__ import annotations

import torch

from .staged_pages import kept_free, yielding


def free_device_memory(device: torch.device, wanted: int) -> None:
    """Have ComfyUI unload what is not in use at this moment, until `wanted` bytes and its reserve are free, or will be
    as soon as they are needed: staged weights give way by themselves."""
    import comfy.model_management as management

    if device.type != "cpu":
        _unload_unused(device, wanted + management.extra_reserved_memory())


def _unload_unused(device: torch.device, wanted: int) -> None:
    """Until so many bytes are available."""
    import comfy.model_management as management

    if wanted > available(device):
        used = [loaded for loaded in management.current_loaded_models if loaded.currently_used]
        management.free_memory(wanted, device, keep_loaded=used)


def memory_beside_sampling(device: torch.device, wanted: int) -> int:
    """Bytes that are free and not needed for sampling, after ComfyUI made room for `wanted` as far as it can."""
    import comfy.model_management as management

    reserve = int(management.minimum_inference_memory())
    short = wanted + reserve - available(device)
    if 0 < short <= _unloadable(device):  # else all would be unloaded in vain
        _unload_unused(device, wanted + reserve)
    return max(0, available(device) - reserve)


def _unloadable(device: torch.device) -> int:
    """What ComfyUI could unload, as nothing uses it at this moment."""
    import comfy.model_management as management

    unused = (it for it in management.current_loaded_models if it.device == device and not it.currently_used)
    return sum(int(loaded.model_loaded_memory()) for loaded in unused)


def available(device: torch.device) -> int:
    """Bytes that are free, or that ComfyUI's staged weights give back by themselves, without what is kept free."""
    import comfy.model_management as management

    return int(management.get_free_memory(device)) + yielding(device) - kept_free()
