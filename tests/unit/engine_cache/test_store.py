"""The engine store within one process."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import BuildFailed, CorruptEngine, StoreError
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Verification, files, workspace
from slipstream.engine_cache.locks import locked
from slipstream.engine_cache.workspace import QUARANTINE_KEPT, Workspace
from slipstream.tests.unit.engine_cache.support import WEIGHTS, make_key

Put = Callable[..., Entry]


def left_over(store: EngineStore) -> list[str]:
    """What lies in the store's working folders."""
    return sorted(
        str(path.relative_to(store.root))
        for folder in ("tmp", "in_use", "quarantine")
        for path in (store.root / folder).rglob("*")
    )


def rewrite_manifest(entry: Entry, **changes: Any) -> None:
    path = entry.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def age(entry: Entry, seconds: float) -> None:
    """Let the entry have been used `seconds` ago."""
    entry.hold().release()
    then = time.time() - seconds
    os.utime(entry.directory / ".last_used", (then, then))


# Put and look up


def test_put_then_lookup(store: EngineStore, put: Put, artifact: Artifact) -> None:
    key = make_key()
    assert store.lookup(key.digest) is None
    entry = put()
    found = EngineStore(store.root).lookup(key.digest)
    assert found is not None and found == entry
    assert found.path("model.pt2").read_bytes() == (artifact.directory / "model.pt2").read_bytes()
    assert found.directory == store.root / "engines" / key.digest
    assert found.bytes == store.size_bytes() == 4000
    assert found.manifest.factors == found.factors == key.factors
    assert found.manifest.build == BuildRecord(3.5, {"compile": 3.0})
    assert found.artifact == Artifact(found.directory, ("model.pt2", "constants.json"), {"nodes": 12})
    assert abs(found.last_used - time.time()) < 60
    found.verify_files()
    assert (artifact.directory / "model.pt2").exists(), "the build's files are the caller's"
    assert left_over(store) == []


def test_details_and_verifications_go_into_the_manifest(store: EngineStore, artifact: Artifact) -> None:
    result = Verification(1e-4, None, 3, "fp16")
    told = replace(artifact, details={"shape": (1, 2), "nodes": 13})
    entry = store.put(make_key(), told, label="x", build=BuildRecord(1), verifications={WEIGHTS: result})
    assert entry.manifest.details == {"shape": [1, 2], "nodes": 13}
    assert entry.manifest.verifications == {WEIGHTS: result}


def test_a_label_that_no_encoding_holds(store: EngineStore, artifact: Artifact) -> None:
    """As made from a file name that is no valid text."""
    entry = store.put(make_key(), artifact, label="SD\udc80 ×", build=BuildRecord(1))
    found = store.record_verification(entry, WEIGHTS, Verification(1e-4, None, 1, "fp16"))
    assert store.list() == [found] and found.manifest.label == "SD\udc80 ×"


def test_the_first_of_two_stays(store: EngineStore, put: Put, artifact: Artifact) -> None:
    first = put()
    (artifact.directory / "model.pt2").write_bytes(b"another build of the same engine")
    second = put()
    assert second == first
    second.verify_files(again=True)
    assert left_over(store) == []


def test_a_file_that_is_not_there_and_names_that_lead_out(store: EngineStore, artifact: Artifact) -> None:
    for names in (("model.pt2", "gone.bin"), ("../build/model.pt2",), ("manifest.json",)):
        with pytest.raises(BuildFailed, match=r"left no usable files.*Build it again"):
            store.put(make_key(), Artifact(artifact.directory, names), label="x", build=BuildRecord(1))
    assert store.list() == []


def test_details_that_json_cannot_hold_leave_nothing(store: EngineStore, artifact: Artifact) -> None:
    with pytest.raises(TypeError):
        store.put(make_key(), replace(artifact, details={"x": object()}), label="x", build=BuildRecord(1))
    assert store.list() == [] and left_over(store) == []


