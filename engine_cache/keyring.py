"""This user's key, and the public keys of others whose engines may be loaded.

    <folder>/store.key       32 secret bytes in hex, made on first use, readable by this user alone
    <folder>/trusted_keys    public keys of others, one a line: "ed25519:<64 hex digits> <name>"

The folder is `SLIPSTREAM_KEYS`, else one in the user's settings. It is never inside an engine store: whoever copies or
shares a store must not copy the key with it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import importlib.util
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import BackendUnavailable, StoreError, warn_once
from .files import replace, replace_text, store_errors
from .locks import locked

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FOLDER_VARIABLE = "SLIPSTREAM_KEYS"
TRUSTED_VARIABLE = "SLIPSTREAM_TRUSTED_KEYS"
"""Further public keys, separated by commas: for containers, which have no settings of a user."""
GET_CRYPTOGRAPHY = "install the package cryptography (pip install cryptography) into the Python that runs Slipstream"

_SECRET, _TRUSTED = "store.key", "trusted_keys"
_PREFIX = "ed25519:"
_LOCK_SECONDS = 10.0

log = logging.getLogger(__name__)


class PublicKey(str):
    """A public key as text, "ed25519:" and 64 hex digits.

    Raises:
        ValueError: the text is none.
    """

    def __new__(cls, text: str) -> PublicKey:
        plain = text.strip().lower()
        if not re.fullmatch(r"ed25519:[0-9a-f]{64}", plain):
            raise ValueError(f"{text.strip()[:90]!r} is no public key: it takes ed25519: and 64 hex digits")
        return super().__new__(cls, plain)

    @property
    def short(self) -> str:
        """The beginning, for people."""
        return self[: len(_PREFIX) + 12]

    def verifies(self, signature: bytes, text: bytes) -> bool:
        """Whether `signature` is this key's, of `text`; False where the package cryptography is missing."""
        if not can_sign():
            return False
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(self[len(_PREFIX) :])).verify(signature, text)
        except InvalidSignature:
            return False
        return True


def can_sign() -> bool:
    """Whether the package for Ed25519 is installed."""
    return "cryptography" in sys.modules or _is_installed()


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("cryptography") is not None


