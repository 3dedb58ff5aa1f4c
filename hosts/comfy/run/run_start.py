"""How a run of an accelerated model, ControlNet or VAE begins, and how its calls are reported when it ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from ....core.errors import SlipstreamError
from ....core.protocols import ModelSource
from ....runtime.module import AcceleratedModule, Run
from ....runtime.settings.model_settings import SWITCHED_OFF
from ..process.build_waiting import waiting_hooks

RunRecorder = Callable[[dict[str, Any]], None]
"""Given what happened in a run, see `Status.since`."""

_Source = TypeVar("_Source", bound=ModelSource)


@contextmanager
def recorded(module: AcceleratedModule, after_run: RunRecorder | None) -> Iterator[None]:
    """Report the engine and eager calls made inside the block to `after_run`."""
    module.status.begin_run()
    before = module.status.to_json()
    try:
        yield
    finally:
        if after_run is not None:
            after_run(module.status.since(before))


def begin_run(
    module: AcceleratedModule,
    read: Callable[[], _Source],
    ending: ExitStack,
    *,
    finite_only: bool = False,
    cold_calls: int | None = None,
    conditions: Hashable = None,
    can_start_again: bool = False,
) -> tuple[Run, _Source] | str:
    """A run of `module` that closes with `ending`, and its source; or why no engine can serve.

    Args:
        read: makes the source.
        finite_only, cold_calls, conditions, can_start_again: see `AcceleratedModule.run`.
    """
    settings = module.settings
    if settings.is_off:
        return SWITCHED_OFF
    try:
        source = read()
        source.precision  # noqa: B018  an unsupported dtype is a reason too
    except SlipstreamError as error:
        return str(error)
    run = module.run(
        source,
        waiting_hooks(),
        finite_only=finite_only,
        settings=settings,
        cold_calls=cold_calls,
        conditions=conditions,
        can_start_again=can_start_again,
    )
    return ending.enter_context(run), source
