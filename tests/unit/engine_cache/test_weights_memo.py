"""Digests of checkpoint files are remembered while the files stay the same."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from slipstream.engine_cache import WeightsMemo
from slipstream.engine_cache.files import identity
from slipstream.engine_cache.memos import KEPT


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights" * 1000)
    settle(path)
    return path


def settle(path: Path, seconds: float = 100) -> None:
    """Let the file have been written a while ago."""
    then = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


@pytest.fixture
def memo(tmp_path: Path) -> WeightsMemo:
    return WeightsMemo(tmp_path / "store")


def test_another_process_knows_it_too(checkpoint: Path, memo: WeightsMemo) -> None:
    assert memo.put(str(checkpoint), "d1", identity(checkpoint))
    assert WeightsMemo(memo._memo.folder.parent).get(checkpoint) == "d1"


def test_any_change_of_the_file_is_seen(checkpoint: Path, memo: WeightsMemo) -> None:
    seen = identity(checkpoint)
    assert memo.put(checkpoint, "d1", seen)
    assert memo.get(checkpoint) == "d1"
    settle(checkpoint, 50)
    assert memo.get(checkpoint) is None, "another mtime"
    os.utime(checkpoint, ns=(seen[1], seen[1]))
    assert memo.get(checkpoint) == "d1"
    other = checkpoint.with_suffix(".new")
    other.write_bytes(checkpoint.read_bytes())
    os.utime(other, ns=(seen[1], seen[1]))
    os.replace(other, checkpoint)
    assert memo.get(checkpoint) is None, "another inode with the same size and mtime"
    checkpoint.unlink()
    assert memo.get(checkpoint) is None


def test_a_file_that_changes_while_read_or_is_too_young_is_not_remembered(checkpoint: Path, memo: WeightsMemo) -> None:
    before = identity(checkpoint)
    settle(checkpoint, 50)
    assert memo.put(checkpoint, "d", before) is False
    settle(checkpoint, 0)
    assert memo.put(checkpoint, "d", identity(checkpoint)) is False
    assert memo.get(checkpoint) is None


def test_parts_of_one_file_are_told_apart(checkpoint: Path, memo: WeightsMemo) -> None:
    memo.put(checkpoint, "d1", identity(checkpoint), part="unet")
    memo.put(checkpoint, "d2", identity(checkpoint), part="vae")
    assert (memo.get(checkpoint, "unet"), memo.get(checkpoint, "vae"), memo.get(checkpoint)) == (
        "d1",
        "d2",
        None,
    )


def test_a_link_is_the_file_it_leads_to(checkpoint: Path, memo: WeightsMemo) -> None:
    link = checkpoint.with_name("link.safetensors")
    link.symlink_to(checkpoint)
    memo.put(link, "d", identity(link))
    assert memo.get(checkpoint) == "d"


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"x": 5}', '{"x": {"digest": 5, "identity": 1}}', "\x00"])
def test_a_damaged_memo_counts_as_empty(checkpoint: Path, memo: WeightsMemo, text: str) -> None:
    memo._memo.folder.mkdir(parents=True)
    memo._memo.path.write_text(text)
    assert memo.get(checkpoint) is None
    assert memo.put(checkpoint, "d", identity(checkpoint))
    assert memo.get(checkpoint) == "d"


def test_it_is_bounded_and_forgets_the_oldest(checkpoint: Path, memo: WeightsMemo) -> None:
    memo._memo.folder.mkdir(parents=True)
    record = {"identity": [1, 2, 3], "digest": "old"}
    memo._memo.path.write_text(json.dumps({f"/{number}": record for number in range(KEPT)}))
    memo.put(checkpoint, "d", identity(checkpoint))
    known = json.loads(memo._memo.path.read_text())
    assert len(known) == KEPT and "/0" not in known and "/1" in known
    assert memo.get(checkpoint) == "d"


def test_an_impossible_place_only_costs_time(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memo = WeightsMemo(tmp_path / "file")
    assert memo.put(checkpoint, "d", identity(checkpoint)) is False
    assert memo.get(checkpoint) is None


def test_threads_do_not_lose_each_others_records(tmp_path: Path, memo: WeightsMemo) -> None:
    paths = [tmp_path / f"{number}.bin" for number in range(12)]
    for path in paths:
        path.write_bytes(b"x")
        settle(path)
    threads = [threading.Thread(target=memo.put, args=(path, path.name, identity(path))) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [memo.get(path) for path in paths] == [path.name for path in paths]
    assert not list(memo._memo.folder.glob("*.part"))
