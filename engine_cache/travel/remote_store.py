"""A store of engines at an address that fsspec can reach: s3, gcs, abfs, a folder; http and https, to be read.

    <url>/engines/<digest>.json    the manifest; written last, so that what it names is there
    <url>/files/<sha256>           files of engines, by their content: no writer can spoil what another has written
    <url>/leases/<digest>.<n>.json who builds an engine at this moment; see `lease.py`

Whatever is read is checked: the manifest's signature before anything else, each file by its checksum.
"""

from __future__ import annotations

import contextlib
import functools
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import BackendUnavailable, CorruptEngine
from ...core.formatting import say_bytes
from ...core.progress import CancelToken, Progress, ProgressCallback, ignore_progress
from .. import EngineStore, Entry, FileRecord, Keyring, Manifest, is_digest, why_untrusted
from .retries import RemoteError, Retries
from .shareable import shareable_manifest

_Result = TypeVar("_Result")

_CHUNK_BYTES = 8 << 20
_LARGEST_MANIFEST = 16 << 20
_WRONG_BYTES = 2
"""How often a file is read anew that arrived with another content."""
_PACKAGES = {
    **{"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"},
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
}
_CONNECT_SECONDS, _READ_SECONDS = 10, 30


class RemoteStore:
    """Engines at an address. Its methods may be called from any thread.

    Args:
        url: such as "s3://bucket/engines" or "https://example.org/engines".
        options: of fsspec's file system for it, beside what the environment says (`AWS_ENDPOINT_URL` and the like).

    Raises:
        BackendUnavailable: fsspec, or its package for such an address, is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, retries: Retries | None = None) -> None:
        self.url = re.sub(r"//[^/@]*@", "//", url.rstrip("/"))  # without a password, as messages show it
        self._retries = retries or Retries()
        self._files, self._root = _file_system(url.rstrip("/"), options or {})

    def __str__(self) -> str:
        return self.url

    # Reading

    def digests(self) -> list[str]:
        """Of all engines there.

        Raises:
            RemoteError: it cannot be asked, or cannot list what it has.
        """
        names = (name.removesuffix(".json") for name in self.names("engines"))
        return sorted(name for name in names if is_digest(name))

    def manifest(self, digest: str, cancel: CancelToken | None = None) -> Manifest | None:
        """The manifest of an engine; None where there is none. Its signature is not checked.

        Raises:
            RemoteError: the store cannot be asked.
            CorruptEngine: it is no manifest of this engine.
            IncompatibleEngine: a newer Slipstream wrote it.
        """
        try:
            text = self._read_small(f"engines/{digest}.json", cancel)
        except FileNotFoundError:
            return None
        manifest = Manifest.from_json(text, f"The manifest of the engine {digest[:12]} in {self}")
        if manifest.digest != digest:
            raise CorruptEngine(f"The manifest of the engine {digest[:12]} in {self} is of another engine.")
        return manifest

    def why_not_pulled(self, digest: str, keyring: Keyring) -> str | None:
        """Why `pull` would not bring this engine, and the way out; None where it would.

        Raises:
            RemoteError: the store cannot be asked.
        """
        manifest = self.manifest(digest)
        return f"{self} has no such engine" if manifest is None else why_untrusted(manifest, keyring)

    def pull(
        self,
        digest: str,
        store: EngineStore,
        progress: ProgressCallback = ignore_progress,
        cancel: CancelToken | None = None,
    ) -> Entry | None:
        """Bring an engine into `store`, checked, whole or not at all; None where there is none.

        Raises:
            UntrustedEngine: this user does not trust who signed it; its files were not read.
            RemoteError: it could not be read.
            CorruptEngine: it was read several times, with wrong content.
            BuildCancelled: somebody cancelled it.
            StoreError: the store cannot be written.
        """
        cancel = cancel or CancelToken()
        progress(Progress("pull", 0.0, f"looking for the engine in {self}"))
        manifest = self.manifest(digest, cancel)
        if manifest is None:
            return None
        for _ in range(_WRONG_BYTES):
            try:
                return store.receive(manifest, _Counted(self, manifest, progress, cancel).parts)
            except CorruptEngine as error:
                wrong = error
        raise CorruptEngine(f"{wrong} It came from {self}; its maker can replace it: slipstream push --again")

    def parts(self, record: FileRecord, cancel: CancelToken) -> Iterator[bytes]:
        """The content of a file, in parts; a part whose connection is cut is read again.

        Raises:
            RemoteError: it could not be read.
        """
        path, done = self._path(f"files/{record.sha256}"), 0
        while done < record.bytes:
            end = min(done + _CHUNK_BYTES, record.bytes)
            read = functools.partial(self._files.cat_file, path, start=done, end=end)
            try:
                part = bytes(self._try(f"Reading {record.sha256[:12]}", read, cancel))
            except FileNotFoundError:
                raise RemoteError(f"{self} lacks a file of the engine, {record.sha256}; push it again") from None
            is_last = len(part) < end - done  # it is shorter than it should be, which its checksum tells
            if len(part) > end - done:  # a server that sends the whole file, whatever part it is asked for
                part = part[done:]
            done += len(part)
            if part:
                yield part
            if is_last or not part:
                return

    # Writing

    def push(
        self,
        entry: Entry,
        store: EngineStore,
        progress: ProgressCallback = ignore_progress,
        cancel: CancelToken | None = None,
        again: bool = False,
    ) -> bool:
        """Put an engine there, its manifest last; returns whether anything was missing.

        Args:
            again: also what seems to be there already.

        Raises:
            UntrustedEngine: the engine cannot be signed, or is not to be trusted itself.
            CorruptEngine: its files differ from its manifest.
            RemoteError: it could not be written.
        """
        cancel = cancel or CancelToken()
        manifest = shareable_manifest(entry, store.keyring)
        if not again and self._has(manifest):
            return False
        sent = 0
        with entry.hold():
            entry.verify_files()
            for name, record in manifest.files.items():
                message = f"sending {say_bytes(sent)} of {say_bytes(manifest.bytes)}"
                progress(Progress("push", sent / max(manifest.bytes, 1), message))
                self._send(entry.path(name), record, cancel, again)
                sent += record.bytes
        self.write_small(f"engines/{entry.digest}.json", manifest.to_json().encode(), cancel)
        progress(Progress("push", 1.0, "sent"))
        return True

    def _has(self, manifest: Manifest) -> bool:
        try:
            there = self.manifest(manifest.digest)
        except CorruptEngine:
            return False
        return there is not None and all(self._size(record) == record.bytes for record in there.files.values())

    def _send(self, file: Path, record: FileRecord, cancel: CancelToken, again: bool) -> None:
        if not again and self._size(record) == record.bytes:
            return
        path = self._path(f"files/{record.sha256}")

        def attempt() -> None:
            self._make_folder("files")
            self._put(file, path)
            if (size := self._size(record)) != record.bytes:
                raise OSError(f"{size} of {record.bytes} bytes arrived")

        self._change(f"Sending {file.name}", attempt, cancel)

    def _put(self, file: Path, path: str) -> None:
        if not self._is_folder:
            self._files.put_file(str(file), path)
            return
        part = f"{path}.{uuid.uuid4().hex}.part"
        self._files.put_file(str(file), part)
        self._files.mv(part, path)

    def write_small(self, name: str, content: bytes, cancel: CancelToken | None = None) -> None:
        """Write a small file whole; a reader sees the old or the new one.

        Raises:
            RemoteError: it could not be written.
        """
        path = self._path(name)

        def attempt() -> None:
            self._make_folder(name.rpartition("/")[0])
            if not self._is_folder:
                self._files.pipe_file(path, content)
                return
            part = f"{path}.{uuid.uuid4().hex}.part"
            self._files.pipe_file(part, content)
            self._files.mv(part, path)

        self._change(f"Writing {name}", attempt, cancel)

    @property
    def _is_folder(self) -> bool:
        """Whether it lies in a file system of this machine, or one that is mounted."""
        return "file" in self._protocols

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocols = self._files.protocol
        return (protocols,) if isinstance(protocols, str) else tuple(protocols)

    def create_small(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one of this name; whether it was written. Of several writers one succeeds.

        Raises:
            RemoteError: it could not be written.
        """

        def attempt() -> bool:
            self._make_folder(name.rpartition("/")[0])
            try:
                if self._is_folder:  # fsspec looks first and writes then, between which another may come
                    with open(self._path(name), "xb") as file:
                        file.write(content)
                else:
                    self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True

        return self._change(f"Writing {name}", attempt)

    def read_small(self, name: str) -> bytes | None:
        """The content of a small file; None where there is none.

        Raises:
            RemoteError: the store cannot be asked.
        """
        try:
            return self._read_small(name, None)
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder; none where there is no such folder.

        Raises:
            RemoteError: the store cannot be asked.
        """
        try:
            found = self._try(
                f"Listing {folder}", lambda: self._files.ls(self._path(folder), detail=False, refresh=True)
            )
        except FileNotFoundError:
            return []
        return [str(path).rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        """Remove a file, where it is there.

        Raises:
            RemoteError: it could not be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._change(f"Removing {name}", lambda: self._files.rm_file(self._path(name)))

    def _read_small(self, name: str, cancel: CancelToken | None) -> bytes:
        def attempt() -> bytes:
            return bytes(self._files.cat_file(self._path(name), start=0, end=_LARGEST_MANIFEST))

        return self._try(f"Reading {name}", attempt, cancel)

    def _size(self, record: FileRecord) -> int | None:
        try:
            found = self._try("Looking for a file", lambda: self._files.info(self._path(f"files/{record.sha256}")))
        except FileNotFoundError:
            return None
        return None if found.get("size") is None else int(found["size"])

    def _try(self, what: str, attempt: Callable[[], _Result], cancel: CancelToken | None = None) -> _Result:
        return self._retries.run(f"{what} in {self}", attempt, cancel or CancelToken())

    def _change(self, what: str, attempt: Callable[[], _Result], cancel: CancelToken | None = None) -> _Result:
        if "http" in self._protocols:
            raise RemoteError(
                f"{what} in {self} is not possible, since web servers are only read: push to the folder or bucket that "
                "the server gives out"
            )
        return self._try(what, attempt, cancel)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        if self._is_folder:
            self._files.makedirs(self._path(name), exist_ok=True)


