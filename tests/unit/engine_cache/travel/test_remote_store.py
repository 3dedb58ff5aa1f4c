"""Engines go to a remote store and come back whole, or not at all."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import BackendUnavailable, BuildCancelled, CorruptEngine, UntrustedEngine
from slipstream.core.progress import CancelToken, Progress
from slipstream.core.protocols import Artifact
from slipstream.engine_cache import BuildRecord, EngineStore, Entry, Keyring
from slipstream.engine_cache.travel import remote_store
from slipstream.engine_cache.travel.remote_store import RemoteStore
from slipstream.engine_cache.travel.retries import RemoteError, Retries
from slipstream.tests.unit.engine_cache.support import make_key
from slipstream.tests.unit.engine_cache.travel.servers import BUCKET, BadConnection, web_server

Made = Callable[..., Entry]
Bucket = Callable[..., RemoteStore]
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path / 'remote'}", retries=Retries(first_s=0.01))


def files_of(entry: Entry) -> dict[str, bytes]:
    return {name: entry.path(name).read_bytes() for name in entry.manifest.files}


def test_an_engine_goes_to_s3_and_comes_back(
    maker: EngineStore, reader: EngineStore, made: Made, bucket: Bucket
) -> None:
    entry, remote, sent, seen = made(size=20 * MIB), bucket(), list[Progress](), list[Progress]()
    assert remote.push(entry, maker, sent.append) and not remote.push(entry, maker)
    fractions = [progress.fraction for progress in sent if progress.fraction is not None]
    assert len(fractions) == 3 and fractions == sorted(fractions) and (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert remote.digests() == [entry.digest]
    pulled = remote.pull(entry.digest, reader, seen.append)
    assert pulled is not None and files_of(pulled) == files_of(entry)
    assert pulled.artifact.details == entry.artifact.details
    fractions = [progress.fraction for progress in seen if progress.fraction is not None]
    assert len(fractions) > 3 and fractions == sorted(fractions) and fractions[-1] == 1.0


@pytest.mark.parametrize("kind", ["folder", "http", "memory"])
def test_other_addresses(
    kind: str, tmp_path: Path, maker: EngineStore, reader: EngineStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_CHUNK_BYTES", 1000)
    entry = made(size=5500)
    remote = RemoteStore(f"memory://{tmp_path.name}" if kind == "memory" else str(tmp_path / "remote"))
    remote.push(entry, maker)
    if kind != "http":
        pulled = remote.pull(entry.digest, reader)
        assert pulled is not None and files_of(pulled) == files_of(entry)
        return
    pytest.importorskip("aiohttp")
    with web_server(tmp_path) as address:
        web = RemoteStore(f"{address}/remote")
        pulled = web.pull(entry.digest, reader)
        assert pulled is not None and files_of(pulled) == files_of(entry)
        assert web.pull(make_key(72).digest, reader) is None


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address at which a web server gives out the folder `remote`."""
    pytest.importorskip("aiohttp")
    with web_server(tmp_path) as address:
        yield address


def test_cut_connections_to_a_web_server(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore, web: str
) -> None:
    folder.push(entry := made(size=3 * MIB), maker)
    with BadConnection(web) as line:
        cut: list[int] = []

        def spoil(number: int, piece: bytes) -> bytes | None:
            if len(cut) == 3 or (len(cut) == 2 and len(piece) < 30000):  # the last one in the midst of a file
                return piece
            cut.append(number)
            return None if len(cut) < 3 else piece[:1000]

        line.spoil = spoil
        pulled = RemoteStore(f"{line.address}/remote", retries=Retries(8, 0.01)).pull(entry.digest, reader)
    assert len(cut) == 3 and pulled is not None and files_of(pulled) == files_of(entry)


@pytest.mark.parametrize("wrong", [b"x" * 3000, b"x" * 10, b"x" * 9000, b""], ids=["same", "short", "long", "empty"])
def test_wrong_bytes_of_a_web_server_are_never_taken(
    wrong: bytes, maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore, web: str
) -> None:
    folder.push(entry := made(), maker)
    folder.write_small(f"files/{entry.manifest.files['model.pt2'].sha256}", wrong)
    with BadConnection(web) as line:
        with pytest.raises((CorruptEngine, RemoteError)):
            RemoteStore(f"{line.address}/remote", retries=Retries(2, 0.01)).pull(entry.digest, reader)
        assert line.connections < 10, "a file that is too short is asked for again and again"
    assert reader.list() == [] and not any((reader.root / "tmp").iterdir())