class Keyring:
    """The keys in one folder, shared by all stores of a user.

    Args:
        folder: in place of the configured one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._made: tuple[Path, bytes] | None = None
        self._read: tuple[object, dict[PublicKey, str]] | None = None

    @property
    def folder(self) -> Path:
        return self._folder or _configured_folder()

    # This user's own key

    def seal(self, text: bytes) -> str:
        """A code by which this user's processes, and nobody else's, know `text` again: HMAC-SHA256 by the secret key.

        The key is made where there is none. It needs no package, and proves nothing to others.
        """
        secret = self._secret()
        return f"{_name_of(secret)}:{_code(secret, text)}"

    def knows_seal(self, seal: str, text: bytes) -> bool:
        """Whether `seal` was made of `text` by this user's key."""
        secret = self._find_secret()
        if secret is None:
            return False
        return hmac.compare_digest(seal.encode(), f"{_name_of(secret)}:{_code(secret, text)}".encode())

    def is_own_seal(self, seal: str) -> bool:
        """Whether `seal` was made by this user's key, of whatever text."""
        secret = self._find_secret()
        return secret is not None and seal.partition(":")[0] == _name_of(secret)

    def sign(self, text: bytes) -> str:
        """An Ed25519 signature of `text`, with the public key before it.

        Raises:
            BackendUnavailable: the package cryptography is not installed.
        """
        key = _private_key(self._secret())
        return f"{_public_text(key)}:{key.sign(text).hex()}"

    def public_key(self) -> PublicKey:
        """What others need to load engines of this user; the key is made where there is none.

        Raises:
            BackendUnavailable: the package cryptography is not installed.
        """
        return _public_text(_private_key(self._secret()))

    def own_key(self) -> PublicKey | None:
        """Like `public_key`, but makes nothing; None where there is no key, or no package for it."""
        secret = self._find_secret()
        return _public_text(_private_key(secret)) if secret is not None and can_sign() else None

    def export_secret(self) -> str:
        """The secret key as text, for machines that are to count as this one; it is made where there is none."""
        return self._secret().hex()

    def import_secret(self, text: str) -> None:
        """Take a secret key from another machine in place of this one's.

        Raises:
            ValueError: it is none.
            StoreError: it cannot be written.
        """
        if not re.fullmatch(r"[0-9a-f]{64}", text.strip()):
            raise ValueError(
                "This is no secret key: it takes 64 hex digits, as `slipstream trust export-key` prints them"
            )
        with store_errors("Importing the key", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / "keys.lock", "Another process is writing keys", _LOCK_SECONDS):
                self._write(bytes.fromhex(text.strip()))
        self._made = None

    def _secret(self) -> bytes:
        """The secret key; one that cannot be kept serves this process alone."""
        with self._lock:
            if (found := self._find_secret()) is not None:
                return found
            try:
                with store_errors("Making a key for engines", self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    with locked(self.folder / "keys.lock", "Another process is writing keys", _LOCK_SECONDS):
                        if (found := self._find_secret()) is not None:
                            return found
                        return self._write(secrets.token_bytes(32))
            except StoreError as error:
                warn_once(log, f"Engines that are built now are trusted by this process alone. {error}")
                self._made = self.folder, secrets.token_bytes(32)
                return self._made[1]

    def _find_secret(self) -> bytes | None:
        if self._made is not None and self._made[0] == self.folder:
            return self._made[1]
        try:
            text = (self.folder / _SECRET).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not re.fullmatch(r"[0-9a-f]{64}", text):
            warn_once(log, f"{self.folder / _SECRET} holds no key; delete it, and another is made.")
            return None
        self._made = self.folder, bytes.fromhex(text)
        return self._made[1]

    def _write(self, secret: bytes) -> bytes:
        part = self.folder / f"{_SECRET}.{os.getpid()}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
        replace(part, self.folder / _SECRET)
        return secret

    # Those of others

    def trusted(self) -> Mapping[PublicKey, str]:
        """Public keys whose engines are loaded -> the name that the user gave each."""
        path, more = self.folder / _TRUSTED, os.environ.get(TRUSTED_VARIABLE, "")
        try:
            found = path.stat()
            version: object = (str(path), found.st_ino, found.st_mtime_ns, found.st_size, more)
        except OSError:
            version = (str(path), more)
        if self._read is None or self._read[0] != version:
            self._read = version, {**_keys_in(path), **_keys_of(more.split(","), TRUSTED_VARIABLE)}
        return self._read[1]

    def trust(self, key: PublicKey, name: str) -> None:
        """Load engines signed by `key` from now on.

        Raises:
            StoreError: the list cannot be written.
        """
        with self._changing() as keys:
            keys[key] = " ".join(name.split())

    def distrust(self, key: PublicKey) -> bool:
        """Load them no more, unless the environment names the key too; whether it was in the list.

        Raises:
            StoreError: the list cannot be written.
        """
        if key not in _keys_in(self.folder / _TRUSTED):
            return False
        with self._changing() as keys:
            return keys.pop(key, None) is not None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[PublicKey, str]]:
        """The list, to be changed by one process at a time: a key that one removes must not come back by another."""
        with store_errors("Changing the list of trusted keys", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / "keys.lock", "Another process is writing keys", _LOCK_SECONDS):
                try:
                    keys = _keys_of(_lines_of(self.folder / _TRUSTED), _TRUSTED)
                except UnicodeDecodeError as error:
                    raise StoreError(f"{self.folder / _TRUSTED} is no text in UTF-8. Save it as such") from error
                yield keys
                text = "".join(f"{key} {name}".rstrip() + "\n" for key, name in keys.items())
                replace_text(self.folder / _TRUSTED, text, self.folder)
        self._read = None


def _configured_folder() -> Path:
    configured = os.environ.get(FOLDER_VARIABLE)
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("APPDATA") if os.name == "nt" else os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "slipstream" / "keys"


def _keys_in(path: Path) -> dict[PublicKey, str]:
    try:
        return _keys_of(_lines_of(path), str(path))
    except (OSError, UnicodeDecodeError):
        return {}


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def _keys_of(lines: list[str], source: str) -> dict[PublicKey, str]:
    found = {}
    for line in lines:
        text, _, name = line.strip().partition(" ")
        if not text or text.startswith("#"):
            continue
        try:
            found[PublicKey(text)] = name.strip()
        except ValueError as error:
            warn_once(log, f"{source}: {error}. The line is passed over.")
    return found


def _name_of(secret: bytes) -> str:
    return hashlib.sha256(b"slipstream key name\n" + secret).hexdigest()[:16]


def _code(secret: bytes, text: bytes) -> str:
    return hmac.new(hashlib.sha256(b"slipstream seal\n" + secret).digest(), text, "sha256").hexdigest()


def _private_key(secret: bytes) -> Ed25519PrivateKey:
    if not can_sign():
        raise BackendUnavailable(f"Engines for other machines are signed with Ed25519: {GET_CRYPTOGRAPHY}")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"slipstream signature\n" + secret).digest())


def _public_text(key: Ed25519PrivateKey) -> PublicKey:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return PublicKey(_PREFIX + key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex())
