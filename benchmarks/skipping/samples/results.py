"""The rows of presets, those of everything else, and the values of each sample beside them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from ....engine_cache.files import replace_text
from ....sampling.presets import HISTORICAL, PRESETS, Preset, Use
from ....sampling.samplers import kind_of
from ...subjects.rows import line_of
from . import protocol
from .fingerprint import fingerprint
from .protocol import WORST_GAIN, Condition

NAME, OTHERS = "step-skipping", "step-skipping-others"
EXEMPT = HISTORICAL
Row = dict[str, Any]
Raw = dict[str, NDArray[np.float32]]
_OF_A_ROW = ("case", "way", "sampler", "scheduler", "cfg", "steps", "preset", "share", "denoise", "begins_with")
_VALUES = ("preset", "best_plain")


def read(folder: Path) -> list[Row]:
    """All rows; none where there are no files."""
    files = [file for file in (folder / f"{NAME}.jsonl", folder / f"{OTHERS}.jsonl") if file.exists()]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def keep(folder: Path, rows: Sequence[Row], raw: Raw) -> None:
    """Add rows to those that are there, in place of older ones of the same kind, and of all that do not go with them.

    Several processes may do so at the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(_lock(folder)):
        older = [row for row in read(folder) if goes_with(row, rows)]
        together = list({_kind(row): row for row in (*older, *rows)}.values())
        decide(together)
        _keep_values(folder, raw, {values_key(row) for row in together if is_judged(row)})
        _write(folder / f"{NAME}.jsonl", [row for row in together if is_judged(row)])
        _write(folder / f"{OTHERS}.jsonl", [row for row in together if not is_judged(row)])


def goes_with(older: Row, rows: Iterable[Row]) -> bool:
    """Whether an older row is of the same samples, and of the same preset, as new ones of its case."""
    alike = [row for row in rows if row.get("case") == older.get("case")]
    same_preset = [row for row in alike if row.get("preset") == older.get("preset")]
    return all(row.get("seeds") == older.get("seeds") for row in alike) and all(
        row.get("fingerprint") == older.get("fingerprint") for row in same_preset
    )


def is_judged(row: Row) -> bool:
    """Whether it is of a preset in a condition, not of something beside the protocol."""
    return "case" not in row


def is_first_look(row: Row) -> bool:
    """Whether it is from before seeds and equal time were noted."""
    return "seeds" not in row


def condition_of(row: Row) -> str:
    """`steps` is what the schedule made of the condition's: ddim_uniform may have one more."""
    named = row.get("condition")
    return str(named or Condition(row["sampler"], row["scheduler"], row["cfg"], row["steps"]))


def values_key(row: Row) -> str:
    return f"{condition_of(row)}-{row['preset']}"


def _lock(folder: Path) -> str:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return str(Path(tempfile.gettempdir()) / f"slipstream-{NAME}-{digest}.lock")


def read_values(folder: Path) -> Raw:
    """The values of each sample, by `values_key` and what they are of; empty where none were kept.

    One array holds all of them: an entry of the archive for each would take twice the room.
    """
    file = folder / f"{NAME}.npz"
    if not file.exists():
        return {}
    with np.load(file) as held:
        parts = np.split(held["values"], np.cumsum(held["lengths"])[:-1])
        return dict(zip(map(str, held["names"]), parts, strict=True)) if len(held["names"]) else {}


def _keep_values(folder: Path, raw: Raw, keys: set[str]) -> None:
    values = folder / f"{NAME}.npz"
    older = read_values(folder)
    together: dict[str, NDArray[Any]] = {**older, **{name: each.astype(np.float16) for name, each in raw.items()}}
    wanted = {f"{key}-{what}" for key in keys for what in _VALUES}
    kept = {name: each for name, each in together.items() if name in wanted}
    if not raw and len(kept) == len(older):
        return
    with open(part := folder / f"{NAME}.npz.part", "wb") as stream:
        np.savez_compressed(
            stream,
            names=np.array(list(kept), str),
            lengths=np.array([len(each) for each in kept.values()], np.int64),
            values=np.concatenate([*kept.values(), np.empty(0, np.float16)]),
        )
    os.replace(part, values)


def _write(file: Path, rows: Sequence[Row]) -> None:
    replace_text(file, "".join(map(line_of, rows)), file.parent)


# ------------------------------------------------------------------------------------------- what rows decide on


def decide(rows: Sequence[Row]) -> None:
    """Note in each row whether its preset is shipped for what the row is a case of."""
    uses = uses_from(rows)
    for row in rows:
        if is_judged(row):
            row["shipped"] = use_of(row) in uses.get(row["preset"], frozenset())


def uses_from(rows: Iterable[Row], conditions: Sequence[Condition] | None = None) -> dict[str, frozenset[Use]]:
    """By preset, where the protocol ships it: where it is good enough in every condition of that use.

    A use of which a condition has no row is not among them.

    Args:
        conditions: all there should be rows of; default: the protocol's.
    """
    worst = {(condition_of(row), row["preset"]): row["ci_low"] for row in rows if is_judged(row)}
    wanted: dict[Use, list[str]] = {}
    for condition in protocol.conditions() if conditions is None else conditions:
        wanted.setdefault(_use(condition.sampler, condition.cfg), []).append(str(condition))

    def is_shipped(preset: str, names: Sequence[str]) -> bool:
        return all(worst.get((name, preset), float("-inf")) > WORST_GAIN for name in names)

    presets = dict.fromkeys(preset for _, preset in worst)
    return {preset: frozenset(use for use, names in wanted.items() if is_shipped(preset, names)) for preset in presets}


def use_of(row: Row) -> Use:
    return _use(row["sampler"], row["cfg"])


def _use(sampler: str, cfg: float) -> Use:
    return Use(kind_of(sampler), cfg > 1)


def disagreements(rows: Sequence[Row], presets: Mapping[str, Preset] = PRESETS) -> list[str]:
    """Where the presets are shipped otherwise than the rows say, and rows that are of other presets, in words."""
    judged = [row for row in rows if is_judged(row)]
    uses, found = uses_from(judged), []
    for name, preset in presets.items():
        of_it = [row for row in judged if row["preset"] == name]
        if any(row.get("fingerprint") != fingerprint(preset) for row in of_it):
            found.append(f"{name}: its rows were measured with other steps, another rule or other code")
        if name == EXEMPT:
            continue
        earned = uses.get(name, frozenset())
        for use in sorted(preset.uses ^ earned, key=lambda use: (use.kind.value, use.guided)):
            where = f"{use.kind.value} samplers at CFG {'above 1' if use.guided else '1'}"
            says = "the rows do not say so" if use in preset.uses else "though the rows say so"
            found.append(f"{name}: {'shipped' if use in preset.uses else 'not shipped'} for {where}, {says}")
    return found


def _kind(row: Row) -> Hashable:
    return tuple(row.get(name) for name in _OF_A_ROW)