def test_a_web_server_is_only_read(maker: EngineStore, made: Made, folder: RemoteStore, web: str) -> None:
    remote = RemoteStore(f"{web}/remote")
    with pytest.raises(RemoteError, match=r"only read: push to the folder or bucket"):
        remote.push(made(), maker)
    assert folder.digests() == []


def test_what_is_not_there(folder: RemoteStore, reader: EngineStore, bucket: Bucket) -> None:
    for remote in (folder, bucket()):
        assert remote.pull(make_key().digest, reader) is None and remote.digests() == []
    assert not reader.root.exists()


def test_a_strangers_engine_is_refused_before_its_files_are_read(
    folder: RemoteStore, maker: EngineStore, stranger: EngineStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.push(entry := made(), maker)
    monkeypatch.setattr(RemoteStore, "parts", lambda *_: pytest.fail("a file was read"))
    with pytest.raises(UntrustedEngine, match="trust add"):
        folder.pull(entry.digest, stranger)
    assert "trust add" in str(folder.why_not_pulled(entry.digest, stranger.keyring))


@pytest.mark.parametrize("cut_after", [1, 3, 6])
def test_cut_connections_are_tried_again(
    cut_after: int, maker: EngineStore, reader: EngineStore, made: Made, s3: str, bucket: Bucket
) -> None:
    """Three connections are cut after some pieces of what the server sends."""
    entry = made(size=3 * MIB)
    bucket().push(entry, maker)
    with BadConnection(s3) as line:
        pieces: dict[int, int] = {}
        cut: list[int] = []

        def spoil(number: int, piece: bytes) -> bytes | None:
            pieces[number] = pieces.get(number, 0) + 1
            if pieces[number] <= cut_after or len(cut) == 3:
                return piece
            cut.append(number)
            return None

        line.spoil = spoil
        pulled = bucket(line.address, Retries(attempts=8, first_s=0.01)).pull(entry.digest, reader)
    assert pulled is not None and files_of(pulled) == files_of(entry)
    assert len(cut) == 3


def test_each_pause_between_attempts_is_about_twice_as_long() -> None:
    class Cancel(CancelToken):
        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            return False

    def fail() -> None:
        raise OSError("no answer")

    waited: list[float] = []
    with pytest.raises(RemoteError, match="failed 8 times"):
        Retries(attempts=8, first_s=1.0, longest_s=20.0).run("Reading", fail, Cancel())
    assert len(waited) == 7 and len(set(waited)) > 2
    assert all(most / 2 <= pause <= most for pause, most in zip(waited, (1, 2, 4, 8, 16, 20, 20), strict=True))


def test_cut_connections_while_sending(
    maker: EngineStore, reader: EngineStore, made: Made, s3: str, bucket: Bucket
) -> None:
    entry = made(size=3 * MIB)
    with BadConnection(s3) as line:
        line.spoil = lambda number, piece: None if number in (1, 2) else piece
        bucket(line.address).push(entry, maker)
        assert line.connections > 2
    assert bucket().pull(entry.digest, reader) is not None


def test_a_server_that_never_answers_ends_in_a_clear_error(reader: EngineStore, s3: str, bucket: Bucket) -> None:
    with BadConnection(s3) as line:
        line.spoil = lambda number, piece: None
        with pytest.raises(RemoteError, match="failed 3 times.*Check the network"):
            bucket(line.address, Retries(attempts=3, first_s=0.01)).pull(make_key().digest, reader)


def test_bytes_spoiled_on_the_way_are_read_again(
    maker: EngineStore, reader: EngineStore, made: Made, s3: str, bucket: Bucket
) -> None:
    entry = made(size=3 * MIB)
    bucket().push(entry, maker)
    with BadConnection(s3) as line:
        spoiled = []

        def spoil(number: int, piece: bytes) -> bytes:
            if spoiled or len(piece) < 30000:
                return piece
            spoiled.append(number)
            return piece[:-1] + bytes([piece[-1] ^ 1])

        line.spoil = spoil
        pulled = bucket(line.address).pull(entry.digest, reader)
    assert spoiled and pulled is not None and files_of(pulled) == files_of(entry)


@pytest.mark.parametrize("wrong", [b"x" * 3000, b"x" * 10, b"x" * 9000, b""], ids=["same", "short", "long", "empty"])
def test_wrong_bytes_in_the_store_are_never_taken(
    wrong: bytes, maker: EngineStore, reader: EngineStore, made: Made, bucket: Bucket
) -> None:
    entry, remote = made(), bucket()
    remote.push(entry, maker)
    remote.write_small(f"files/{entry.manifest.files['model.pt2'].sha256}", wrong)
    with pytest.raises((CorruptEngine, RemoteError)):
        remote.pull(entry.digest, reader)
    assert reader.list() == [] and not any((reader.root / "tmp").iterdir())
    assert remote.push(entry, maker, again=True) and remote.pull(entry.digest, reader) is not None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"schema_version": 1}', b"\xff" * 100])
