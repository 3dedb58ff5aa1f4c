"""Engines leave as a file or folder and arrive whole, or not at all."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.core.errors import CorruptEngine, SlipstreamError, StoreError, UntrustedEngine
from slipstream.engine_cache import EngineStore, Entry
from slipstream.engine_cache.travel.archive import export_file, export_folder, import_engines
from slipstream.tests.unit.engine_cache.support import make_key, wait_until

Made = Callable[..., Entry]
Export = Callable[[EngineStore, list[Entry]], Path]
Outcomes = dict[str, Entry | SlipstreamError]


@pytest.fixture(params=["file", "folder"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Export:
    def run(store: EngineStore, entries: list[Entry]) -> Path:
        target = tmp_path / f"exported-{request.param}"
        assert (export_file if request.param == "file" else export_folder)(store, entries, target) > 0
        return target

    return run


def imported(store: EngineStore, source: Path) -> Outcomes:
    found: Outcomes = {}
    import_engines(store, source, found.__setitem__)
    return found


def nothing_half(store: EngineStore) -> bool:
    tmp = store.root / "tmp"
    return all(problem is None for problem in store.verify_all().values()) and not (tmp.exists() and any(tmp.iterdir()))


def test_engines_arrive_as_they_left(maker: EngineStore, reader: EngineStore, made: Made, export: Export) -> None:
    entries = [made(64), made(72)]
    source = export(maker, entries)
    found = imported(reader, source)
    assert list(found) == sorted(entry.digest for entry in entries)
    for entry in entries:
        arrived = found[entry.digest]
        assert isinstance(arrived, Entry) and arrived.why_untrusted() is None
        arrived.verify_files(again=True)
        assert arrived.path("model.pt2").read_bytes() == entry.path("model.pt2").read_bytes()
    assert imported(reader, source).keys() == found.keys() and nothing_half(reader)


def test_a_folder_can_be_a_base(maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path) -> None:
    entry = made()
    export_folder(maker, [entry], tmp_path / "image")
    assert export_folder(maker, [entry], tmp_path / "image") == 0
    store = EngineStore(tmp_path / "upper", bases=[tmp_path / "image"], keyring=reader.keyring)
    found = store.lookup(entry.digest)
    assert found is not None and found.is_in_base and found.why_untrusted() is None


def test_a_stranger_is_told_whose_key_it_is(
    maker: EngineStore, stranger: EngineStore, made: Made, export: Export
) -> None:
    entry = made()
    refused = imported(stranger, export(maker, [entry]))[entry.digest]
    assert isinstance(refused, UntrustedEngine) and maker.keyring.public_key() in str(refused)
    assert stranger.list() == []


def test_one_bad_engine_does_not_keep_the_others_out(
    maker: EngineStore, reader: EngineStore, made: Made, export: Export
) -> None:
    bad, good = made(64, size=3000), made(72, size=3001)
    source = export(maker, [bad, good])
    content = bad.path("model.pt2").read_bytes()
    for file in [source] if source.is_file() else source.rglob("model.pt2"):
        file.write_bytes(file.read_bytes().replace(content, content[:-1] + b"!", 1))
    found = imported(reader, source)
    assert isinstance(found[bad.digest], CorruptEngine) and isinstance(found[good.digest], Entry)
    assert reader.digests() == [good.digest] and nothing_half(reader)


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6, 0.95])
def test_a_file_that_was_cut_off(
    keep: float, maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    export_file(maker, [made(64, 30000), made(72, 30000)], whole)
    cut.write_bytes(whole.read_bytes()[: int(keep * whole.stat().st_size)])
    try:
        assert not all(isinstance(each, Entry) for each in imported(reader, cut).values())
    except StoreError as error:
        assert "cannot be imported whole" in str(error) or "no archive" in str(error)
    assert nothing_half(reader)


@pytest.mark.parametrize("content", [b"", b"no archive" * 100, bytes(10240)])
def test_what_is_no_archive(content: bytes, reader: EngineStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StoreError, match="slipstream export"):
        imported(reader, tmp_path / "x")
    with pytest.raises(StoreError):
        imported(reader, tmp_path / "nothing")
    with pytest.raises(StoreError, match="holds no engines"):
        imported(reader, tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE])
def test_members_that_are_no_plain_files(
    kind: bytes, maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path
) -> None:
    entry = made()
    export_file(maker, [entry], tmp_path / "whole")
    with tarfile.open(tmp_path / "whole") as whole, tarfile.open(tmp_path / "bad", "w") as bad:
        for member in whole:
            content = whole.extractfile(member)
            if member.name.endswith("model.pt2"):
                member.type, member.linkname, content = kind, "/etc/passwd", None
                member.size = 0
            bad.addfile(member, content)
    try:
        assert isinstance(imported(reader, tmp_path / "bad")[entry.digest], CorruptEngine)
    except StoreError as error:
        assert "archive" in str(error) or "cannot be imported whole" in str(error)
    assert nothing_half(reader)


def test_names_that_lead_out_are_never_written(
    maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path
) -> None:
    export_file(maker, [entry := made()], tmp_path / "file")
    with tarfile.open(tmp_path / "file", "a") as archive:
        for name in ("../evil", "/tmp/evil", f"engines/{entry.digest}/../../../evil", f"engines/{entry.digest}/evil"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"evil"))
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(reader.root)}
    imported(reader, tmp_path / "file")
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(reader.root)} == before
    assert not [path for path in tmp_path.rglob("*") if path.name == "evil"]


def test_a_folder_with_links(maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path) -> None:
    entry = made()
    export_folder(maker, [entry], tmp_path / "x")
    file = tmp_path / "x" / "engines" / entry.digest / "model.pt2"
    file.unlink()
    file.symlink_to(entry.path("model.pt2"))
    assert isinstance(imported(reader, tmp_path / "x")[entry.digest], CorruptEngine)


def test_an_export_takes_no_damaged_engine_and_leaves_nothing(maker: EngineStore, made: Made, tmp_path: Path) -> None:
    entry = made()
    entry.path("model.pt2").write_bytes(bytes(3000))
    for export in (export_file, export_folder):
        with pytest.raises(SlipstreamError):
            export(maker, [entry], tmp_path / "out" if export is export_folder else tmp_path / "file")
    assert not (tmp_path / "file").exists() and not list((tmp_path / "out").glob(".*"))
    assert not list(tmp_path.glob("*.part"))


def test_an_export_never_overwrites(maker: EngineStore, made: Made, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="is there already"):
        export_file(maker, [made()], tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


_IMPORTER = """
from slipstream.engine_cache import files
from slipstream.engine_cache.travel import archive
def slowly(source, read=archive.read_parts):
    for part in read(source):
        print("reading", flush=True)
        time.sleep(60)
        yield part
