"""The ComfyUI process: its engine store and its queue."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ...engine_cache import EngineStore
from ...runtime.build import export_lock
from ...runtime.home import store_home
from ...runtime.provider import EngineProvider


@functools.lru_cache(maxsize=1)
def provider() -> EngineProvider:
    """The one provider of this process."""
    _hold_prompts_during_traces()
    return EngineProvider(EngineStore(store_home(_models_folder())), is_idle=queue_is_idle)


def _hold_prompts_during_traces() -> None:
    """Let no prompt begin while a model is traced.

    Tracing hooks into every module of the process, so any model that ran meanwhile would fail. A background trace
    begins only while nothing runs (`queue_is_idle`); this closes the other side, for prompts without our nodes too.
    """
    queue = _prompt_queue()
    if queue is None:
        return
    take = queue.get

    def get(*args: Any, **kwargs: Any) -> Any:
        item = take(*args, **kwargs)
        if item is not None:
            with export_lock:
                pass
        return item

    queue.get = get


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