def test_list_find_and_size(store: EngineStore, put: Put) -> None:
    entries = [put(height) for height in (64, 128, 256)]
    for index, entry in enumerate(entries):
        age(entry, seconds=100 * (index + 1))
    assert store.list() == entries
    assert store.size_bytes() == 12000
    assert store.find(entries[1].digest[:10]) == [entries[1]]
    assert store.find("x") == []


def test_path_of_a_file_the_manifest_does_not_know(put: Put) -> None:
    with pytest.raises(KeyError, match="has no file '../model.pt2'"):
        put().path("../model.pt2")


@pytest.mark.parametrize("digest", ["", "..", "A" * 64, "a" * 63, "../" + "a" * 61, "a" * 64 + "\n"])
def test_what_is_no_digest_raises(store: EngineStore, digest: str) -> None:
    for action in (store.lookup, store.delete, lambda text: store.reserve(text).__enter__()):
        with pytest.raises(ValueError, match="64 hex digits"):
            action(digest)


def test_nothing_is_created_before_the_first_write(store: EngineStore) -> None:
    assert store.lookup("a" * 64) is None
    assert store.list() == [] and store.size_bytes() == 0 and store.verify_all() == {}
    assert store.prune(0) == [] and store.delete("a" * 64) is False
    assert not store.root.exists()


# Corrupt entries


def damage_byte(entry: Entry) -> None:
    flip_byte(entry.path("model.pt2"))


def damage_manifest(entry: Entry) -> None:
    (entry.directory / "manifest.json").write_text('{"schema_version": 1', "utf-8")


def damage_digest(entry: Entry) -> None:
    rewrite_manifest(entry, digest=make_key(512).digest)


def damage_factors(entry: Entry) -> None:
    rewrite_manifest(entry, factors=make_key(512).factors)


def damage_factors_beyond_json(entry: Entry) -> None:
    rewrite_manifest(entry, factors="HERE")
    path = entry.directory / "manifest.json"
    path.write_text(path.read_text("utf-8").replace('"HERE"', '{"x": 1e999}'), "utf-8")


def damage_names(entry: Entry) -> None:
    rewrite_manifest(entry, files={"../../secret": {"bytes": 1, "sha256": "c" * 64}})


def damage_by_truncation(entry: Entry) -> None:
    os.truncate(entry.path("model.pt2"), 100)


def damage_by_removal(entry: Entry) -> None:
    entry.path("model.pt2").unlink()


def damage_by_removing_the_manifest(entry: Entry) -> None:
    (entry.directory / "manifest.json").unlink()


def damage_by_link(entry: Entry) -> None:
    outside = entry.directory.parent.parent / "outside"
    path = entry.path("model.pt2")
    shutil.move(path, outside)
    path.symlink_to(outside)
    record = {"bytes": path.lstat().st_size, "sha256": files.sha256_of(outside)}
    rewrite_manifest(entry, files={"model.pt2": record})


def damage_by_folder(entry: Entry) -> None:
    entry.path("model.pt2").unlink()
    entry.path("model.pt2").mkdir()


def damage_by_linked_folder(entry: Entry) -> None:
    outside = entry.directory.parent.parent / "outside"
    shutil.move(entry.directory, outside)
    entry.directory.symlink_to(outside)


CHEAP = [
    *(
        damage_manifest,
        damage_digest,
        damage_factors,
        damage_factors_beyond_json,
        damage_names,
    ),
    *(damage_by_truncation, damage_by_removal, damage_by_removing_the_manifest),
    *(damage_by_link, damage_by_folder, damage_by_linked_folder),
]


@pytest.mark.parametrize("damage", CHEAP)
def test_a_corrupt_entry_is_set_aside_and_can_be_built_anew(
    store: EngineStore, put: Put, damage: Callable[[Entry], None], caplog: pytest.LogCaptureFixture
) -> None:
    sound, bad = put(128), put()
    damage(bad)
    with caplog.at_level(logging.WARNING):
        assert store.lookup(bad.digest) is None
        assert store.lookup(bad.digest) is None
    assert len(caplog.records) == 1, "one reason, told once"
    assert bad.digest[:12] in caplog.text
    assert store.list() == [sound]
    (reason,) = (store.root / "quarantine").glob("*.txt")
    assert bad.digest in reason.read_text("utf-8")
    assert reason.with_suffix("").exists() or reason.with_suffix("").is_symlink()
    again = put()
    again.verify_files()
    assert store.lookup(bad.digest) == again


