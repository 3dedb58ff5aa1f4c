"""Files that are written whole or not at all, on every operating system."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ..core.errors import StoreError
from .manifest import FileRecord

CHUNK_BYTES = 4 << 20
_ON_WINDOWS = os.name == "nt"
_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}

Identity = tuple[int, int, int]
"""Size in bytes, mtime in ns and inode: what tells that nobody replaced or rewrote a file."""


class ReadOnlyStore(StoreError):
    """The store may be read but not written."""


@contextlib.contextmanager
def store_errors(action: str, folder: Path, needed: int = 0) -> Iterator[None]:
    """Turn an `OSError` of the block into a `StoreError` that says what to do.

    Args:
        action: what was being done, e.g. "storing the engine abc".
        needed: bytes that the action wanted to write.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        if error.errno in _NO_SPACE:
            raise no_space(action, folder, needed) from error
        if error.errno in _NO_PERMISSION:
            raise ReadOnlyStore(
                f"{action} failed: {where} cannot be written ({error.strerror}). Let this user write there, "
                f"or set SLIPSTREAM_HOME to a folder of your own."
            ) from error
        raise StoreError(
            f"{action} failed at {where}: {error.strerror or error}. Check that {folder} is a folder on a "
            f"working disk, or set SLIPSTREAM_HOME to another one."
        ) from error


def no_space(action: str, folder: Path, needed: int) -> StoreError:
    wanted = f"{mebibytes(needed)} are needed and " if needed else ""
    return StoreError(
        f"{action} failed: the disk of {folder} is full, {wanted}{mebibytes(free_bytes(folder))} are free. "
        f"Free some space, prune old engines, or set SLIPSTREAM_HOME to a folder on a larger disk."
    )


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def free_bytes(folder: Path) -> int:
    """Free space on the disk that `folder` is on, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def within_path_limit(root: Path, longest_inside: int) -> Path:
    """`root` in Windows' extended form where files inside would pass its limit of 260 characters.

    Args:
        longest_inside: characters of the longest path below `root`.
    """
    text = os.path.abspath(root)
    if not _ON_WINDOWS or text.startswith("\\\\") or len(text) + longest_inside < 259:
        return Path(text)
    return Path("\\\\?\\" + text)


def identity(path: Path) -> Identity:
    """Raises OSError when there is no such file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def sha256_of(path: Path) -> str:
    """Content digest in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def copy_durably(source: Path, target: Path) -> FileRecord:
    """Copy a file and wait until it is on disk; the digest is of the bytes that were written."""
    return write_parts(target, read_parts(source))


def read_parts(source: Path) -> Iterator[bytes]:
    """The content of a file, in parts."""
    with source.open("rb") as reader:
        while chunk := reader.read(CHUNK_BYTES):
            yield chunk


def write_parts(target: Path, parts: Iterable[bytes], most: int | None = None) -> FileRecord:
    """Write a new file of `parts` and wait until it is on disk; the digest is of the bytes that were written.

    Args:
        most: bytes after which nothing more is taken; None takes all.
    """
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as writer:
        for part in parts:
            size += len(part)
            if most is not None and size > most:
                break
            writer.write(part)
            digest.update(part)
        _sync(writer)
    return FileRecord(size, digest.hexdigest())


def write_durably(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        _sync(file)


def replace_text(path: Path, text: str, scratch: Path) -> None:
    """Write `path` so that a reader sees the old or the new text, never a part.

    Args:
        scratch: existing folder on the same disk for the file in the making.
    """
    beside = scratch / f"{path.name}.{uuid.uuid4().hex}.part"
    try:
        write_durably(beside, text)
        replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def replace(source: Path, target: Path) -> None:
    """`os.replace`, patient with Windows, where a virus scanner may hold a fresh file for a moment."""
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8) if _ON_WINDOWS else ():
        try:
            return os.replace(source, target)
        except PermissionError:
            time.sleep(pause)
    os.replace(source, target)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk, where the operating system can tell."""
    if _ON_WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Delete what can be deleted; the rest is left to the next `clean`."""
    shutil.rmtree(folder, ignore_errors=True)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
