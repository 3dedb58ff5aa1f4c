"""Whether the engines that Build Engine made are still there, for ComfyUI's cache knows nothing of the store."""

from __future__ import annotations

from collections.abc import Iterable

from ....runtime.provider import EngineProvider


class BuiltEngines:
    """Engines that Build Engine nodes found or built, each of which stands for a result in ComfyUI's cache."""

    def __init__(self) -> None:
        self._digests: frozenset[str] = frozenset()
        self._losses = 0

    def note(self, digests: Iterable[str]) -> None:
        self._digests |= frozenset(digests)

    def fingerprint(self, provider: EngineProvider) -> str:
        """Another text once one of the engines is gone, or `auto` means something else: then nodes look again.

        Without either it stays, so that pictures behind Build Engine are not sampled again in each run.
        """
        if any(provider.store.lookup(digest) is None for digest in self._digests):
            self._digests = frozenset()
            self._losses += 1
        preferred = provider.preferences()
        return f"{self._losses} {preferred.backend} {preferred.precision}"


BUILT_ENGINES = BuiltEngines()
