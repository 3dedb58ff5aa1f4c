"""Builds that were made, remembered for estimates."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from slipstream.engine_cache import BuildHistory, PastBuild, memos

BUILD = PastBuild("computer", "cpu", 2, "aotinductor", "balanced", "a" * 64, 100, 300, 60.0)


def past(seconds: float) -> PastBuild:
    return dataclasses.replace(BUILD, seconds=seconds)


def file_of(root: Path) -> Path:
    return root / "memo" / "builds.json"


def test_builds_are_remembered_in_order(tmp_path: Path) -> None:
    assert BuildHistory(tmp_path).builds() == []
    assert BuildHistory(tmp_path).add(BUILD) and BuildHistory(tmp_path).add(past(7))
    assert BuildHistory(tmp_path).builds() == [BUILD, past(7)]


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memos, "BUILDS_KEPT", 3)
    history = BuildHistory(tmp_path)
    for seconds in range(1, 6):
        history.add(past(seconds))
    assert [build.seconds for build in history.builds()] == [3, 4, 5]


@pytest.mark.parametrize("text", ["", "{", "null", "{}", "[1, null]", '[{"machine": "x"}]', "[" * 100_000, "\xff"])
def test_a_damaged_file_counts_as_empty_and_is_mended(tmp_path: Path, text: str) -> None:
    history = BuildHistory(tmp_path)
    history.add(BUILD)
    file_of(tmp_path).write_text(text, encoding="latin-1")
    assert history.builds() == []
    assert history.add(past(7)) and history.builds() == [past(7)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", -1), ("seconds", 0), ("seconds", "60"), ("seconds", True), ("seconds", float("nan")),
        ("operations", -1), ("operations", 1.5), ("layers", None), ("threads", True), ("machine", 5),
    ],
)  # fmt: skip
def test_one_damaged_record_leaves_the_others(tmp_path: Path, field: str, value: object) -> None:
    BuildHistory(tmp_path).add(BUILD)
    damaged = {**dataclasses.asdict(BUILD), field: value}
    file_of(tmp_path).write_text(json.dumps([damaged, dataclasses.asdict(BUILD)]))
    assert BuildHistory(tmp_path).builds() == [BUILD]


def test_a_store_that_cannot_be_written_remembers_nothing(tmp_path: Path) -> None:
    (tmp_path / "memo").write_text("a file where the folder would be")
    assert not BuildHistory(tmp_path).add(BUILD)
    assert BuildHistory(tmp_path).builds() == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_store_is_only_read(tmp_path: Path) -> None:
    BuildHistory(tmp_path).add(BUILD)
    file_of(tmp_path).parent.chmod(0o500)
    try:
        assert not BuildHistory(tmp_path).add(past(7))
        assert BuildHistory(tmp_path).builds() == [BUILD]
    finally:
        file_of(tmp_path).parent.chmod(0o700)


def _add_many(root: str, start: float) -> None:
    history = BuildHistory(root)
    for number in range(20):
        assert history.add(past(start + number))


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(str(tmp_path), start)) for start in (1.0, 101.0)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    found = [build.seconds for build in BuildHistory(tmp_path).builds()]
    assert sorted(found) == [*map(float, range(1, 21)), *map(float, range(101, 121))]
