"""Engines as one file, or as a folder that can be the base of other stores.

Both hold what a store holds: `engines/<digest>/manifest.json` and the engine's files. One file is a tar archive without
compression, in which each manifest comes before the files that it names.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ...core.errors import CorruptEngine, IncompatibleEngine, SlipstreamError, StoreError, UntrustedEngine
from ...core.progress import Progress, ProgressCallback, ignore_progress
from .. import EngineStore, Entry, Manifest, is_digest
from ..files import CHUNK_BYTES, read_parts, remove_tree, replace, store_errors, sync_folder, write_durably, write_parts
from ..manifest import MANIFEST_NAME
from .shareable import shareable_manifest

_LARGEST_MANIFEST = 16 * 2**20
_FOLDER = "engines"

Received = Callable[[str, Entry | SlipstreamError], object]
"""Told an engine's digest, and its entry in the store or why it was left out."""


def export_file(
    store: EngineStore, entries: Sequence[Entry], target: Path, progress: ProgressCallback = ignore_progress
) -> int:
    """Write engines into one new file, whole or not at all; returns its bytes.

    Raises:
        StoreError: the file is there already or cannot be written, or an engine was removed meanwhile.
        UntrustedEngine, CorruptEngine: an engine would be of no use elsewhere.
    """
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    if os.path.lexists(target):
        raise StoreError(f"{target} is there already: choose another name, or remove it first")
    with store_errors(f"Exporting engines to {target}", target.parent, sum(entry.bytes for entry in entries)):
        try:
            with part.open("xb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                    for entry in _held(entries, progress):
                        text = shareable_manifest(entry, store.keyring).to_json().encode()
                        _add(archive, entry.digest, MANIFEST_NAME, len(text), io.BytesIO(text))
                        for name, record in entry.manifest.files.items():
                            with entry.path(name).open("rb") as source:
                                _add(archive, entry.digest, name, record.bytes, source)
                file.flush()
                os.fsync(file.fileno())
            replace(part, target)
            sync_folder(target.parent)
        finally:
            part.unlink(missing_ok=True)
    return target.stat().st_size


def export_folder(
    store: EngineStore, entries: Sequence[Entry], target: Path, progress: ProgressCallback = ignore_progress
) -> int:
    """Write engines into a folder, each whole or not at all; returns how many were not there yet.

    Raises:
        StoreError: the folder cannot be written, or an engine was removed meanwhile.
        UntrustedEngine, CorruptEngine: an engine would be of no use elsewhere.
    """
    written = 0
    with store_errors(f"Exporting engines to {target}", target, sum(entry.bytes for entry in entries)):
        (target / _FOLDER).mkdir(parents=True, exist_ok=True)
        for entry in _held(entries, progress):
            place = target / _FOLDER / entry.digest
            part = target / f".{entry.digest[:12]}.{uuid.uuid4().hex}.part"
            if place.is_dir():
                continue
            try:
                part.mkdir()
                for name in entry.manifest.files:
                    write_parts(part / name, read_parts(entry.path(name)))
                write_durably(part / MANIFEST_NAME, shareable_manifest(entry, store.keyring).to_json())
                sync_folder(part)
                replace(part, place)
                written += 1
            except OSError:
                if not place.is_dir():  # else another process was faster
                    raise
            finally:
                remove_tree(part)
        sync_folder(target / _FOLDER)
    return written


def _held(entries: Sequence[Entry], progress: ProgressCallback) -> Iterator[Entry]:
    """Each entry, its files checked, and kept from being removed while it is written."""
    for number, entry in enumerate(entries):
        progress(Progress("export", number / len(entries), f"exporting engine {number + 1} of {len(entries)}"))
        with entry.hold():
            entry.verify_files()
            yield entry


def _add(archive: tarfile.TarFile, digest: str, name: str, size: int, source: IO[bytes]) -> None:
    info = tarfile.TarInfo(f"{_FOLDER}/{digest}/{name}")
    info.size = size
    archive.addfile(info, source)


def import_engines(
    store: EngineStore, source: Path, received: Received, progress: ProgressCallback = ignore_progress
) -> None:
    """Take all engines of a file or folder into the store, each whole or not at all.

    Args:
        received: told of each engine. One that is damaged, or that this user does not trust, is left out.

    Raises:
        StoreError: there is no such file or folder, it cannot be read to its end, or the store cannot be written.
    """
    with store_errors(f"Importing engines from {source}", store.root):
        with _ImportedFolder(source) if source.is_dir() else _ImportedFile(source) as given:
            for number, digest in enumerate(given.digests):
                progress(Progress("import", number / len(given.digests), f"importing engine {digest[:12]}"))
                outcome: Entry | SlipstreamError
                try:
                    outcome = _take(store, given, digest)
                except (CorruptEngine, IncompatibleEngine, UntrustedEngine) as error:
                    outcome = error
                received(digest, outcome)
            if given.fault or not given.digests:
                fault = given.fault or "it holds no engines: name what `slipstream export` made, or an engine store"
                raise StoreError(f"{source} cannot be imported whole: {fault}")


def _take(store: EngineStore, given: _ImportedFolder | _ImportedFile, digest: str) -> Entry:
    known = store.lookup(digest)
    if known is not None and known.why_untrusted() is None:
        return known
    manifest = Manifest.from_json(given.manifest(digest), f"The manifest of the engine {digest[:12]}")
    if manifest.digest != digest:
        raise CorruptEngine(f"The folder of the engine {digest[:12]} holds another engine.")
    return store.receive(manifest, lambda name: given.parts(digest, name))


class _ImportedFolder(contextlib.ExitStack):
    """A folder of engines from elsewhere; what is no plain file is never opened."""

    fault = ""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self._engines = source / _FOLDER
        self.digests = sorted(path.name for path in self._engines.glob("*") if is_digest(path.name))

    def manifest(self, digest: str) -> bytes:
        file = self._file(digest, MANIFEST_NAME)
        if file.stat().st_size > _LARGEST_MANIFEST:
            raise CorruptEngine(f"The manifest of the engine {digest[:12]} is too large.")
        return file.read_bytes()

    def parts(self, digest: str, name: str) -> Iterable[bytes]:
        return read_parts(self._file(digest, name))

    def _file(self, digest: str, name: str) -> Path:
        folder = self._engines / digest
        if folder.is_symlink() or (folder / name).is_symlink() or not (folder / name).is_file():
            raise CorruptEngine(f"The engine {digest[:12]} has no plain file {name}.")
        return folder / name


class _ImportedFile(contextlib.ExitStack):
    """An archive. Its members are only read, under the names that manifests ask for; nothing is unpacked by name.

    Raises:
        StoreError: it is no archive.
    """

    def __init__(self, source: Path) -> None:
        super().__init__()
        self.fault = ""
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            self._archive = self.enter_context(tarfile.open(source, mode="r:"))
            for member in self._archive:
                if member.isreg() and not member.issparse():
                    self._members[member.name] = member
        except tarfile.TarError as error:
            if not self._members:
                raise StoreError(
                    f"{source} is no archive of engines ({error}): name one that `slipstream export` made"
                ) from None
            self.fault = f"the file ends too early or is damaged ({error}); get it anew"
        names = (name.split("/") for name in self._members)
        self.digests = sorted(
            {parts[1] for parts in names if len(parts) == 3 and parts[0] == _FOLDER and is_digest(parts[1])}
        )

    def manifest(self, digest: str) -> bytes:
        text = b""
        for part in self.parts(digest, MANIFEST_NAME):
            text += part
            if len(text) > _LARGEST_MANIFEST:
                raise CorruptEngine(f"The manifest of the engine {digest[:12]} is too large.")
        return text

    def parts(self, digest: str, name: str) -> Iterable[bytes]:
        member = self._members.get(f"{_FOLDER}/{digest}/{name}")
        source = self._archive.extractfile(member) if member else None
        if source is None:
            raise CorruptEngine(f"The file {name} of the engine {digest[:12]} is missing from the archive.")
        with source:
            try:
                while part := source.read(CHUNK_BYTES):
                    yield part
            except tarfile.TarError:  # cut off: what is there does not fit its checksum
                return
