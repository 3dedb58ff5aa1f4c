"""The rows of presets, those of everything else, and the values of each sample beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine_cache.files import replace_text
from ...sampling.presets import Use
from ...sampling.samplers import kind_of
from .protocol import WORST_GAIN

NAME, OTHERS = "step-skipping", "step-skipping-others"
Row = dict[str, Any]
Raw = dict[str, NDArray[np.float32]]
_OF_A_ROW = ("case", "way", "sampler", "scheduler", "cfg", "steps", "preset")


def read(folder: Path) -> list[Row]:
    """All rows; none where there are no files."""
    files = [file for file in (folder / f"{NAME}.jsonl", folder / f"{OTHERS}.jsonl") if file.exists()]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def keep(folder: Path, rows: Sequence[Row], raw: Raw) -> None:
    """Add rows to those that are there, in place of older ones of the same kind."""
    folder.mkdir(parents=True, exist_ok=True)
    together = list({_kind(row): row for row in (*read(folder), *rows)}.values())
    decide(together)
    if raw:
        _keep_values(folder, raw)
    _write(folder / f"{NAME}.jsonl", [row for row in together if is_judged(row)])
    _write(folder / f"{OTHERS}.jsonl", [row for row in together if not is_judged(row)])


def is_judged(row: Row) -> bool:
    """Whether it is of a preset in a condition, not of something beside the protocol."""
    return "gain_db" in row


def _keep_values(folder: Path, raw: Raw) -> None:
    values = folder / f"{NAME}.npz"
    older = dict(np.load(values)) if values.exists() else {}
    half = {name: each.astype(np.float16) for name, each in raw.items()}
    with open(part := folder / f"{NAME}.npz.part", "wb") as stream:
        np.savez_compressed(stream, **{**older, **half})
    os.replace(part, values)


def _write(file: Path, rows: Sequence[Row]) -> None:
    replace_text(file, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), file.parent)


def decide(rows: Sequence[Row]) -> None:
    """Note in each row whether its preset is shipped for what the row is a case of, see `presets.Use`."""
    worst: dict[tuple[Use, str], float] = {}
    judged = [row for row in rows if is_judged(row)]
    for row in judged:
        place = use_of(row), row["preset"]
        worst[place] = min(worst.get(place, row["ci_low"]), row["ci_low"])
    for row in judged:
        row["shipped"] = worst[use_of(row), row["preset"]] > WORST_GAIN


def use_of(row: Row) -> Use:
    return Use(kind_of(row["sampler"]), row["cfg"] > 1)


def _kind(row: Row) -> Hashable:
    return tuple(row.get(name) for name in _OF_A_ROW)
