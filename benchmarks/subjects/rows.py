"""One JSON object a line: what was measured, of which case, by which variant."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

Row = dict[str, Any]

TIMES_EAGER = 3
"""How many times as far from fp32 as the plain model in its own precision a picture may be."""

RESULTS = Path(__file__).resolve().parents[1] / "results"
CPU = "CPU"

FIELDS = (
    "case", "variant", "ms", "ms_min", "ms_max", "repeats", "warmup", "samples", "error", "gpu", "driver", "versions",
    "shapes", "precision", "build_s", "load_s", "size_mb", "vram_mb", "engine_calls", "seed", "commit", "run",
)  # fmt: skip
"""Of every row. A row that may not be trusted has one more, `failed`: the reason."""

IN_A_ROW = "in_a_row_ms"
"""Of rows of single calls that were also timed one after another, with none of them waited for: ms of each."""

OF_JOBS = ("steps", "errors", "distances")
"""Of rows of whole pictures, too: `errors` by output, and how far pictures are apart that differ in one input."""

OF_SWITCHED = ("again_ms", "steady_ms", "other")
"""Of rows of changes between two kinds of pictures, too. There `ms` is of first calls after a change, `again_ms` of
first calls of pictures like the one before, `steady_ms` of later calls, and `other` has all this for the other kind."""

OF_COLD = ("steady_ms", "marks")
"""Of rows of cold starts, too. There `ms` is from a process's start to its first picture, `steady_ms` of a later one,
and `marks` are the seconds from the start to what happened on the way."""

OF_SKIPPED = ("computed",)
"""Of rows of pictures of which steps were skipped, too: how many of the steps the model computed."""


def complete(row: Row) -> Row:
    """All fields in their order, None for what is not known, and nothing that JSON has no word for."""
    of_some = (IN_A_ROW, *OF_JOBS, *OF_SKIPPED, *OF_SWITCHED, *OF_COLD)
    unknown = set(row) - {*FIELDS, *of_some, "failed"}
    assert not unknown, unknown
    known = {name: _plain(row.get(name)) for name in (*FIELDS, *(name for name in of_some if name in row))}
    return known if row.get("failed") is None else {**known, "failed": row["failed"]}


def append(file: Path, rows: Iterable[Row]) -> None:
    """Add rows at the end of a file, which is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(line_of(row))


def line_of(row: Row) -> str:
    """Without blanks: rows are many, and read by programs."""
    return json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"


def read(file: Path, unfinished: bool = False) -> list[Row]:
    """The rows of one file.

    Args:
        unfinished: whoever wrote it may have been killed in the middle of a line, which is left out then.

    Raises:
        ValueError: a line is no row; the message says which.
    """
    rows = []
    text = file.read_text(encoding="utf-8")
    if unfinished:
        text = text[: text.rfind("\n") + 1]
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is no row of a measurement: {error}") from error
    return rows


def result_file(folder: Path, row: Row, day: date) -> Path:
    """E.g. "nvidia-h200-2026-01-31.jsonl"."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu_of(row).lower()).strip("-")
    return folder / f"{name}-{day.isoformat()}.jsonl"


def gpu_of(row: Row) -> str:
    """The GPU's name, or "CPU"."""
    return row["gpu"] or CPU


def is_of_job(row: Row) -> bool:
    """Whether a whole picture was measured, not a single call."""
    return "steps" in row


def is_of_skipped(row: Row) -> bool:
    """Whether steps of the picture were skipped."""
    return "computed" in row


def is_of_switched(row: Row) -> bool:
    """Whether changes between two kinds of pictures were measured."""
    return "+switch-" in row["variant"]


def is_of_cold(row: Row) -> bool:
    """Whether processes were timed from their start to their first picture."""
    return "cold" in row["variant"].split("+")


def last_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of each GPU, case and variant the last row, by GPU and in the order in which they were measured."""
    last: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = gpu_of(row), row["case"], row["variant"]
        last.pop(key, None)
        last[key] = row
    return [last[key] for key in sorted(last, key=lambda key: key[0])]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