@pytest.mark.parametrize("damage", CHEAP)
def test_list_and_prune_survive_a_corrupt_entry(store: EngineStore, put: Put, damage: Callable[[Entry], None]) -> None:
    sound, bad = put(128), put()
    damage(bad)
    assert store.prune(4000) == []
    assert store.list() == [sound]


@pytest.mark.parametrize("damage", CHEAP)
def test_put_replaces_a_corrupt_entry(store: EngineStore, put: Put, damage: Callable[[Entry], None]) -> None:
    damage(put())
    again = put()
    again.verify_files()
    assert store.lookup(again.digest) == again


def test_factors_nested_too_deep_to_hash(store: EngineStore, put: Put, tmp_path: Path) -> None:
    """Some depths can be read but not written again; which ones depends on the stack in use."""
    entry = put()
    text = (entry.directory / "manifest.json").read_text("utf-8")
    shutil.copytree(entry.directory, tmp_path / "sound")
    for depth in range(850, 1000):
        shutil.copytree(tmp_path / "sound", entry.directory, dirs_exist_ok=True)
        data = {**json.loads(text), "factors": "HERE"}
        deep = '{"x":' * depth + "1" + "}" * depth
        (entry.directory / "manifest.json").write_text(json.dumps(data).replace('"HERE"', deep), "utf-8")
        assert store.lookup(entry.digest) is None


def test_a_flipped_byte_is_found_before_first_use(store: EngineStore, put: Put) -> None:
    entry = put()
    damage_byte(entry)
    found = store.lookup(entry.digest)
    assert found is not None, "sizes alone do not show it"
    with pytest.raises(CorruptEngine, match=r"model\.pt2 .*SD15 64.* another content.*queue again"):
        found.verify_files()
    assert store.lookup(entry.digest) is None
    put().verify_files()


