"""Models that overflow in fp16 are remembered beside the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.engine_cache import OverflowMemo, memos

MODEL, OTHER = ("a" * 64, "b" * 64), ("a" * 64, "c" * 64)


def test_what_was_added_is_known_to_the_next_process(tmp_path: Path) -> None:
    assert OverflowMemo(tmp_path).models() == []
    for model in (MODEL, OTHER, MODEL):
        assert OverflowMemo(tmp_path).add(model)
    assert sorted(OverflowMemo(tmp_path).models()) == [MODEL, OTHER]


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memos, "KEPT", 2)
    memo = OverflowMemo(tmp_path)
    for weights in "xyz":
        memo.add(("a", weights))
    assert memo.models() == [("a", "y"), ("a", "z")]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["a"], ["a", 2], "ab"]'])
def test_a_damaged_file_is_nothing_remembered(tmp_path: Path, text: str) -> None:
    memo = OverflowMemo(tmp_path)
    memo.add(MODEL)
    (file,) = (tmp_path / "memo").glob("*.json")
    assert json.loads(file.read_text()) == [list(MODEL)]
    file.write_text(text)
    assert memo.models() == []
    assert memo.add(OTHER) and memo.models() == [OTHER]


def test_a_store_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "memo").write_text("a file where the folder should be")
    assert not OverflowMemo(tmp_path).add(MODEL)
