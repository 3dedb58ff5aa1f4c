"""Engines that a person vouches for are all adopted or none, whatever happens in between."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.core.errors import CorruptEngine, SlipstreamError, StoreError
from slipstream.engine_cache import EngineStore, Entry, Keyring, workspace
from slipstream.engine_cache import store as store_module
from slipstream.engine_cache.manifest import MANIFEST_NAME
from slipstream.tests.unit.engine_cache.support import make_key

Start = Callable[..., "subprocess.Popen[str]"]
HEIGHTS = (64, 72, 80, 88)


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "store", keyring=Keyring(tmp_path / "keys"))


@pytest.fixture
def entries(store: EngineStore, put: Callable[..., Entry]) -> list[Entry]:
    """Engines from before engines were signed."""
    return [without_maker(put(height)) for height in HEIGHTS]


def without_maker(entry: Entry) -> Entry:
    path = entry.directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "seal": None, "signature": None}), encoding="utf-8")
    return entry


def trusted(store: EngineStore) -> list[bool]:
    """Of each engine, as another process would find it."""
    fresh = EngineStore(store.root, keyring=Keyring(store.keyring.folder))
    return [fresh.trusted(make_key(height).digest) is not None for height in HEIGHTS]


def nothing_left(store: EngineStore) -> bool:
    return not store.root.joinpath("adopting").exists() and not any((store.root / "tmp").iterdir())


def test_all_are_adopted(store: EngineStore, entries: list[Entry]) -> None:
    assert [entry.why_untrusted() for entry in store.adopt(entries)] == [None] * 4
    assert all(trusted(store)) and nothing_left(store) and store.adopt([]) == []


@pytest.mark.parametrize("at", [1, 2, 4])
def test_on_a_full_disk_none_is(
    store: EngineStore, entries: list[Entry], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    written, write = list[Path](), store_module.write_durably

    def full(path: Path, text: str) -> None:
        written.append(path)
        if len(written) == at:
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(store_module, "write_durably", full)
    with pytest.raises(StoreError, match="is full"):
        store.adopt(entries)
    assert len(written) == at and not any(trusted(store)) and nothing_left(store)


_ADOPTER = """
from slipstream.engine_cache import workspace
replace, times = workspace.replace, []
def stopping(source, target):
    times.append(target)
    if len(times) == int(sys.argv[3]):
        print("there", flush=True)
        time.sleep(600)
    replace(source, target)
workspace.replace = stopping
store = EngineStore(sys.argv[1], keyring=Keyring(pathlib.Path(sys.argv[2])))
store.adopt(store.list())
print("done", flush=True)
"""


@pytest.mark.parametrize(("at", "come"), [(1, False), (4, True)])
def test_a_process_that_is_killed_leaves_all_or_none(
    store: EngineStore, entries: list[Entry], python: Start, at: int, come: bool
) -> None:
    """Before the one rename that decides, and as the third manifest is exchanged after it."""
    store.keyring.seal(b"")
    process = python(_ADOPTER, store.root, store.keyring.folder, at)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.kill()
    process.wait(30)
    assert trusted(store) == [come] * 4
    store.clean()
    assert nothing_left(store) and all(problem is None for problem in store.verify_all().values())


def test_several_may_adopt_at_once(store: EngineStore, entries: list[Entry], python: Start) -> None:
    other = python(_ADOPTER.replace("store.adopt", "print('ready', flush=True); store.adopt"), store.root,
                   store.keyring.folder, 0)  # fmt: skip
    assert other.stdout is not None and other.stdout.readline() == "ready\n"
    while other.poll() is None:
        assert len(store.adopt(entries)) == 4
    assert "done" in other.stdout.read() and all(trusted(store)) and nothing_left(store)


def test_one_that_cannot_be_changed_is_told_and_stops_no_later_adoption(
    store: EngineStore, entries: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the folder of another user, in a shared store."""
    stuck, replace = entries[2].directory / MANIFEST_NAME, workspace.replace

    def refused(source: Path, target: Path) -> None:
        if target == stuck:
            raise PermissionError("not yours")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "replace", refused)
        with pytest.raises(StoreError, match=entries[2].digest[:12]):
            store.adopt(entries)
    assert trusted(store) == [True, True, False, True] and nothing_left(store)
    store.adopt([entries[2]])
    assert all(trusted(store))


def test_a_wrong_one_is_named_and_the_others_are_adopted(store: EngineStore, entries: list[Entry]) -> None:
    (entries[1].directory / "model.pt2").write_bytes(bytes(3000))
    wrong: dict[str, SlipstreamError] = {}
    adopted = store.adopt(entries, lambda entry, error: wrong.update({entry.digest: error}))
    assert [entry.digest for entry in adopted] == [entries[number].digest for number in (0, 2, 3)]
    assert list(wrong) == [entries[1].digest] and "model.pt2" in str(wrong[entries[1].digest])
    assert trusted(store) == [True, False, True, True]


def test_where_nobody_is_told_of_a_wrong_one_none_is_adopted(store: EngineStore, entries: list[Entry]) -> None:
    (entries[3].directory / "model.pt2").write_bytes(bytes(3000))
    with pytest.raises(CorruptEngine, match="model.pt2"):
        store.adopt(entries)
    assert not any(trusted(store))


def test_what_was_replaced_since_it_was_looked_at_is_not_adopted(store: EngineStore, entries: list[Entry]) -> None:
    path = entries[2].directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "created": "2020-01-01T00:00:00+00:00"}))
    with pytest.raises(StoreError, match="replaced meanwhile"):
        store.adopt(entries)
    assert not any(trusted(store))


def test_what_a_dead_process_left_does_not_come_over_a_newer_build(store: EngineStore, entries: list[Entry]) -> None:
    newer, gone = entries[0], entries[1]
    left = store.root / "adopting"
    left.mkdir()
    for entry in (newer, gone):
        text = (entry.directory / MANIFEST_NAME).read_text(encoding="utf-8")
        (left / f"{entry.digest}.json").write_text(text.replace('"created": "20', '"created": "19'))
    (left / "nonsense.json").write_text("{")
    gone.directory.rename(store.root / "elsewhere")
    before = (newer.directory / MANIFEST_NAME).read_bytes()
    assert store.lookup(newer.digest) and store.lookup(gone.digest) is None
    assert (newer.directory / MANIFEST_NAME).read_bytes() == before and not left.exists()