def test_files_are_read_once_and_again_when_they_change(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = files.sha256_of
    monkeypatch.setattr(
        "slipstream.engine_cache.entry.sha256_of", lambda path: (read.append(path.name), original(path))[1]
    )
    entry = put()
    entry.verify_files()
    entry.verify_files()
    assert read == ["model.pt2", "constants.json"]
    entry.verify_files(again=True)
    assert len(read) == 4
    path = entry.path("model.pt2")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    entry.verify_files()
    assert read[4:] == ["model.pt2"]
    flip_byte(path)
    with pytest.raises(CorruptEngine):
        entry.verify_files()


def test_verify_files_of_a_removed_entry_is_no_corruption(store: EngineStore, put: Put) -> None:
    entry = put()
    store.delete(entry.digest)
    with pytest.raises(StoreError, match="removed from the store meanwhile"):
        entry.verify_files()
    assert left_over(store) == []


def test_a_bad_report_about_an_older_build_does_not_remove_the_new_one(store: EngineStore, put: Put) -> None:
    old = put()
    store.delete(old.digest)
    new = put()
    rewrite_manifest(new, created="2030-01-01T00:00:00+00:00")
    store.set_aside(old, "it was bad")
    assert store.lookup(old.digest) is not None


def test_verify_one_and_whether_it_is_there_and_used(store: EngineStore, put: Put) -> None:
    entry = put(64)
    assert store.has(entry.digest) and not store.has("0" * 64)
    with entry.hold():
        assert store.is_used(entry.digest)
    assert not store.is_used(entry.digest) and store.free_bytes() > 0
    assert store.verify(entry.digest) is None
    entry.path("model.pt2").write_bytes(b"short")
    assert "model.pt2" in str(store.verify(entry.digest)) and not store.has(entry.digest)


def test_verify_all(store: EngineStore, put: Put) -> None:
    sound, flipped, short = put(64), put(128), put(256)
    flip_byte(flipped.path("constants.json"))
    os.truncate(short.path("model.pt2"), 1)
    result = store.verify_all()
    assert result[sound.digest] is None
    assert "another content" in str(result[flipped.digest])
    assert "1 bytes instead of 3000" in str(result[short.digest])
    assert store.verify_all() == {sound.digest: None}


def test_the_quarantine_is_bounded(store: EngineStore, put: Put) -> None:
    for _ in range(QUARANTINE_KEPT + 2):
        damage_by_removal(put())
        store.list()
    assert len(list((store.root / "quarantine").iterdir())) == 2 * QUARANTINE_KEPT


def test_a_newer_schema_is_left_alone_until_built_anew(
    store: EngineStore, put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    entry = put()
    rewrite_manifest(entry, schema_version=2)
    assert store.lookup(entry.digest) is None
    assert "Update Slipstream" in caplog.text
    assert entry.directory.exists(), "a newer Slipstream may still want it"
    assert "schema 2" in str(store.verify_all()[entry.digest])
    put().verify_files()
    assert store.lookup(entry.digest) is not None


def test_a_foreign_folder_is_not_an_entry(store: EngineStore, put: Put) -> None:
    entry = put()
    shutil.copytree(entry.directory, store.root / "engines" / ("f" * 64))
    (store.root / "engines" / "notes").mkdir()
    assert store.lookup("f" * 64) is None
    assert store.list() == [entry]
    assert (store.root / "engines" / "notes").exists()


# Holding, touching, deleting


def test_an_entry_in_use_is_not_deleted(store: EngineStore, put: Put) -> None:
    entry = put()
    with entry.hold():
        with pytest.raises(StoreError, match=r"in use.*wait until the run"):
            store.delete(entry.digest)
    assert store.delete(entry.digest) is True
    assert store.delete(entry.digest) is False
    assert store.lookup(entry.digest) is None
    assert left_over(store) == []


def test_force_deletes_an_entry_in_use(store: EngineStore, put: Put) -> None:
    entry = put()
    with entry.hold():
        assert store.delete(entry.digest, force=True)
    assert store.list() == []


def test_every_hold_counts_and_releases_once_from_any_thread(store: EngineStore, put: Put) -> None:
    entry = put()
    first, second = entry.hold(), entry.hold()
    worker = threading.Thread(target=first.release)
    worker.start()
    worker.join()
    first.release()
    assert store.prune(0) == []
    second.release()
    assert store.prune(0) == [entry.digest]


def test_a_removed_entry_cannot_be_held(store: EngineStore, put: Put) -> None:
    entry = put()
    store.delete(entry.digest)
    with pytest.raises(StoreError, match=r"SD15 64.*removed from the store meanwhile"):
        entry.hold()
    assert left_over(store) == []


def test_a_corrupt_entry_can_be_deleted(store: EngineStore, put: Put) -> None:
    entry = put()
    damage_manifest(entry)
    assert store.delete(entry.digest)
    assert not entry.directory.exists()


def test_touch_and_hold_count_as_use_without_rewriting_the_manifest(store: EngineStore, put: Put) -> None:
    entry = put()
    manifest = (entry.directory / "manifest.json").stat()
    for use in (lambda: store.touch(entry), lambda: entry.hold().release()):
        age(entry, 1000)
        assert time.time() - entry.last_used > 900
        use()
        assert time.time() - entry.last_used < 60
    after = (entry.directory / "manifest.json").stat()
    assert (after.st_mtime_ns, after.st_ino) == (manifest.st_mtime_ns, manifest.st_ino)


def test_a_verification_is_recorded(store: EngineStore, put: Put) -> None:
    entry = put()
    first = store.record_verification(entry, WEIGHTS, Verification(1e-4, 2e-4, 3, "fp16", "550"))
    other = store.record_verification(entry, "c" * 64, Verification(2e-4, None, 3, "fp16"))
    found = store.lookup(entry.digest)
    assert found == other
    assert found is not None and found.manifest.verifications[WEIGHTS] == first.manifest.verifications[WEIGHTS]
    assert set(found.manifest.verifications) == {WEIGHTS, "c" * 64}
    store.delete(entry.digest)
    with pytest.raises(StoreError, match="removed"):
        store.record_verification(entry, WEIGHTS, Verification(1e-4, 2e-4, 3, "fp16"))
    assert left_over(store) == []


# Pruning


def test_pruning_removes_the_least_recently_used(store: EngineStore, put: Put) -> None:
    entries = {height: put(height) for height in (64, 128, 256, 512)}
    for seconds, height in enumerate((128, 512, 64, 256)):
        age(entries[height], 1000 * (seconds + 1))
    assert store.prune(8000) == [entries[256].digest, entries[64].digest]
    assert {entry.digest for entry in store.list()} == {entries[128].digest, entries[512].digest}
    assert store.prune() == []


def test_pruning_by_age(store: EngineStore, put: Put) -> None:
    old, young = put(64), put(128)
    age(old, 3 * 24 * 3600)
    assert store.prune(older_than=timedelta(days=4)) == []
    assert store.prune(older_than=timedelta(days=2)) == [old.digest]
    assert store.list() == [young]


def test_pruning_passes_over_what_is_in_use(store: EngineStore, put: Put) -> None:
    held, idle = put(64), put(128)
    with held.hold():
        age_of_held = time.time() - 5000
        os.utime(held.directory / ".last_used", (age_of_held, age_of_held))
        assert store.prune(0) == [idle.digest]
    assert store.prune(0) == [held.digest]


def test_put_prunes_but_never_the_new_one(tmp_path: Path, put: Put) -> None:
    store = EngineStore(tmp_path / "small", limit_bytes=9000)
    for index, height in enumerate((64, 128)):
        age(put(height, into=store), 1000 - index)
    newest = put(256, into=store)
    assert [entry.manifest.label for entry in store.list()] == ["SD15 256", "SD15 128"]
    tiny = EngineStore(tmp_path / "small", limit_bytes=1)
    assert put(512, into=tiny).digest in {entry.digest for entry in tiny.list()}
    assert tiny.lookup(newest.digest) is None and len(tiny.list()) == 1


def test_a_failing_prune_does_not_lose_the_new_engine(
    tmp_path: Path, put: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = EngineStore(tmp_path / "small", limit_bytes=1)

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("no pruning today")

    monkeypatch.setattr(store, "prune", refuse)
    assert store.lookup(put(into=store).digest) is not None
    assert "no pruning today" in caplog.text


# Disks that refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("fails", ["write", "fsync", "rename"])
def test_a_full_disk_ends_in_a_clear_error_and_leaves_nothing(
    store: EngineStore, put: Put, monkeypatch: pytest.MonkeyPatch, number: int, fails: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    with monkeypatch.context() as patch:
        if fails == "write":
            patch.setattr("slipstream.engine_cache.store.write_durably", full)
        elif fails == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr("slipstream.engine_cache.store.replace", full)
        with pytest.raises(StoreError) as caught:
            put()
    message = str(caught.value)
    assert f"{store.root} is full" in message and "0.0 MiB are needed" in message
    assert "Free some space, prune old engines, or set SLIPSTREAM_HOME" in message
    assert store.list() == [] and left_over(store) == []
    put().verify_files()


def test_too_little_space_is_seen_before_copying(store: EngineStore, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.engine_cache.store.free_bytes", lambda folder: 3999)
        patch.setattr("slipstream.engine_cache.store.copy_durably", lambda *_: pytest.fail("copied"))
        with pytest.raises(StoreError, match="is full"):
            put()
    assert store.list() == [] and left_over(store) == []


def test_a_really_full_disk(artifact: Artifact, tmp_path: Path) -> None:
    """/dev/full refuses every write the way a full disk does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(StoreError, match="is full"), files.store_errors("Copying", tmp_path, 3000):
        with open("/dev/full", "wb") as writer:
            writer.write(b"x" * 100_000)


def test_reading_a_read_only_store_works(unprivileged: Artifact) -> None:
    store = EngineStore(unprivileged.directory.parent / "store")
    entry = store.put(make_key(), unprivileged, label="x", build=BuildRecord(1))
    bad = store.put(make_key(128), unprivileged, label="bad", build=BuildRecord(1))
    os.truncate(bad.path("model.pt2"), 1)
    seal(store.root, 0o555)
    try:
        reader = EngineStore(store.root)
        found = reader.lookup(entry.digest)
        assert found == entry and reader.list() == [entry]
        found.verify_files()
        with found.hold():
            assert not reader.is_used(entry.digest)
        assert reader.prune() == []
        reader.touch(found)
        assert "1 bytes instead" in str(reader.verify_all()[bad.digest])
        for write in (
            lambda: reader.put(make_key(256), unprivileged, label="x", build=BuildRecord(1)),
            lambda: reader.delete(entry.digest),
            lambda: reader.reserve("e" * 64).__enter__(),
            lambda: reader.record_verification(entry, WEIGHTS, Verification(1e-4, None, 1, "fp16")),
        ):
            with pytest.raises(StoreError, match=r"cannot be written.*SLIPSTREAM_HOME"):
                write()
    finally:
        seal(store.root, 0o755)


def seal(root: Path, mode: int) -> None:
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(mode)
        else:
            path.chmod(mode & 0o644)


def test_an_unwritable_root_fails_at_the_first_write_only(unprivileged: Artifact) -> None:
    home = unprivileged.directory.parent / "home"
    home.mkdir(mode=0o555)
    store = EngineStore(home / "store")
    assert store.lookup(make_key().digest) is None and store.list() == []
    with pytest.raises(StoreError, match=r"cannot be written.*SLIPSTREAM_HOME"):
        store.put(make_key(), unprivileged, label="x", build=BuildRecord(1))


def test_an_impossible_root(tmp_path: Path, artifact: Artifact) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = EngineStore(tmp_path / "file" / "store")
    assert store.lookup(make_key().digest) is None and store.list() == []
    with pytest.raises(StoreError, match=r"Check that .* is a folder on a working disk"):
        store.put(make_key(), artifact, label="x", build=BuildRecord(1))


def test_an_entry_that_may_not_be_read_is_not_set_aside(unprivileged: Artifact) -> None:
    store = EngineStore(unprivileged.directory.parent / "store")
    entry = store.put(make_key(), unprivileged, label="x", build=BuildRecord(1))
    entry.path("model.pt2").chmod(0)
    with pytest.raises(StoreError, match="Checking model.pt2"):
        entry.verify_files()
    (entry.directory / "manifest.json").chmod(0)
    assert store.lookup(entry.digest) is None
    assert entry.directory.exists()


def test_an_engine_that_another_process_deletes_meanwhile_is_none(store: EngineStore, put: Put) -> None:
    """It is gone by the time that the lock is free."""
    entry, told = put(), []
    with locked(store.root / "locks" / "store.lock", "It", timeout=0):
        waiting = threading.Thread(target=lambda: told.append(store.delete(entry.digest)))
        waiting.start()
        time.sleep(0.3)
        shutil.rmtree(entry.directory)
    waiting.join()
    assert told == [False]


def test_every_write_waits_for_the_lock(
    store: EngineStore, put: Put, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = put()
    monkeypatch.setattr("slipstream.engine_cache.workspace.LOCK_SECONDS", 0.1)
    with locked(store.root / "locks" / "store.lock", "It", timeout=0):
        for write in (
            lambda: store.put(make_key(128), artifact, label="x", build=BuildRecord(1)),
            lambda: store.delete(entry.digest),
            lambda: store.prune(0),
            lambda: store.record_verification(entry, WEIGHTS, Verification(1e-4, None, 1, "fp16")),
            lambda: store.clean(),
            lambda: store.scratch("job").__enter__(),
        ):
            with pytest.raises(StoreError, match=r"changing the engine store.*Wait for it and try again"):
                write()
        unprotected = entry.hold()  # an engine runs all the same
        assert store.list() == [entry]
    assert not store.is_used(entry.digest) and unprotected is not None
    with entry.hold():
        assert store.is_used(entry.digest)


# Scratch and cleaning


def test_scratch_is_gone_afterwards(store: EngineStore) -> None:
    with pytest.raises(RuntimeError), store.scratch("job") as folder:
        (folder / "x").write_text("x")
        assert store.clean() == 0 and folder.exists()
        raise RuntimeError
    assert left_over(store) == []


def test_clean_removes_what_is_dead_and_keeps_what_lives(store: EngineStore, put: Put) -> None:
    entry = put()
    tmp = store.root / "tmp"
    (tmp / "tmp-abc.999999.0").mkdir()
    (tmp / "trash.1234").mkdir()
    (tmp / "trash.1234" / "x").write_text("x")
    (store.root / "in_use" / f"{entry.digest}.999999.0").write_text("")
    (tmp / "young.part").write_text("")
    (tmp / "old.part").write_text("")
    os.utime(tmp / "old.part", (1, 1))
    with entry.hold(), store.scratch("job") as folder:
        assert store.clean() == 2
        assert folder.exists()
        with pytest.raises(StoreError):
            store.delete(entry.digest)
    assert left_over(store) == ["tmp/young.part"]


def test_a_dead_folder_that_cannot_be_moved_holds_nobody_up(
    store: EngineStore, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where a process has a file of it open."""
    put()
    (held := store.root / "tmp" / "tmp-abc.999999.0").mkdir()
    move = workspace.replace

    def refuse(source: Path, target: Path) -> None:
        if source == held:
            raise PermissionError(13, "in use", str(source))
        move(source, target)

    monkeypatch.setattr(workspace, "replace", refuse)
    put(128)
    assert left_over(store) == ["tmp/tmp-abc.999999.0"]


def test_put_cleans_up_first(store: EngineStore, put: Put) -> None:
    put()
    (store.root / "tmp" / "tmp-abc.999999.0").mkdir()
    put(128)
    assert left_over(store) == []


# Threads


def test_many_threads_at_once(store: EngineStore, put: Put) -> None:
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(6):
                entry = put(64 * (1 + (seed + step) % 3))
                found = store.lookup(entry.digest)
                if found is not None:
                    use(found)
                if step % 3 == 2:
                    store.prune(4000)
        except BaseException as error:
            problems.append(error)

    def use(entry: Entry) -> None:
        try:
            with entry.hold():
                entry.verify_files(again=True)
                assert entry.path("model.pt2").stat().st_size == 3000
                store.record_verification(entry, WEIGHTS, Verification(1e-4, None, 1, "fp16"))
        except StoreError as error:
            assert "removed from the store meanwhile" in str(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert left_over(store) == []
    assert all(why is None for why in store.verify_all().values())


# Windows


def test_rename_is_patient_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    tries: list[int] = []
    original = os.replace

    def scanner_holds_it(source: Path, target: Path) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "in use by another process")
        original(source, target)

    monkeypatch.setattr(files, "_ON_WINDOWS", True)
    monkeypatch.setattr(os, "replace", scanner_holds_it)
    files.replace(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a" and len(tries) == 3


def test_long_paths_take_the_extended_form_on_windows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(files.within_path_limit(Path("/" + "x" * 200), 200)) == "/" + "x" * 200
    monkeypatch.setattr(files, "_ON_WINDOWS", True)
    monkeypatch.setattr(os.path, "abspath", str)
    assert str(files.within_path_limit(Path("/short"), 200)) == "/short"
    assert str(files.within_path_limit(Path("/" + "x" * 100), 200)).startswith("\\\\?\\")
    assert str(files.within_path_limit(Path("\\\\?\\" + "x" * 300), 200)).count("?") == 1


def test_an_entry_that_cannot_be_moved_is_passed_over(
    store: EngineStore, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where an open file keeps its folder in place."""
    stuck, free = put(64), put(128)
    original = Workspace.discard

    def discard(self: Workspace, path: Path) -> Path:
        if path == stuck.directory:
            raise PermissionError(errno.EACCES, "in use")
        return original(self, path)

    monkeypatch.setattr(Workspace, "discard", discard)
    assert store.prune(0) == [free.digest]
    assert store.list() == [stuck]
