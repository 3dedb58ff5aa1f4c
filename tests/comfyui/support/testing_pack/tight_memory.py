"""A device with room for a build, but not beside any model: made up on the CPU, in a server's own process."""

from __future__ import annotations

from typing import Any

import comfy.model_management as management


def use_tight_memory(build_room: Any, patience_seconds: float) -> None:
    """Have builds find no memory until ComfyUI unloads its models.

    Args:
        build_room: the pack's module of that name.
        patience_seconds: that ComfyUI has to be idle before it is asked.
    """
    everything = (2 << 30) + management.extra_reserved_memory()

    def free(*_: Any, torch_free_too: bool = False) -> Any:
        left = everything - sum(patcher.loaded_size() for patcher in management.loaded_models())
        return (left, 0) if torch_free_too else left

    management.get_free_memory = free
    build_room.bytes_for_others = free
    build_room._PATIENCE_SECONDS = patience_seconds
