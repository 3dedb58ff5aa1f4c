"""Reads an entry of a folder of engines, and checks what can be checked without reading its files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import CorruptEngine, StoreError
from .entry import Entry
from .key import digest_of
from .manifest import MANIFEST_NAME, Manifest, is_digest

if TYPE_CHECKING:
    from .store import EngineStore


def entry_folder(engines: Path, digest: str) -> Path:
    """Where the engine of `digest` lies in a folder of engines.

    Raises:
        ValueError: the text is no digest.
    """
    if not is_digest(digest):
        raise ValueError(f"{digest!r} is no engine digest: it takes 64 hex digits")
    return engines / digest


def read_entry(engines: Path, digest: str, store: EngineStore) -> Entry | None:
    """The entry of `digest` in the folder `engines`; None where there is none.

    Raises:
        CorruptEngine: manifest or file sizes are wrong.
        IncompatibleEngine: a newer Slipstream wrote it.
        OSError: it may not be read.
    """
    directory, root = entry_folder(engines, digest), engines.parent
    try:
        text = (directory / MANIFEST_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir():
            raise CorruptEngine(f"The engine {digest[:12]} in {root} has no manifest.") from None
        return None
    manifest, found = manifest_of(text, f"The manifest of the engine {digest[:12]} in {root}")
    if found != digest or directory.is_symlink():
        raise CorruptEngine(f"The folder of the engine {digest[:12]} in {root} holds another engine.")
    entry = Entry(directory, manifest, store)
    try:
        entry.check_sizes()
    except StoreError:  # removed by another process while we looked
        return None
    return entry


@functools.lru_cache(maxsize=64)
def manifest_of(text: bytes, source: str) -> tuple[Manifest, str | None]:
    """A manifest and the digest of its factors; None in place of the digest where the manifest states another one.

    Cached by the text, since every run looks up each engine.
    """
    manifest = Manifest.from_json(text, source)
    try:
        found = digest_of(manifest.factors)
    except RecursionError:  # factors that no key has
        return manifest, None
    return manifest, found if found == manifest.digest else None