class _Counted:
    """The files of an engine as they arrive, with progress."""

    def __init__(
        self, remote: RemoteStore, manifest: Manifest, progress: ProgressCallback, cancel: CancelToken
    ) -> None:
        self._remote, self._manifest, self._progress, self._cancel = remote, manifest, progress, cancel
        self._done = 0

    def parts(self, name: str) -> Iterator[bytes]:
        total = self._manifest.bytes
        for part in self._remote.parts(self._manifest.files[name], self._cancel):
            self._done += len(part)
            message = f"pulling the engine: {say_bytes(self._done)} of {say_bytes(total)}"
            self._progress(Progress("pull", min(1.0, self._done / max(total, 1)), message))
            yield part


def _patience(protocol: str) -> dict[str, Any]:
    """Options by which a client does not wait for an answer for long."""
    if protocol == "s3":
        timeouts = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        return {"config_kwargs": {**timeouts, "retries": {"max_attempts": 1}}}
    if protocol in ("abfs", "abfss", "az"):
        return {"connection_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
    if protocol in ("http", "https", "gs", "gcs"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        if protocol in ("http", "https"):
            return {"client_kwargs": {"timeout": timeout}}
        return {"requests_timeout": timeout, "retry_timeout": _CONNECT_SECONDS}  # the latter: for a bucket's kind
    return {}


def _without_retries(files: Any) -> None:
    """Have a client tell of its first failure: what it would wait for further ones adds up with what we wait.

    Measured on loopback, where nobody answers: 34 s for one question to gcsfs, over a minute to adlfs.
    """
    if hasattr(files, "retries"):  # s3fs
        files.retries = 1
    if once := getattr(getattr(type(files), "_request", None), "__wrapped__", None):  # gcsfs, in a decorator
        files._request = functools.partial(once, files)
    policy = getattr(getattr(getattr(files, "service_client", None), "_config", None), "retry_policy", None)
    if policy is not None and hasattr(policy, "total_retries"):  # adlfs, in its client
        policy.total_retries = 0


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        import fsspec

        given = {**_patience(protocol), **options}
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **given)
        _without_retries(files)
    except ImportError as error:
        package = _PACKAGES.get(protocol, "")
        wanted = " ".join(filter(None, ("fsspec", package)))
        raise BackendUnavailable(
            f"Stores at addresses like {protocol}:// need further packages ({error}): pip install {wanted}"
        ) from error
    except ValueError as error:
        raise BackendUnavailable(f"{protocol}:// is no address that fsspec knows: {error}") from error
    return files, str(root).rstrip("/")
