"""What was measured of two ways is remembered beside the engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine_cache import ChoiceMemo, memos

WAYS = ("one", "other")


def test_the_faster_way_is_known_to_the_next_process(tmp_path: Path) -> None:
    assert ChoiceMemo(tmp_path).fastest("engines", WAYS) is None
    assert ChoiceMemo(tmp_path).add("engines", {"one": 2.0, "other": 1.5})
    assert ChoiceMemo(tmp_path).fastest("engines", WAYS) == "other"
    assert ChoiceMemo(tmp_path).add("engines", {"one": 1.0, "other": 1.5})
    assert ChoiceMemo(tmp_path).fastest("engines", WAYS) == "one"
    assert ChoiceMemo(tmp_path).fastest("others", WAYS) is None


def test_a_way_that_was_not_measured_is_no_answer(tmp_path: Path) -> None:
    ChoiceMemo(tmp_path).add("engines", {"one": 2.0})
    assert ChoiceMemo(tmp_path).fastest("engines", WAYS) is None


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memos, "KEPT", 2)
    memo = ChoiceMemo(tmp_path)
    for subject in "xyz":
        memo.add(subject, dict.fromkeys(WAYS, 1.0))
    assert [memo.fastest(subject, WAYS) is not None for subject in "xyz"] == [False, True, True]


@pytest.mark.parametrize("text", ["", "[]", '{"engines": 1}', '{"engines": {"one": "fast", "other": 1}}'])
def test_a_damaged_file_is_nothing_remembered(tmp_path: Path, text: str) -> None:
    memo = ChoiceMemo(tmp_path)
    memo.add("engines", dict.fromkeys(WAYS, 1.0))
    (file,) = (tmp_path / "memo").glob("*.json")
    file.write_text(text)
    assert memo.fastest("engines", WAYS) is None
    assert memo.add("engines", dict.fromkeys(WAYS, 1.0)) and memo.fastest("engines", WAYS) == "one"
