"""The file of rows, and the values of each sample beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...sampling.presets import Use
from ...sampling.samplers import kind_of
from .protocol import WORST_GAIN

NAME = "step-skipping"
Row = dict[str, Any]
Raw = dict[str, NDArray[np.float32]]
_OF_A_ROW = ("case", "way", "sampler", "scheduler", "cfg", "steps", "preset")


def read(folder: Path) -> list[Row]:
    """All rows; none where there is no file."""
    file = folder / f"{NAME}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def keep(folder: Path, rows: Sequence[Row], raw: Raw) -> None:
    """Add rows to those that are there, in place of older ones of the same kind."""
    folder.mkdir(parents=True, exist_ok=True)
    together = {_kind(row): row for row in (*read(folder), *rows)}
    decide(list(together.values()))
    values = folder / f"{NAME}.npz"
    older = dict(np.load(values)) if values.exists() else {}
    half = {name: each.astype(np.float16) for name, each in raw.items()}
    parts = [folder / f"{NAME}.{suffix}.part" for suffix in ("npz", "jsonl")]
    with open(parts[0], "wb") as stream:
        np.savez_compressed(stream, **{**older, **half})
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in together.values())
    parts[1].write_text(text, encoding="utf-8")
    for part in parts:
        os.replace(part, part.with_suffix(""))


def decide(rows: Sequence[Row]) -> None:
    """Note in each row whether its preset is shipped for what the row is a case of, see `presets.Use`."""
    worst: dict[tuple[Use, str], float] = {}
    judged = [row for row in rows if "gain_db" in row]
    for row in judged:
        place = use_of(row), row["preset"]
        worst[place] = min(worst.get(place, row["ci_low"]), row["ci_low"])
    for row in judged:
        row["shipped"] = worst[use_of(row), row["preset"]] > WORST_GAIN


def use_of(row: Row) -> Use:
    return Use(kind_of(row["sampler"]), row["cfg"] > 1)


def _kind(row: Row) -> Hashable:
    return tuple(row.get(name) for name in _OF_A_ROW)
