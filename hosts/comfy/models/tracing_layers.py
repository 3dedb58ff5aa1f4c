"""Layers of ComfyUI as a model is built from for tracing, and what holds while it is built."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class PlainNumbers(TorchFunctionMode):
    """Models built inside, on the meta device too, can read their tables, and take nothing from the random generator.

    PixArt's reads a `linspace`, and draws first values for its tables from the generator that samplers take noise from.
    """

    _DEVICES: Mapping[Any, str] = {torch.linspace: "cpu", torch.randn: "meta"}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function in self._DEVICES and given.get("device") is None:
            given["device"] = self._DEVICES[function]
        return function(*args, **given)


@contextmanager
def layers_with_weights() -> Iterator[None]:
    """Models that are built meanwhile have all their weights.

    With DynamicVRAM, ComfyUI makes linear layers without any, to be filled from a file.
    """
    memory: Any = sys.modules.get("comfy.memory_management")  # older ones have none
    if not getattr(memory, "aimdo_enabled", False):
        yield
        return
    memory.aimdo_enabled = False
    try:
        yield
    finally:
        memory.aimdo_enabled = True


@functools.cache
def plain_layers() -> Any:
    """ComfyUI's plain layers, for models that compute in one dtype throughout."""
    import comfy.ops

    class Conv3d(comfy.ops.disable_weight_init.Conv3d):
        """Wan's first layer computes in fp32, whatever the model does."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            result: torch.Tensor = self._conv_forward(x, self.weight.to(x.dtype), bias)
            return result

    return type("Layers", (comfy.ops.disable_weight_init,), {"Conv3d": Conv3d})
