"""What an engine cannot honour in AUTOMATIC1111. Each check gives one reason in words, or None."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch

_OWN = {"ldm", "sgm", "torch", "modules"}
"""Whose code may compute: the WebUI itself exchanges attention for one that computes the same."""


class WebUiCode:
    """What other extensions replaced in the classes of a model's layers; see `live_model.Code`."""

    state = None
    """See `live_model.Code`."""

    def __init__(self, _: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> None:
        self._kinds = set(map(type, layers.values()))

    def why_replaced(self) -> str | None:
        """What was replaced, in words; None where nothing was."""
        for kind in {base for own in self._kinds for base in own.__mro__ if base is not object}:
            if _top(kind.__module__) not in _OWN:
                return f"another extension brought its own layers ({kind.__module__}.{kind.__qualname__})"
            for name, value in list(vars(kind).items()):
                if isinstance(value, FunctionType) and (owner := _owner(value)) not in _OWN and not _is_lora(owner):
                    return f"another extension ({owner}) replaced {kind.__qualname__}.{name}"
        return None


def why_not_this_call(rest: tuple[Any, ...], more: Mapping[str, Any]) -> str | None:
    """
    Args:
        rest: arguments of the UNet's call after the text.
        more: those by name, without `y`.
    """
    if rest or any(value is not None for value in more.values()):
        return "the model is given more than its inputs, which engines do not take"
    return None


def _owner(function: FunctionType) -> str:
    return _top(str(function.__globals__.get("__name__")))


def _is_lora(owner: str) -> bool:
    """The WebUI's own LoRAs, which `source` writes into the weights."""
    return owner in ("networks", "lora_patches")


def _top(module: str) -> str:
    return module.partition(".")[0]
