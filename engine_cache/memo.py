"""Digests of checkpoint files, so that a large file is read once and not at every start."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from .files import Identity, identity
from .memo_file import MemoFile

KEPT = 1000
SETTLED_SECONDS = 2.0
"""Rewritten within a tick of its disk's clock (2 s on FAT), a file keeps its mtime: young is not trusted."""

log = logging.getLogger(__name__)


class WeightsMemo:
    """File identity (path, size, mtime, inode) -> digest, kept under the engine store."""

    def __init__(self, root: Path | str) -> None:
        self._memo = MemoFile(root, "weights", "a digest", "digests")

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
        except OSError as error:
            log.debug("The digest of %s is not remembered: %s", path, error)
            return False
        name, record = _name(path, part), {"identity": list(seen), "digest": digest}
        return self._memo.write(f"The digest of {path}", lambda: self._with(name, record))

    def _with(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        known = self._read()
        known.pop(name, None)
        return dict([*known.items(), (name, record)][-KEPT:])

    def _read(self) -> dict[str, dict[str, Any]]:
        data = self._memo.read()
        records = data if isinstance(data, dict) else {}
        return {name: record for name, record in records.items() if _is_record(record)}


def _name(path: Path | str, part: str) -> str:
    return f"{Path(path).resolve()}\n{part}" if part else str(Path(path).resolve())


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict) and isinstance(record.get("digest"), str) and isinstance(record.get("identity"), list)
    )
