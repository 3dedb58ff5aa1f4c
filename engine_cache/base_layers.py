"""Read-only folders of engines under the store: part of a container's image, or a volume that many machines share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CorruptEngine, IncompatibleEngine, warn_once
from .entry import Entry
from .manifest import Manifest, is_digest
from .reading import read_entry

if TYPE_CHECKING:
    from .store import EngineStore

log = logging.getLogger(__name__)


class BaseLayers:
    """Engine stores that are only read; the first that has an engine counts.

    Args:
        roots: of the stores.
        records: a folder of the writable store, for checks and times of engines that lie in a base.
    """

    def __init__(self, roots: Sequence[Path], records: Path) -> None:
        self._engines = [root.absolute() / "engines" for root in roots]
        self._records = records
        self._bad: set[Path] = set()
        """Entries that this process found damaged."""

    def read(self, digest: str, store: EngineStore) -> Entry | None:
        """The first sound entry of `digest`, with what this store recorded about it."""
        for engines in self._engines:
            if engines / digest in self._bad:
                continue
            try:
                entry = read_entry(engines, digest, store)
            except (CorruptEngine, IncompatibleEngine, OSError) as error:
                warn_once(log, f"{error} It counts as absent.")
                continue
            if entry is not None:
                return self._with_records(entry)
        return None

    def digests(self) -> Iterator[str]:
        """Of all entries, readable or not."""
        for engines in self._engines:
            try:
                yield from (path.name for path in engines.iterdir() if is_digest(path.name))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                warn_once(log, f"The base store {engines.parent} cannot be read: {error}. It counts as empty.")

    def pass_over(self, entry: Entry) -> None:
        """Read this entry no more: it is damaged, and nothing in a base can be set aside."""
        self._bad.add(entry.directory)

    def record_file(self, digest: str) -> Path:
        """Where the store keeps what it learns about an engine of a base: a manifest."""
        return self._records / f"{digest}.json"

    def _with_records(self, entry: Entry) -> Entry:
        try:
            recorded = Manifest.from_json(self.record_file(entry.digest).read_bytes())
        except (OSError, CorruptEngine, IncompatibleEngine):
            return entry
        if recorded.files != entry.manifest.files:  # the base has another build of it by now
            return entry
        known = {**entry.manifest.verifications, **recorded.verifications}
        manifest = dataclasses.replace(entry.manifest, verifications=known, speed=recorded.speed)
        return dataclasses.replace(entry, manifest=manifest)
