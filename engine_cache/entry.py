"""One engine in the store."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import CorruptEngine, SlipstreamError, StoreError, UntrustedEngine
from ..core.protocols import Artifact
from .files import Identity, identity, sha256_of, store_errors
from .locks import Claim
from .manifest import MANIFEST_NAME, Manifest
from .signatures import origin_to_vouch_for, why_untrusted

if TYPE_CHECKING:
    from .store import EngineStore

LAST_USED_NAME = ".last_used"

_verified: dict[Path, tuple[str, Identity]] = {}
"""Files whose content this process has checked: path -> digest and identity at that time."""
_verified_lock = threading.Lock()


@dataclass(frozen=True)
class Entry:
    """An engine's folder and its manifest, as they were when looked up."""

    directory: Path
    manifest: Manifest
    _store: EngineStore = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def factors(self) -> Mapping[str, Any]:
        return self.manifest.factors

    @property
    def bytes(self) -> int:
        """Size of the engine's files on disk."""
        return self.manifest.bytes

    @property
    def last_used(self) -> float:
        """POSIX time of the last use, or of its creation."""
        for name in (LAST_USED_NAME, MANIFEST_NAME):
            try:
                return (self.directory / name).stat().st_mtime
            except OSError:
                continue
        return 0.0

    @property
    def marks(self) -> Path:
        """The folder of marks that processes leave while they use an engine for the first time."""
        return self._store.marks

    @property
    def is_in_base(self) -> bool:
        """Whether it lies in a read-only layer under the store, where nothing can be removed or written."""
        return self.directory.parent != self._store.engines

    def why_refused(self, may_build: bool) -> str | None:
        """Why it is neither loaded nor replaced, and the way out; None where one of the two is done.

        One of this user's that nobody signed is from before engines were signed, or its key is lost: another may be
        built in its place, which is as safe as where there is none.

        Args:
            may_build: whether engines are built without being asked for by hand.
        """
        reason = self.why_untrusted()
        is_replaced = may_build and self.manifest.signature is None and self.is_of_this_user
        return None if reason is None or is_replaced else reason

    @property
    def is_of_this_user(self) -> bool:
        """Whether it lies in the store itself, in a folder of the user who runs this process."""
        if self.is_in_base:
            return False
        return not hasattr(os, "getuid") or self.directory.stat().st_uid == os.getuid()

    def why_untrusted(self) -> str | None:
        """Why its code is not loaded on this machine, and the way out; None where it may be."""
        return why_untrusted(self.manifest, self._store.keyring)

    @property
    def adoptable(self) -> str | None:
        """Where it is from, as `origin_to_vouch_for` says, if a person may have it loaded by `EngineStore.adopt`."""
        return None if self.is_in_base else origin_to_vouch_for(self.manifest, self._store.keyring)

    @property
    def artifact(self) -> Artifact:
        """What a backend loads.

        Raises:
            UntrustedEngine: this user neither built the engine nor trusts who signed it.
        """
        if reason := self.why_untrusted():
            raise UntrustedEngine(reason)
        return Artifact(self.directory, tuple(self.manifest.files), self.manifest.details)

    def path(self, name: str) -> Path:
        """The path of the engine's file `name`.

        Raises:
            KeyError: the manifest knows no such file.
        """
        if name not in self.manifest.files:
            raise KeyError(f"the engine {self.digest[:12]} has no file {name!r}, only {sorted(self.manifest.files)}")
        return self.directory / name

    def verify_files(self, again: bool = False) -> None:
        """Compare every file with its sha256, once in a process; needed before the engine is first used.

        Args:
            again: also those that were found good before.

        Raises:
            CorruptEngine: a file differs; the entry has been set aside, and the engine can be built again.
            StoreError: the entry has been removed, or this user may not read it.
        """
        try:
            for name in self.manifest.files:
                self._verify_file(name, again)
        except CorruptEngine as error:
            self._store.set_aside(self, str(error))
            raise

    def hold(self) -> Hold:
        """Keep the entry from being pruned or deleted until the handle is released, also by other processes.

        Raises:
            StoreError: it is already gone.
        """
        return self._store.hold(self)

    def check_sizes(self) -> None:
        """Check that every file exists with its size, without reading it.

        Raises:
            CorruptEngine: one is missing, is a link or has another size.
            StoreError: the entry has been removed.
        """
        for name, record in self.manifest.files.items():
            try:
                found = (self.directory / name).lstat()
            except FileNotFoundError:
                raise self._missing(name) from None
            if not stat.S_ISREG(found.st_mode):  # a link would lead out of the folder
                raise CorruptEngine(self._complaint(name, "is not a plain file"))
            if found.st_size != record.bytes:
                fault = f"has {found.st_size} bytes instead of {record.bytes}"
                raise CorruptEngine(self._complaint(name, fault))

    def _verify_file(self, name: str, again: bool) -> None:
        path, expected = self.directory / name, self.manifest.files[name].sha256
        try:
            with store_errors(f"Checking {name} of the engine {self.digest[:12]}", self.directory):
                before = identity(path)
                with _verified_lock:
                    if not again and _verified.get(path) == (expected, before):
                        return
                found = sha256_of(path)
                unchanged = identity(path) == before
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._missing(name) from None
            raise
        if found != expected or not unchanged:
            raise CorruptEngine(self._complaint(name, "has another content than when it was stored"))
        with _verified_lock:
            _verified[path] = (expected, before)

    def gone(self) -> StoreError:
        """The error for an entry that another process has removed."""
        return StoreError(
            f"The engine {self.digest[:12]} ({self.manifest.label}) was removed from the store meanwhile. "
            f"Queue again to build it anew."
        )

    def _missing(self, name: str) -> SlipstreamError:
        whole = self.directory.is_dir()
        return CorruptEngine(self._complaint(name, "is missing")) if whole else self.gone()

    def _complaint(self, name: str, fault: str) -> str:
        return (
            f"The file {name} of the engine {self.digest[:12]} ({self.manifest.label}) {fault}. "
            f"The engine is set aside; queue again to build it anew."
        )


class Hold:
    """Keeps an entry from being removed. A context manager; `release` works from any thread, also twice."""

    def __init__(self, claim: Claim | None) -> None:
        self._claim = claim

    def release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
