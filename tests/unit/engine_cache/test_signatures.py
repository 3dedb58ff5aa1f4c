"""Engines are loaded only from this user and from makers whose keys the user trusts."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.core.errors import BackendUnavailable, StoreError, UntrustedEngine
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Keyring, PublicKey, keyring
from slipstream.engine_cache.keyring import TRUSTED_VARIABLE
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.tests.unit.engine_cache.support import make_key

Put = Callable[..., Entry]


@pytest.fixture(autouse=True)
def no_further_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUSTED_VARIABLE, raising=False)


def store_of(tmp_path: Path, user: str) -> EngineStore:
    """A store that all users share, as one of them sees it."""
    return EngineStore(tmp_path / "store", keyring=Keyring(tmp_path / "users" / user))


def put_by(store: EngineStore, artifact: Artifact) -> Entry:
    return store.put(make_key(), artifact, label="SD15", build=BuildRecord(1.0))


def rewrite(entry: Entry, **changes: object) -> None:
    path = entry.directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}), encoding="utf-8")


def found(store: EngineStore) -> Entry:
    entry = store.lookup(make_key().digest)
    assert entry is not None
    return entry


@pytest.fixture
def without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("engine_cache.keyring", "engine_cache.signatures"):
        monkeypatch.setattr(f"slipstream.{module}.can_sign", lambda: False)


def test_what_this_user_built_is_loaded(tmp_path: Path, artifact: Artifact) -> None:
    put_by(store_of(tmp_path, "a"), artifact)
    assert found(store_of(tmp_path, "a")).artifact.files == artifact.files


def test_what_this_user_built_is_loaded_without_any_package(
    tmp_path: Path, artifact: Artifact, without_cryptography: None
) -> None:
    entry = put_by(store_of(tmp_path, "a"), artifact)
    assert entry.manifest.signature is None and entry.manifest.seal
    assert found(store_of(tmp_path, "a")).why_untrusted() is None
    with pytest.raises(UntrustedEngine, match="did not sign it for others"):
        _ = found(store_of(tmp_path, "b")).artifact


def test_a_package_that_came_or_went_since_changes_nothing(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_by(store_of(tmp_path, "a"), artifact)
    monkeypatch.setattr("slipstream.engine_cache.signatures.can_sign", lambda: False)
    monkeypatch.setattr(keyring, "can_sign", lambda: False)
    assert found(store_of(tmp_path, "a")).why_untrusted() is None


def test_a_strangers_engine_is_refused_with_the_way_out(tmp_path: Path, artifact: Artifact) -> None:
    put_by(store_of(tmp_path, "a"), artifact)
    with pytest.raises(UntrustedEngine, match=" trust add ed25519:") as refused:
        _ = found(store_of(tmp_path, "b")).artifact
    assert Keyring(tmp_path / "users" / "a").public_key() in str(refused.value)


def test_an_engine_of_a_trusted_maker_is_loaded_until_the_key_goes(tmp_path: Path, artifact: Artifact) -> None:
    put_by(maker := store_of(tmp_path, "a"), artifact)
    reader = store_of(tmp_path, "b")
    reader.keyring.trust(maker.keyring.public_key(), "the  build\nfarm")
    assert found(reader).why_untrusted() is None
    assert list(Keyring(reader.keyring.folder).trusted().values()) == ["the build farm"]
    assert reader.keyring.distrust(maker.keyring.public_key())
    assert "not among the keys" in str(found(reader).why_untrusted())
    assert not reader.keyring.distrust(maker.keyring.public_key())


def test_a_key_that_one_removes_does_not_come_back_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One adds a key while another removes one: whoever comes second reads what the first one wrote."""
    first, second = Keyring(tmp_path / "keys"), Keyring(tmp_path / "keys")
    stolen, fresh = PublicKey("ed25519:" + "a" * 64), PublicKey("ed25519:" + "b" * 64)
    first.trust(stolen, "stolen")
    read, removing = keyring._lines_of, threading.Thread(target=second.distrust, args=(stolen,))

    def slowly(path: Path) -> list[str]:
        found = read(path)
        if threading.current_thread() is not removing and not removing.ident:
            removing.start()
            removing.join(0.5)
        return found

    monkeypatch.setattr(keyring, "_lines_of", slowly)
    first.trust(fresh, "fresh")
    removing.join(30)
    assert list(Keyring(tmp_path / "keys").trusted()) == [fresh]


def test_a_list_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    ours = Keyring(tmp_path / "keys")
    ours.trust(PublicKey("ed25519:" + "a" * 64), "alice")
    path = next(path for path in (tmp_path / "keys").iterdir() if b"alice" in path.read_bytes())
    path.write_bytes(before := path.read_bytes() + "ed25519:José\n".encode("latin-1"))
    with pytest.raises(StoreError, match="UTF-8"):
        ours.trust(PublicKey("ed25519:" + "b" * 64), "bob")
    assert path.read_bytes() == before


