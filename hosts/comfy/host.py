"""The ComfyUI process: its engine store and its queue."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from typing import Any

from ...engine_cache import EngineStore
from ...runtime.home import store_home
from ...runtime.provider import EngineProvider

_CLOSING_SECONDS = 2.0


@functools.lru_cache(maxsize=1)
def provider() -> EngineProvider:
    """The one provider of this process."""
    from .residency import Residency

    made = EngineProvider(EngineStore(home()), is_idle=queue_is_idle)
    Residency(made.pool)  # lives as long as the pool, which calls it
    atexit.register(_end_builds, made)
    return made


def _end_builds(of: EngineProvider) -> None:
    """Leave no half-built engine in the store when ComfyUI ends."""
    tickets = of.queue.pending()
    of.queue.cancel_all("ComfyUI is closing")
    for ticket in tickets:
        ticket.wait(_CLOSING_SECONDS)


def home() -> Path:
    """Where engines and all else that we keep lie."""
    return store_home(_models_folder())


def _models_folder() -> Path | None:
    try:
        import folder_paths
    except ImportError:
        return None
    return Path(folder_paths.models_dir) / "slipstream"


def queue_is_idle() -> bool:
    """Whether ComfyUI has no prompt to work on; True outside its server."""
    queue = _prompt_queue()
    return queue is None or queue.get_tasks_remaining() == 0


def _prompt_queue() -> Any:
    try:
        from server import PromptServer
    except ImportError:
        return None
    instance = getattr(PromptServer, "instance", None)
    return getattr(instance, "prompt_queue", None)