archive.read_parts = slowly
store = EngineStore(sys.argv[1], keyring=Keyring(pathlib.Path(sys.argv[2])))
archive.import_engines(store, pathlib.Path(sys.argv[3]), print)
"""


def test_a_process_killed_while_it_imports_leaves_nothing_half(
    maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path, python: Callable[..., subprocess.Popen[str]]
) -> None:
    entry = made()
    export_folder(maker, [entry], tmp_path / "x")
    process = python(_IMPORTER, reader.root, reader.keyring.folder, tmp_path / "x")
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    wait_until(lambda: any((reader.root / "tmp").iterdir()))
    process.kill()
    process.wait(30)
    assert reader.lookup(entry.digest) is None and reader.digests() == []
    assert isinstance(imported(reader, tmp_path / "x")[entry.digest], Entry) and nothing_half(reader)


def test_the_key_of_a_manifest_that_lies_about_its_digest(
    maker: EngineStore, reader: EngineStore, made: Made, tmp_path: Path
) -> None:
    entry, other = made(), make_key(72).digest
    export_folder(maker, [entry], tmp_path / "x")
    (tmp_path / "x" / "engines" / entry.digest).rename(tmp_path / "x" / "engines" / other)
    assert isinstance(imported(reader, tmp_path / "x")[other], CorruptEngine)