def test_a_manifest_that_is_none(text: bytes, reader: EngineStore, folder: RemoteStore) -> None:
    folder.write_small(f"engines/{make_key().digest}.json", text)
    with pytest.raises(CorruptEngine):
        folder.pull(make_key().digest, reader)


def test_a_manifest_under_another_engines_name(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore
) -> None:
    folder.push(entry := made(), maker)
    other = make_key(72).digest
    folder.write_small(f"engines/{other}.json", folder.read_small(f"engines/{entry.digest}.json") or b"")
    with pytest.raises(CorruptEngine, match="another engine"):
        folder.pull(other, reader)


def test_a_manifest_that_leads_out_of_the_store(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore
) -> None:
    folder.push(entry := made(), maker)
    data = json.loads(folder.read_small(f"engines/{entry.digest}.json") or b"")
    data["files"]["../../evil"] = data["files"].pop("model.pt2")
    folder.write_small(f"engines/{entry.digest}.json", json.dumps(data).encode())
    with pytest.raises(CorruptEngine, match="not allowed"):
        folder.pull(entry.digest, reader)


def test_files_come_before_the_manifest(
    maker: EngineStore, made: Made, folder: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that dies while it sends leaves no engine that lacks a file."""

    def dies(*_: object) -> None:
        raise RemoteError("the network is gone")

    entry = made()
    monkeypatch.setattr(RemoteStore, "_send", dies)
    with pytest.raises(RemoteError):
        folder.push(entry, maker)
    assert folder.digests() == [] and folder.manifest(entry.digest) is None


def test_pulling_can_be_cancelled(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_CHUNK_BYTES", 1000)
    folder.push(entry := made(), maker)
    token = CancelToken()

    def cancel(progress: Progress) -> None:
        if progress.fraction:
            token.cancel()

    with pytest.raises(BuildCancelled):
        folder.pull(entry.digest, reader, cancel, token)
    assert reader.list() == []


def test_a_key_that_is_revoked_brings_nothing_more(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore
) -> None:
    """What it signed is not pulled from then on, and what was pulled before is not loaded."""
    before, after = made(64), made(72)
    for entry in (before, after):
        folder.push(entry, maker)
    pulled = folder.pull(before.digest, reader)
    assert pulled is not None and pulled.artifact.files
    Keyring(reader.keyring.folder).distrust(maker.keyring.public_key())  # another process of the reader
    with pytest.raises(UntrustedEngine, match="not among the keys"):
        folder.pull(after.digest, reader)
    with pytest.raises(UntrustedEngine, match="not among the keys"):
        _ = pulled.artifact
    assert reader.trusted(before.digest) is None and "trust add" in str(
        folder.why_not_pulled(after.digest, reader.keyring)
    )


@pytest.mark.parametrize("moment", range(4))
def test_two_who_push_one_key_never_spoil_each_others(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, moment: int,
) -> None:  # fmt: skip
    """Each has a build of its own; the second sends all of its own between two writes of the first."""
    first = made(size=3000)
    other = EngineStore(tmp_path / "other", keyring=maker.keyring)
    build = tmp_path / "another-build"
    build.mkdir()
    (build / "model.pt2").write_bytes(b"another" * 500)
    second = other.put(make_key(), Artifact(build, ("model.pt2",)), label="SD15", build=BuildRecord(1.0))
    assert second.digest == first.digest
    put, count = RemoteStore._try, [0]

    def interrupted(self: RemoteStore, what: str, *rest: Any) -> Any:
        if what.startswith(("Sending", "Writing")):
            count[0] += 1
            if count[0] == moment + 1:
                folder.push(second, other)
        return put(self, what, *rest)

    monkeypatch.setattr(RemoteStore, "_try", interrupted)
    RemoteStore(folder.url).push(first, maker)
    if moment == 3:
        folder.push(second, other)
    monkeypatch.undo()
    pulled = folder.pull(first.digest, reader)
    assert pulled is not None and files_of(pulled) in (files_of(first), files_of(second))


_WRITER = """
import base64, json
from slipstream.engine_cache.travel.remote_store import RemoteStore
store = EngineStore(sys.argv[1], keyring=Keyring(pathlib.Path(sys.argv[2])))
folder = pathlib.Path(sys.argv[1] + "-build")
folder.mkdir()
(folder / "model.pt2").write_bytes(os.urandom(300_000))
entry = store.put(make_key(), Artifact(folder, ("model.pt2",)), label="SD15", build=BuildRecord(1.0))
remote = RemoteStore(sys.argv[3], json.loads(sys.argv[4]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    remote.push(entry, store, again=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_many_writers_of_one_engine(
    tmp_path: Path, maker: EngineStore, reader: EngineStore, s3: str, bucket: Bucket,
    python: Callable[..., subprocess.Popen[str]],
) -> None:  # fmt: skip
    """Four machines push builds of their own of the same engine; whoever pulls meanwhile gets one of them, whole."""
    options = json.dumps({"key": "test", "secret": "test", "endpoint_url": s3})
    url = f"s3://{BUCKET}/{tmp_path.name}"
    writers = [python(_WRITER, tmp_path / f"w{n}", maker.keyring.folder, url, options) for n in range(4)]
    maker.keyring.public_key()
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    remote, digest, pulled = bucket(), make_key().digest, 0
    while any(writer.poll() is None for writer in writers):
        if remote.pull(digest, reader) is not None:
            pulled += 1
            reader.delete(digest)
    assert all(writer.stdout is not None and "done" in writer.stdout.read() for writer in writers)
    entry = remote.pull(digest, reader)
    assert entry is not None and pulled
    entry.verify_files(again=True)


def test_many_readers_of_one_engine(maker: EngineStore, reader: EngineStore, made: Made, bucket: Bucket) -> None:
    remote, found = bucket(), list[Entry | None]()
    remote.push(entry := made(size=MIB), maker)
    threads = [threading.Thread(target=lambda: found.append(remote.pull(entry.digest, reader))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8 and None not in found and len(reader.list()) == 1


def test_engines_that_cannot_be_signed_are_not_sent(
    maker: EngineStore, made: Made, folder: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("keyring", "signatures", "travel.shareable"):
        monkeypatch.setattr(f"slipstream.engine_cache.{module}.can_sign", lambda: False)
    entry = made()
    with pytest.raises(UntrustedEngine, match="pip install cryptography"):
        folder.push(entry, maker)
    monkeypatch.undo()
    assert folder.push(entry, maker) and folder.why_not_pulled(entry.digest, maker.keyring) is None


def test_what_was_measured_here_stays_here(
    maker: EngineStore, reader: EngineStore, made: Made, folder: RemoteStore
) -> None:
    from slipstream.engine_cache import Speed

    entry = maker.record_speed(made(), Speed(1.0, 2.0))
    folder.push(entry, maker)
    pulled = folder.pull(entry.digest, reader)
    assert pulled is not None and pulled.manifest.speed is None and pulled.manifest.seal is None
    assert dataclasses.replace(pulled.manifest, speed=entry.manifest.speed, seal=entry.manifest.seal) == entry.manifest


@pytest.mark.parametrize("url", ["nonsense://x", "s4://bucket"])
def test_an_address_that_nobody_knows(url: str) -> None:
    with pytest.raises(BackendUnavailable, match="fsspec"):
        RemoteStore(url)


def test_a_password_in_the_address_is_not_shown() -> None:
    pytest.importorskip("aiohttp")
    assert str(RemoteStore("https://user:secret@example.org/engines/")) == "https://example.org/engines"