def test_keys_of_the_environment(tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    put_by(maker := store_of(tmp_path, "a"), artifact)
    monkeypatch.setenv(TRUSTED_VARIABLE, f"nonsense, {maker.keyring.public_key()}")
    assert found(store_of(tmp_path, "b")).why_untrusted() is None


def test_an_unsigned_engine_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    entry = put_by(store := store_of(tmp_path, "a"), artifact)
    rewrite(entry, seal=None, signature=None)
    with pytest.raises(UntrustedEngine, match="trust adopt"):
        _ = found(store).artifact


def test_an_engine_of_before_is_adopted(tmp_path: Path, artifact: Artifact) -> None:
    entry = put_by(store := store_of(tmp_path, "a"), artifact)
    rewrite(entry, seal=None, signature=None)
    assert [entry.why_untrusted() for entry in store.adopt([found(store)])] == [None]
    assert found(store_of(tmp_path, "a")).why_untrusted() is None


@pytest.mark.parametrize("by_signature", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "other"},
        {"details": {"constants": "elsewhere"}},
        {"created": "2020-01-01T00:00:00+00:00"},
        {"files": {"model.pt2": {"bytes": 3000, "sha256": "0" * 64}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_changed_after_it_was_signed_is_refused(
    tmp_path: Path, artifact: Artifact, by_signature: bool, changes: dict[str, object]
) -> None:
    entry = put_by(store := store_of(tmp_path, "a"), artifact)
    rewrite(entry, **changes, **({"seal": None} if by_signature else {"signature": None}))
    with pytest.raises(UntrustedEngine, match="was changed after"):
        _ = found(store).artifact


@pytest.mark.parametrize("signature", ["", "ed25519:", "rsa:00:11", "ed25519:" + "0" * 64 + ":zz", "x" * 5000])
def test_a_signature_that_is_none(tmp_path: Path, artifact: Artifact, signature: str) -> None:
    entry = put_by(store := store_of(tmp_path, "a"), artifact)
    rewrite(entry, seal=None, signature=signature)
    assert found(store).why_untrusted()


def test_a_seal_that_is_none(tmp_path: Path, artifact: Artifact) -> None:
    entry = put_by(store := store_of(tmp_path, "a"), artifact)
    for seal in ("", ":", "ü" * 99, store.keyring.seal(b"another text")):
        rewrite(entry, seal=seal, signature=None)
        assert found(store).why_untrusted()


def test_checks_and_times_may_be_added_later(store: EngineStore, put: Put) -> None:
    entry = put()
    changed = dataclasses.replace(entry, manifest=dataclasses.replace(entry.manifest, verifications={}, speed=None))
    assert changed.why_untrusted() is None


def test_a_build_takes_the_place_of_an_engine_that_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    rewrite(put_by(store := store_of(tmp_path, "a"), artifact), seal=None, signature=None)
    assert put_by(store, artifact).why_untrusted() is None
    assert found(store).why_untrusted() is None


def test_a_key_is_made_once_for_this_user_alone(tmp_path: Path) -> None:
    first = Keyring(tmp_path / "keys")
    key = first.public_key()
    assert Keyring(tmp_path / "keys").public_key() == key != Keyring(tmp_path / "others").public_key()
    if os.name != "nt":
        assert stat.S_IMODE((tmp_path / "keys" / "store.key").stat().st_mode) == 0o600
    assert {path.name for path in (tmp_path / "keys").iterdir()} <= {"store.key", "keys.lock"}


def test_many_processes_make_one_key(tmp_path: Path, python: Callable[..., subprocess.Popen[str]]) -> None:
    code = "print(Keyring(pathlib.Path(sys.argv[1])).seal(b'x'))"
    processes = [python(code, tmp_path / "keys") for _ in range(2)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1


def test_a_key_travels_by_explicit_export(tmp_path: Path, artifact: Artifact) -> None:
    put_by(maker := store_of(tmp_path, "a"), artifact)
    other = store_of(tmp_path, "image")
    other.keyring.import_secret(maker.keyring.export_secret())
    assert found(other).why_untrusted() is None and other.keyring.public_key() == maker.keyring.public_key()
    with pytest.raises(ValueError, match="no secret key"):
        other.keyring.import_secret("0" * 63)


def test_a_key_that_cannot_be_kept_serves_this_process(
    tmp_path: Path, artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    store = EngineStore(tmp_path / "store", keyring=Keyring(tmp_path / "file" / "keys"))
    assert put_by(store, artifact).why_untrusted() is None and "by this process alone" in caplog.text


def test_a_damaged_key_is_not_used(tmp_path: Path) -> None:
    before = Keyring(tmp_path / "keys").seal(b"x")
    (tmp_path / "keys" / "store.key").write_text("00")
    assert not Keyring(tmp_path / "keys").knows_seal(before, b"x")


def test_no_secret_lies_in_the_store(tmp_path: Path, artifact: Artifact) -> None:
    put_by(store := store_of(tmp_path, "a"), artifact)
    secret = store.keyring.export_secret()
    for path in store.root.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()


@pytest.mark.parametrize("text", ["", "ed25519:12", "ed25519:" + "g" * 64, "0" * 64])
def test_what_is_no_public_key(text: str) -> None:
    with pytest.raises(ValueError, match="no public key"):
        PublicKey(text)


def test_signing_without_the_package_says_how_to_get_it(tmp_path: Path, without_cryptography: None) -> None:
    with pytest.raises(BackendUnavailable, match="pip install cryptography"):
        Keyring(tmp_path / "keys").public_key()
