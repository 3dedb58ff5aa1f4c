"""Rows: their fields, their files."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from slipstream.benchmarks.subjects.rows import FIELDS, append, complete, read, result_file
from slipstream.tests.unit.benchmarks.support import row


def test_a_row_has_all_fields_and_no_other() -> None:
    assert tuple(complete({"variant": "eager", "case": "a"})) == FIELDS
    assert list(complete({"failed": "why"})) == [*FIELDS, "failed"]
    assert list(complete({"failed": None})) == list(FIELDS)
    with pytest.raises(AssertionError, match="colour"):
        complete({"colour": "blue"})


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rows.jsonl"
    append(file, [complete({"error": float("inf")}), complete({"error": float("nan")})])
    append(file, [complete({"error": 0.5})])
    assert [json.loads(line)["error"] for line in file.read_text().splitlines()] == [None, None, 0.5]
    assert [found["error"] for found in read(file)] == [None, None, 0.5]


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"case": "a"}\n{"case"\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 is no row"):
        read(file)


def test_a_file_a_gpu_and_day(tmp_path: Path) -> None:
    day = date(2026, 1, 31)
    assert result_file(tmp_path, row("eager"), day).name == "nvidia-h200-2026-01-31.jsonl"
    awkward = row("eager", gpu="NVIDIA GeForce RTX 4090 (Laptop)")
    assert result_file(tmp_path, awkward, day).name == "nvidia-geforce-rtx-4090-laptop-2026-01-31.jsonl"
    assert result_file(tmp_path, row("eager", gpu=None), day).name == "cpu-2026-01-31.jsonl"
