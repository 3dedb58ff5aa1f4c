"""Engines on disk: atomic, locked across processes, checked, and bounded in size.

    <root>/engines/<digest>/    manifest.json, the engine's files, .last_used
    <root>/locks/               store.lock (short), <digest>.lock (held during a build)
    <root>/in_use/              lock files of living processes: entries in use, folders in the making
    <root>/tmp/                 folders in the making and folders on their way out
    <root>/quarantine/          corrupt entries, each with a file that says why
    <root>/memo/                remembered: digests of checkpoint files, past builds, models that overflow in fp16
    <root>/keep/                what builds learn about this machine, and the library behind CUDA graphs
    <root>/marks/               of engines in use for the first time: what a process that ended left behind
    <root>/records/             checks and times of engines that lie in a base
    <root>/adopting/            for a moment: manifests of engines that a person vouched for, which all come into force

Under the store may be bases: stores that are only read. What has been built here goes before what lies in a base.

An entry appears and disappears by one rename of its folder under the store's lock. Reading takes no lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..core.errors import (
    BuildFailed,
    CorruptEngine,
    EngineInUse,
    IncompatibleEngine,
    SlipstreamError,
    StoreError,
    UntrustedEngine,
    warn_once,
)
from ..core.protocols import Artifact
from ..core.version import __version__
from .base_layers import BaseLayers
from .entry import LAST_USED_NAME, Entry, Hold
from .files import (
    copy_durably,
    free_bytes,
    no_space,
    remove_tree,
    replace,
    replace_text,
    store_errors,
    sync_folder,
    write_durably,
    write_parts,
)
from .key import EngineKey, digest_of
from .keyring import Keyring
from .locks import WaitCallback, locked
from .manifest import (
    MANIFEST_NAME,
    BuildRecord,
    FileRecord,
    Manifest,
    Speed,
    Verification,
    check_file_names,
    is_digest,
)
from .reading import entry_folder, read_entry
from .signatures import signed, why_untrusted
from .workspace import Workspace

DEFAULT_LIMIT_BYTES = 20 * 2**30

Entries = list[Entry]  # in the class below, `list` is a method
Digests = list[str]

log = logging.getLogger(__name__)


class EngineStore:
    """A folder of engines that several processes share. Nothing is created before the first write.

    Args:
        bases: roots of stores whose engines are used too; nothing is written or removed there.
        keyring: whose engines may be loaded; by default the user's own.
    """

    def __init__(
        self,
        root: Path | str,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        bases: Sequence[Path] = (),
        keyring: Keyring | None = None,
    ) -> None:
        self._space = Workspace(Path(root))
        self.root, self.engines = self._space.root, self._space.engines
        self.keyring = keyring or Keyring()
        self._bases = BaseLayers(bases, self._space.records)
        self.keep, self.marks = self._space.keep, self._space.marks
        self.limit_bytes = limit_bytes
        self.damaged: dict[str, str] = {}
        """Entries that this process found damaged, and what was wrong with each."""

    # Reading

    def lookup(self, digest: str) -> Entry | None:
        """The entry of `digest`, with its manifest and file sizes checked; None when there is no usable one.

        A corrupt entry is set aside and a warning names the reason; it never raises for one bad entry. Call
        `Entry.verify_files` before using the files.
        """
        if os.path.isdir(self._space.adopting):  # a process died as it adopted engines
            with contextlib.suppress(StoreError), self._space.writing("Adopting engines"):
                pass
        try:
            found = self._read(digest)
        except CorruptEngine as error:
            self.damaged[digest] = str(error)
            found = self._set_aside(digest, str(error))
        except IncompatibleEngine as error:
            warn_once(log, str(error))
            found = None
        except OSError as error:
            warn_once(log, f"The engine {digest[:12]} in {self.root} cannot be read: {error}. It counts as absent.")
            found = None
        return found or self._bases.read(digest, self)

    def trusted(self, digest: str) -> Entry | None:
        """Like `lookup`, but None also where this machine would not load the engine, see `Entry.why_untrusted`."""
        entry = self.lookup(digest)
        return entry if entry is not None and entry.why_untrusted() is None else None

    def list(self) -> Entries:
        """Every usable entry, the most recently used first."""
        found = (self.lookup(digest) for digest in self.digests())
        return sorted((entry for entry in found if entry), key=lambda entry: entry.last_used, reverse=True)

    def find(self, prefix: str) -> Entries:
        """Entries whose digest begins with `prefix`, for a person who types a few digits."""
        return [entry for entry in self.list() if entry.digest.startswith(prefix)]

    def size_bytes(self) -> int:
        """Size of the engines in the store itself, without its bases."""
        return sum(entry.bytes for entry in self.list() if not entry.is_in_base)

    def verify_all(self) -> dict[str, str | None]:
        """Read all files again: digest -> what is wrong, or None. Corrupt entries are set aside."""
        return {digest: self.verify(digest) for digest in self.digests()}

    def verify(self, digest: str) -> str | None:
        """Read an engine's files again: what is wrong with them, or None. A corrupt entry is set aside."""
        try:
            entry = self._read(digest) or self._bases.read(digest, self)
            if entry is not None:
                entry.verify_files(again=True)
        except CorruptEngine as error:
            self._set_aside(digest, str(error))
            return str(error)
        except (IncompatibleEngine, StoreError, OSError) as error:
            return str(error)
        return None

    def has(self, digest: str) -> bool:
        """Whether there is an entry in the store itself, readable or not."""
        return os.path.lexists(self._directory(digest))

    def is_used(self, digest: str) -> bool:
        """Whether a living process holds the entry; False where the store is read-only, so that nobody can tell."""
        try:
            with self._space.writing(f"Looking for users of the engine {digest[:12]}"):
                return self._is_used(digest)
        except StoreError as error:
            log.debug("%s", error)
            return False

    def free_bytes(self) -> int:
        """Free space on the store's disk."""
        return free_bytes(self.root)

    def digests(self) -> Digests:
        """The digests of all entries, readable or not, those of bases included, in ascending order."""
        return sorted({*self._own_digests(), *self._bases.digests()})

    def _own_digests(self) -> Digests:
        try:
            return [path.name for path in self.engines.iterdir() if is_digest(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            warn_once(log, f"The engine store {self.root} cannot be read: {error}. It counts as empty.")
            return []

    def _read(self, digest: str) -> Entry | None:
        """Like `lookup`, but raises what it finds wrong, and in the store itself alone."""
        return read_entry(self.engines, digest, self)

    def _directory(self, digest: str) -> Path:
        return entry_folder(self.engines, digest)

    # Writing

    @contextlib.contextmanager
    def reserve(self, digest: str, timeout: float | None = None, wait: WaitCallback | None = None) -> Iterator[bool]:
        """Be the only process that builds `digest` during the block. Look up again inside, before building.

        Args:
            timeout: seconds to wait for another process; None waits as long as it builds.
            wait: called several times a second while waiting, with the seconds so far; raise to give up.

        Yields:
            Whether another process had to be waited for.

        Raises:
            StoreError: not free within `timeout`, or the store cannot be written.
        """
        path = self._space.locks / f"{self._directory(digest).name}.lock"
        with contextlib.ExitStack() as stack:
            with store_errors(f"Reserving the engine {digest[:12]}", self.root):
                self._space.create()
                what = f"Another process is building the engine {digest[:12]}"
                waited = stack.enter_context(locked(path, what, timeout, wait, poll=0.1))
            yield waited

    def scratch(self, subject: str) -> AbstractContextManager[Path]:
        """A folder on the store's disk for work in progress: gone after the block, cleaned up after a crash.

        Args:
            subject: part of its name, a plain word.

        Raises:
            StoreError: the store cannot be written.
        """
        return self._space.scratch(subject)

    def put(
        self,
        key: EngineKey,
        artifact: Artifact,
        *,
        label: str,
        build: BuildRecord,
        verifications: Mapping[str, Verification] | None = None,
    ) -> Entry:
        """Copy an artifact into the store, whole or not at all, then prune to the limit.

        Where another process stored the same engine first, its entry stays and is returned.

        Args:
            verifications: weights digest -> comparison with the eager module.

        Raises:
            StoreError: no space or no permission; nothing was kept.
            BuildFailed: the artifact names files that are not there or may not be stored.
        """
        needed = _artifact_bytes(key, artifact)
        action = f"Storing the engine {key.short}"
        self.clean()
        with self.scratch(key.short) as folder:
            if free_bytes(folder) < needed:
                raise no_space(action, self.root, needed)
            with store_errors(action, self.root, needed):
                files = {name: copy_durably(artifact.directory / name, folder / name) for name in artifact.files}
                made = _manifest(key, files, artifact.details, label, build, verifications or {})
                manifest = signed(made, self.keyring)
                write_durably(folder / MANIFEST_NAME, manifest.to_json())
                sync_folder(folder)
            with self._space.writing(action, needed):
                entry = self._publish(folder, key.digest)
        self._prune_after(entry)
        return entry

    def receive(self, manifest: Manifest, read: Callable[[str], Iterable[bytes]]) -> Entry:
        """Take in an engine from elsewhere, whole or not at all, then prune to the limit.

        Args:
            read: the content of a file of the engine, in parts.

        Raises:
            UntrustedEngine: this user does not trust who made it; nothing was read.
            CorruptEngine: a file differs from what the manifest says; nothing was kept.
            StoreError: no space or no permission; nothing was kept.
        """
        if digest_of(manifest.factors) != manifest.digest:
            raise CorruptEngine(f"The engine {manifest.digest[:12]} does not fit its name. Get it from its maker anew.")
        if reason := why_untrusted(manifest, self.keyring):
            raise UntrustedEngine(reason)
        action = f"Storing the engine {manifest.digest[:12]}"
        self.clean()
        with self.scratch(manifest.digest[:12]) as folder:
            if free_bytes(folder) < manifest.bytes:
                raise no_space(action, self.root, manifest.bytes)
            with store_errors(action, self.root, manifest.bytes):
                for name, record in manifest.files.items():
                    if write_parts(folder / name, read(name), record.bytes) != record:
                        raise CorruptEngine(
                            f"The file {name} of the engine {manifest.digest[:12]} ({manifest.label}) arrived with "
                            "another content than its maker signed. Nothing was kept; get it anew."
                        )
                write_durably(folder / MANIFEST_NAME, manifest.to_json())
                sync_folder(folder)
            with self._space.writing(action, manifest.bytes):
                entry = self._publish(folder, manifest.digest)
        self._prune_after(entry)
        return entry

    def adopt(self, entries: Iterable[Entry], wrong: Callable[[Entry, SlipstreamError], None] | None = None) -> Entries:
        """Sign engines as if they had been built here, after a person said that they were: all of them, or none.

        Args:
            wrong: told of each engine that cannot be adopted, and why; the others are. None adopts nothing then.

        Returns:
            Those that were adopted.

        Raises:
            CorruptEngine: the files of one differ from its manifest.
            StoreError: one lies in a base, or the store cannot be written; none was adopted.
        """
        sound: Entries = []
        for entry in entries:
            try:
                with entry.hold():
                    entry.verify_files(again=True)
                if entry.is_in_base:
                    raise StoreError(
                        f"The engine {entry.digest[:12]} lies in {entry.directory.parent}, which is only read"
                    )
                sound.append(entry)
            except SlipstreamError as error:
                if wrong is None:
                    raise
                wrong(entry, error)
        if not sound:
            return []
        with self.scratch("adopting") as folder, self._space.writing("Adopting engines"):
            manifests = [signed(self._as_verified(entry).manifest, self.keyring) for entry in sound]
            for manifest in manifests:
                write_durably(folder / f"{manifest.digest}.json", manifest.to_json())
            self._space.adopt(folder)
            now = [self._read_if_sound(entry.digest) or entry for entry in sound]
        left = [entry for entry, manifest in zip(now, manifests, strict=True) if entry.manifest != manifest]
        if left:
            names = ", ".join(entry.digest[:12] for entry in left)
            raise StoreError(f"These engines could not be changed on the disk and stay untrusted: {names}")
        return now

    def _as_verified(self, entry: Entry) -> Entry:
        """The entry as it is now.

        Raises:
            StoreError: it is gone, or another engine than the one that was looked at.
        """
        current = self._read_if_sound(entry.digest)
        if current is None:
            raise entry.gone()
        before, now = entry.manifest, current.manifest
        if (now.files, now.details, now.created) != (before.files, before.details, before.created):
            raise StoreError(f"The engine {entry.digest[:12]} was replaced meanwhile. Nothing was adopted; look again.")
        return current

    def record_verification(self, entry: Entry, weights_digest: str, result: Verification) -> Entry:
        """Write a verification into the manifest.

        Raises:
            StoreError: the entry is gone, or the store cannot be written.
        """
        return self._record(entry, "verification", lambda manifest: manifest.with_verification(weights_digest, result))

    def record_speed(self, entry: Entry, speed: Speed) -> Entry:
        """Write how fast an engine is into the manifest.

        Raises:
            StoreError: the entry is gone, or the store cannot be written.
        """
        return self._record(entry, "speed", lambda manifest: dataclasses.replace(manifest, speed=speed))

    def _record(self, entry: Entry, what: str, changed: Callable[[Manifest], Manifest]) -> Entry:
        with self._space.writing(f"Recording the {what} of the engine {entry.digest[:12]}"):
            current = self._read_if_sound(entry.digest) or self._bases.read(entry.digest, self)
            if current is None:
                raise entry.gone()
            manifest = changed(current.manifest)
            file = current.directory / MANIFEST_NAME
            if current.is_in_base:
                file = self._bases.record_file(current.digest)
                file.parent.mkdir(exist_ok=True)
            replace_text(file, manifest.to_json(), self._space.tmp)
            return Entry(current.directory, manifest, self)

    def touch(self, entry: Entry) -> None:
        """Note that the entry was used now. What cannot be written is left as it is, and so is a base."""
        if entry.is_in_base:
            return
        with contextlib.suppress(OSError):
            (entry.directory / LAST_USED_NAME).touch()

    def hold(self, entry: Entry) -> Hold:
        """See `Entry.hold`. It counts as a use."""
        claim = None
        if entry.is_in_base and entry.directory.is_dir():
            return Hold(None)  # nobody removes it
        try:
            with self._space.writing(f"Holding the engine {entry.digest[:12]}"):
                if entry.directory.is_dir():
                    claim = self._space.claims.take(entry.digest)
        except StoreError as error:
            # A read-only store or a full disk must not keep an engine from running.
            log.debug("The engine %s is used without a lock: %s", entry.digest[:12], error)
        if not entry.directory.is_dir():
            raise entry.gone()
        self.touch(entry)
        return Hold(claim)

    # Removing

    def delete(self, digest: str, force: bool = False) -> bool:
        """Remove an entry, readable or not.

        Args:
            force: also when it is in use; a process that has it loaded keeps it until it ends.

        Returns:
            Whether there was one.

        Raises:
            EngineInUse: nothing was deleted.
            StoreError: the store cannot be written.
        """
        if not self.has(digest):
            if (entry := self._bases.read(digest, self)) is not None:
                raise StoreError(f"The engine {digest[:12]} lies in {entry.directory.parent}, which is only read")
            return False
        with self._space.writing(f"Deleting the engine {digest[:12]}"):
            if not self.has(digest):
                return False  # another process deleted it while this one waited for the lock
            if not force and self._is_used(digest):
                raise EngineInUse(
                    f"The engine {digest[:12]} is in use, so it was not deleted: wait until the run that needs "
                    f"it ends (or close the ComfyUI that makes it) and try again."
                )
            trash = self._space.discard(self._directory(digest))
        remove_tree(trash)
        return True

    def prune(
        self, limit_bytes: int | None = None, older_than: timedelta | None = None, keep: Iterable[str] = ()
    ) -> Digests:
        """Remove the least recently used entries until the rest fits the limit; never one in use.

        Args:
            limit_bytes: instead of the store's own limit.
            older_than: also remove all that were last used longer ago than this.
            keep: digests to leave alone.

        Returns:
            Digests of the removed entries.

        Raises:
            StoreError: the store cannot be written.
        """
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        oldest = time.time() - older_than.total_seconds() if older_than is not None else float("-inf")
        kept = set(keep)
        own = [entry for entry in self.list() if not entry.is_in_base]
        if not _surplus(own, limit, oldest, kept.__contains__):
            return []  # a read-only store has nothing to complain about
        removed: dict[str, Path] = {}
        with self._space.writing("Pruning the engine store"):
            sound = [entry for digest in self._own_digests() if (entry := self._read_if_sound(digest))]
            for entry in _surplus(sound, limit, oldest, lambda digest: digest in kept or self._is_used(digest)):
                if trash := self._try_discard(entry):
                    removed[entry.digest] = trash
        for trash in removed.values():
            remove_tree(trash)
        if removed:
            log.info("Pruned %d engines to keep %s within its limit", len(removed), self.root)
        return list(removed)

    def clean(self) -> int:
        """Remove what dead processes left behind; returns how many folders.

        Raises:
            StoreError: the store cannot be written.
        """
        return self._space.clean()

    # Setting aside

    def set_aside(self, entry: Entry, reason: str) -> None:
        """Move a corrupt entry to the quarantine, where the store can be written; else only warn."""
        warn_once(log, reason)
        self.damaged[entry.digest] = reason
        if entry.is_in_base:
            self._bases.pass_over(entry)
            return
        try:
            with self._space.writing(f"Setting the engine {entry.digest[:12]} aside"):
                current = self._read_if_sound(entry.digest)
                built_anew = current is not None and current.manifest.created != entry.manifest.created
                if not built_anew:
                    self._space.set_aside(entry.directory, reason)
        except StoreError as error:
            log.debug("The engine %s could not be set aside: %s", entry.digest[:12], error)

    def _set_aside(self, digest: str, reason: str) -> Entry | None:
        """Set aside what `_read` complained about, unless another process has repaired it meanwhile."""
        try:
            with self._space.writing(f"Setting the engine {digest[:12]} aside"):
                try:
                    return self._read(digest)
                except CorruptEngine:
                    self._space.set_aside(self._directory(digest), reason)
        except IncompatibleEngine:
            return None
        except StoreError as error:
            log.debug("The engine %s could not be set aside: %s", digest[:12], error)
        warn_once(log, reason)
        return None

    def _read_if_sound(self, digest: str) -> Entry | None:
        try:
            return self._read(digest)
        except (CorruptEngine, IncompatibleEngine, OSError):
            return None

    def _is_used(self, digest: str) -> bool:
        return self._space.claims.is_taken(digest)

    def _publish(self, folder: Path, digest: str) -> Entry:
        """Make a finished folder an entry, by one rename. Call under the store's lock."""
        directory = self._directory(digest)
        try:
            existing = self._read(digest)
            if existing is not None and (reason := existing.why_untrusted()):
                raise CorruptEngine(reason)
        except (CorruptEngine, IncompatibleEngine) as error:
            existing = None
            self._space.set_aside(directory, str(error))
        if existing is not None:
            return existing
        replace(folder, directory)
        sync_folder(self.engines)
        entry = self._read(digest)
        if entry is None:
            raise StoreError(f"The engine {digest[:12]} vanished from {self.root} as it was stored. Queue again.")
        return entry

    def _prune_after(self, entry: Entry) -> None:
        try:
            self.prune(keep={entry.digest})
        except StoreError as error:  # the engine itself is safe
            log.warning("%s", error)

    def _try_discard(self, entry: Entry) -> Path | None:
        try:
            return self._space.discard(entry.directory)
        except OSError as error:  # open on Windows, or already gone
            log.debug("The engine %s was not pruned: %s", entry.digest[:12], error)
            return None


def _surplus(entries: Iterable[Entry], limit_bytes: int, oldest: float, spared: Callable[[str], bool]) -> Entries:
    """The entries to remove, least recently used first, so that the rest fits the limit and none is too old."""
    entries = sorted(entries, key=lambda entry: entry.last_used)
    total = sum(entry.bytes for entry in entries)
    chosen = []
    for entry in entries:
        if (total > limit_bytes or entry.last_used < oldest) and not spared(entry.digest):
            chosen.append(entry)
            total -= entry.bytes
    return chosen


def _artifact_bytes(key: EngineKey, artifact: Artifact) -> int:
    try:
        check_file_names(artifact.files)
        return sum((artifact.directory / name).stat().st_size for name in artifact.files)
    except (OSError, ValueError) as error:
        raise BuildFailed(
            f"The build of the engine {key.short} left no usable files: {error}. Build it again."
        ) from error


def _manifest(
    key: EngineKey,
    files: Mapping[str, FileRecord],
    details: Mapping[str, Any],
    label: str,
    build: BuildRecord,
    verifications: Mapping[str, Verification],
) -> Manifest:
    spec = key.spec
    return Manifest(
        digest=key.digest,
        factors=key.factors,
        label=label,
        role=spec.role.value,
        profile=spec.profile,
        precision=spec.precision.value,
        optimize=spec.optimize.value,
        backend=spec.backend.name,
        files=files,
        slipstream=__version__,
        build=build,
        details=details,
        verifications=verifications,
        quantised=spec.quantised.value if spec.quantised else None,
    )
