"""The store's folders, and what may only be done in them under its lock."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from ..core.errors import CorruptEngine, IncompatibleEngine, StoreError
from .files import remove_tree, replace, store_errors, sync_folder, within_path_limit, write_durably
from .locks import Claims, locked
from .manifest import MANIFEST_NAME, Manifest

log = logging.getLogger(__name__)

QUARANTINE_KEPT = 3
LOCK_SECONDS = 60.0
"""How long to wait for the store's own lock, which is only ever held for moments."""
STALE_SECONDS = 24 * 3600.0
LONGEST_INSIDE = 200
"""Characters of the longest path below the root: engines/<64 digits>/<up to 128>."""


class Workspace:
    """Folders under one root, shared by several processes. Nothing is created before the first write."""

    def __init__(self, root: Path) -> None:
        self.root = within_path_limit(root, LONGEST_INSIDE)
        self.engines = self.root / "engines"
        self.locks = self.root / "locks"
        self.tmp = self.root / "tmp"
        self.quarantine = self.root / "quarantine"
        self.in_use = self.root / "in_use"
        self.keep = self.root / "keep"
        self.marks = self.root / "marks"
        self.records = self.root / "records"
        self.adopting = self.root / "adopting"
        self.claims = Claims(self.in_use)

    def create(self) -> None:
        for folder in (self.engines, self.locks, self.tmp, self.quarantine, self.in_use):
            if not os.path.isdir(folder):
                folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self, action: str, needed: int = 0) -> Iterator[None]:
        """Hold the store's lock, with every folder there, and turn errors of the disk into `StoreError`.

        Not to be nested: the lock is not reentrant.

        Args:
            action: what is being done, for messages.
            needed: bytes that it wants to write.
        """
        with store_errors(action, self.root, needed):
            self.create()
            what = "Another process is changing the engine store"
            with locked(self.locks / "store.lock", what, LOCK_SECONDS):
                self._finish_adopting()
                yield

    @contextlib.contextmanager
    def scratch(self, subject: str) -> Iterator[Path]:
        """A folder for work in progress: gone after the block, cleaned up by others after a crash."""
        with self.writing(f"Preparing {subject}"):
            # Claimed before it exists, so that `clean` never takes it for a dead one.
            claim = self.claims.take(f"tmp-{subject}")
            folder = self.tmp / claim.path.name
            leftover = self.discard(folder) if folder.exists() else None
            folder.mkdir()
        try:
            if leftover:
                remove_tree(leftover)
            yield folder
        finally:
            remove_tree(folder)
            claim.release()

    def discard(self, path: Path) -> Path:
        """Take `path` out of sight by one rename; the caller deletes it once the lock is free."""
        trash = self.tmp / f"trash.{uuid.uuid4().hex}"
        replace(path, trash)
        return trash

    def adopt(self, folder: Path) -> None:
        """Put the manifests in `folder`, `<digest>.json` each, in place of those of the engines: all, or none.

        One rename decides. What a process that dies then leaves undone, the next that takes the store's lock does; it
        takes no space.
        """
        if os.path.isdir(self.adopting):
            raise StoreError(f"Engines that were to be adopted earlier could not be written. Delete {self.adopting}")
        for file in folder.iterdir():
            if not os.access(self.engines / file.stem, os.W_OK):
                raise StoreError(f"This user may not change {self.engines / file.stem}. Nothing was adopted")
        sync_folder(folder)
        replace(folder, self.adopting)
        sync_folder(self.root)
        self._finish_adopting()

    def _finish_adopting(self) -> None:
        if not os.path.isdir(self.adopting):
            return
        for file in sorted(self.adopting.iterdir()):
            with contextlib.suppress(OSError):  # Windows, where somebody reads it: the next one does it
                target = self.engines / file.stem / MANIFEST_NAME
                if _is_of_same_build(file, target):
                    try:
                        replace(file, target)
                    except PermissionError:
                        if os.name == "nt":
                            raise
                        log.warning("Slipstream: this user may not change %s: its engine stays untrusted", target)
                    sync_folder(target.parent)
                file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.adopting.rmdir()

    def set_aside(self, directory: Path, reason: str) -> None:
        """Move a corrupt entry to the quarantine, beside a text that says why; the newest few stay."""
        if not os.path.lexists(directory):
            return
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
        aside = self.quarantine / f"{stamp}.{directory.name[:12]}"
        replace(directory, aside)
        write_durably(_reason_file(aside), f"{directory.name}\n{reason}\n")
        kept = sorted(path for path in self.quarantine.iterdir() if path.suffix != ".txt")
        for old in kept[:-QUARANTINE_KEPT]:
            remove_tree(old)
            _reason_file(old).unlink(missing_ok=True)

    def clean(self) -> int:
        """Remove what dead processes left behind, as far as the system lets us; returns how many folders."""
        doomed: list[Path] = []
        with self.writing("Cleaning the engine store"):
            self.claims.sweep()
            for path in self.tmp.iterdir():
                if path.name.startswith("trash."):
                    doomed.append(path)
                elif path.is_dir() and not (self.in_use / path.name).exists():
                    with contextlib.suppress(PermissionError):  # Windows, where somebody has a file of it open
                        doomed.append(self.discard(path))
                elif path.is_file() and time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink(missing_ok=True)
        for path in doomed:
            remove_tree(path)
        return len(doomed)


def _reason_file(aside: Path) -> Path:
    return aside.with_name(f"{aside.name}.txt")


def _is_of_same_build(file: Path, other: Path) -> bool:
    """Whether two manifests are of the same files; False where one is none, or is gone."""
    try:
        found, there = (Manifest.from_json(path.read_bytes()) for path in (file, other))
    except (FileNotFoundError, NotADirectoryError, CorruptEngine, IncompatibleEngine):
        return False
    return found.files == there.files and found.created == there.created
