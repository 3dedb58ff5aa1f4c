"""Engines for a model that is loaded, made outside of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...core.protocols import ModelSource
from ..planning.plan import CallShape, Plan
from ..provider import EngineProvider, HostHooks, Made
from ..settings.model_settings import Resolution, Settings

CallOf = Callable[[Resolution, int, int], CallShape]


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device.

    Attributes:
        host: whose code it is, e.g. "ComfyUI 0.33.0".
        call: the call that it will get, by resolution, batch and tokens.
    """

    host: str
    source: ModelSource
    call: CallOf


def make_engines(
    provider: EngineProvider, source: ModelSource, calls: Iterable[CallShape], settings: Settings, hooks: HostHooks
) -> Iterator[Made]:
    """Build (or find), load and compare the engine of each call; one may be for several.

    Args:
        settings: with what the user prefers in place of `auto`.

    Raises:
        SlipstreamError: an engine could not be had; those before it are kept.
        whatever `hooks.check_interrupted` raises.
    """
    made: list[Plan] = []
    for call in calls:
        if not any(plan.serves(call, settings) for plan in made):
            found = provider.make(source, call, settings, hooks)
            made.append(found.plan)
            yield found
