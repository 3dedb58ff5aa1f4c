"""The grid of model files and picture sizes in ComfyUI, whose queue carries its builds out."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from ....engine_cache import EngineStore
from ....runtime.requests import model_grid as grid
from ....runtime.requests.build_requests import BuildRequest, BuildRequests
from ....runtime.settings.model_settings import Resolution
from .prompt_builder import PromptBuilder


@functools.lru_cache(maxsize=1)
def build_requests() -> BuildRequests:
    """The builds that were asked for in the grid."""
    return BuildRequests(PromptBuilder())


def model_grid(store: EngineStore, more: Iterable[Resolution] = ()) -> dict[str, Any]:
    """See `runtime.requests.model_grid`."""
    return grid.model_grid(store, PromptBuilder(), build_requests().all(), more)


def request(model: str, size: Resolution) -> BuildRequest:
    """Have the engine of a cell built.

    Raises:
        ValueError: there is no such model.
    """
    if model not in PromptBuilder().models():
        raise ValueError(f"There is no model file {model!r} here any more")
    return build_requests().submit(grid.wanted_for(model, size))
