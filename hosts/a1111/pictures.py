"""What is said of a picture of AUTOMATIC1111 in its info text."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ..info_text import of_engines
from .unet_option import module_in_use

ENGINES = "Slipstream"

_before: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def begin_picture(p: Any) -> None:
    """
    Args:
        p: the WebUI's processing, about to sample a batch.
    """
    p.extra_generation_params.pop(ENGINES, None)
    module = module_in_use()
    if module is not None:
        _before[module] = module.status.to_json()


def end_picture(p: Any) -> None:
    """
    Args:
        p: the WebUI's processing, which sampled a batch.
    """
    module = module_in_use()
    if module is not None and module in _before:
        p.extra_generation_params[ENGINES] = of_engines(module.status.since(_before.pop(module)))
