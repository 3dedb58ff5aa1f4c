"""Engines for a model that is loaded, made outside of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...core.protocols import ModelSource
from ...engine_cache import Entry
from ..planning.build_estimate import say_roughly
from ..planning.plan import CallShape, Plan
from ..provider import EngineProvider, HostHooks
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


@dataclass(frozen=True)
class Made:
    """An engine that was built, or found, and compared with its model.

    Attributes:
        expected: seconds that the build was thought to take; None where nothing was to be built, or known.
        error: in that comparison.
    """

    plan: Plan
    entry: Entry
    expected: float | None
    error: float | None

    def __str__(self) -> str:
        """One line for people."""
        built = f"built in {self.entry.manifest.build.seconds:.0f} s"
        expected = f" ({say_roughly(self.expected)} expected)" if self.expected else ""
        error = "" if self.error is None else f", error {self.error:.1e}"
        spec = self.plan.spec
        return f"{self.plan}: {spec.backend.name} {spec.precision_name}, {built}{expected}{error}, ready"


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
            found = _make(provider, source, call, settings, hooks)
            made.append(found.plan)
            yield found


def _make(provider: EngineProvider, source: ModelSource, call: CallShape, settings: Settings, hooks: HostHooks) -> Made:
    expected = provider.expected(source, call, settings)
    plan, entry = provider.prepare(source, call, settings, hooks)
    checked = entry.manifest.verifications.get(source.weights_digest())
    return Made(plan, entry, expected, checked.relative_error if checked else None)
