"""Digests of checkpoint files, so that a large file is read once and not at every start."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from ..core.errors import StoreError
from .files import Identity, identity, replace_text, store_errors
from .locks import locked

KEPT = 1000
SETTLED_SECONDS = 2.0
"""Rewritten within a tick of its disk's clock (2 s on FAT), a file keeps its mtime: young is not trusted."""

log = logging.getLogger(__name__)


class WeightsMemo:
    """File identity (path, size, mtime, inode) -> digest, kept under the engine store.

    It only saves time: what cannot be read or written counts as not remembered.
    """

    def __init__(self, root: Path | str) -> None:
        self._folder = Path(root) / "memo"
        self._file = self._folder / "weights.json"

    def get(self, path: Path | str, part: str = "") -> str | None:
        """The digest remembered for a file that is unchanged since.

        Args:
            part: which of several digests of one file, e.g. "unet" of a checkpoint.
        """
        try:
            wanted = identity(Path(path))
        except OSError:
            return None
        record = self._read().get(_name(path, part))
        return record["digest"] if record is not None and tuple(record["identity"]) == wanted else None

    def put(self, path: Path | str, digest: str, seen: Identity, part: str = "") -> bool:
        """Remember a digest.

        Args:
            seen: `files.identity` of the file from before it was read.

        Returns:
            False where it was not kept: the file has changed, is too young, or the store is read-only.
        """
        try:
            young = abs(time.time() - seen[1] / 1e9) < SETTLED_SECONDS
            if young or identity(Path(path)) != seen:
                return False
            self._write(_name(path, part), {"identity": list(seen), "digest": digest})
        except (OSError, StoreError) as error:
            log.debug("The digest of %s is not remembered: %s", path, error)
            return False
        return True

    def _write(self, name: str, record: dict[str, Any]) -> None:
        with store_errors("Remembering a digest", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / "weights.lock", "Another process is remembering digests", timeout=10):
                known = self._read()
                known.pop(name, None)
                kept = dict([*known.items(), (name, record)][-KEPT:])
                replace_text(self._file, json.dumps(kept, indent=1), self._folder)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            data = json.loads(self._file.read_bytes())
            return {name: record for name, record in data.items() if _is_record(record)}
        except (OSError, ValueError, AttributeError):
            return {}


def _name(path: Path | str, part: str) -> str:
    return f"{Path(path).resolve()}\n{part}" if part else str(Path(path).resolve())


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict) and isinstance(record.get("digest"), str) and isinstance(record.get("identity"), list)
    )
