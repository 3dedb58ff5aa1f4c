"""A read-only store under a writable one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.core.errors import StoreError
from slipstream.engine_cache import EngineStore, Entry, Speed, Verification
from slipstream.tests.unit.engine_cache.support import make_key

Put = Callable[..., Entry]
CHECK = Verification(0.001, 0.001, 2, "fp16")


@pytest.fixture
def base(tmp_path: Path, put: Put) -> EngineStore:
    """A store with one engine."""
    made = EngineStore(tmp_path / "base")
    put(into=made)
    return made


@pytest.fixture
def layered(tmp_path: Path, base: EngineStore) -> EngineStore:
    return EngineStore(tmp_path / "upper", bases=[base.root])


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


def test_engines_of_a_base_are_used_and_nothing_is_written_there(layered: EngineStore, base: EngineStore) -> None:
    before = contents(base.root)
    entry = layered.lookup(make_key().digest)
    assert entry is not None and entry.is_in_base and layered.list() == [entry]
    layered.touch(entry)
    with entry.hold():
        entry.verify_files()
        assert entry.artifact.files
    entry = layered.record_verification(entry, "c" * 64, CHECK)
    layered.record_speed(entry, Speed(1.0, 2.0))
    found = layered.lookup(entry.digest)
    assert found is not None and found.manifest.verifications["c" * 64] == CHECK and found.why_untrusted() is None
    assert found.manifest.speed is not None and contents(base.root).keys() == before.keys()
    assert {name: text for name, (text, _) in contents(base.root).items()} == {n: t for n, (t, _) in before.items()}


def test_a_base_is_neither_pruned_nor_deleted(layered: EngineStore, base: EngineStore, put: Put) -> None:
    put(72, into=layered)
    assert layered.prune(limit_bytes=0) == [make_key(72).digest]
    with pytest.raises(StoreError, match="only read"):
        layered.delete(make_key().digest)
    assert layered.size_bytes() == 0 and base.has(make_key().digest)


def test_the_upper_layer_goes_first(layered: EngineStore, put: Put) -> None:
    entry = put(into=layered)
    found = layered.lookup(entry.digest)
    assert found == entry and not found.is_in_base and layered.digests() == [entry.digest]


def test_damage_in_a_base_is_passed_over_and_can_be_built_anew(
    layered: EngineStore, base: EngineStore, put: Put
) -> None:
    entry = layered.lookup(make_key().digest)
    assert entry is not None
    (entry.directory / "model.pt2").write_bytes(bytes(3000))
    assert "another content" in str(layered.verify(entry.digest))
    assert layered.lookup(entry.digest) is None and entry.directory.is_dir()
    assert not put(into=layered).is_in_base


def test_a_base_that_is_not_there(tmp_path: Path, put: Put) -> None:
    (tmp_path / "file").write_text("x")
    store = EngineStore(tmp_path / "upper", bases=[tmp_path / "nothing", tmp_path / "file"])
    assert store.list() == [] and store.lookup(make_key().digest) is None
    assert put(into=store)


def test_records_of_another_build_do_not_count(layered: EngineStore, base: EngineStore, tmp_path: Path) -> None:
    entry = layered.lookup(make_key().digest)
    assert entry is not None
    layered.record_verification(entry, "c" * 64, CHECK)
    record = layered.root / "records" / f"{entry.digest}.json"
    record.write_text(record.read_text().replace(next(iter(entry.manifest.files.values())).sha256, "0" * 64))
    found = layered.lookup(entry.digest)
    assert found is not None and not found.manifest.verifications
    record.write_text("{")
    assert layered.lookup(entry.digest) is not None
