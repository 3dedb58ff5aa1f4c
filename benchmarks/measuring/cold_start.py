"""Cold starts: a fresh process each time, from just before it is started until its first picture is there.

A process of each variant goes before those that are timed: it builds engines and compiles code, which the others find
on the disk. That is what a second start of ComfyUI is like.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from ...runtime.checking.measure import statistics_of
from ..subjects.rows import Row
from .case_process import PROGRAM, Outcome, run_apart, task_of

STARTS = 3
"""That are timed, where the user says nothing else."""

FIRST = 1
"""Starts of a variant before those that are timed."""

Start = Callable[[str, bool], Row | str]


def measure_cold(
    name: str, options: Namespace, variants: Sequence[str], words: Sequence[str], program: Sequence[str] = PROGRAM
) -> Outcome:
    """Start processes of one case.

    Args:
        options, words: of the command.
    """
    part, hidden = task_of(name, options.out)
    with tempfile.TemporaryDirectory(prefix="slipstream-cold-", ignore_cleanup_errors=True) as caches:
        shared = ("--caches", caches, "--store", str(options.store or Path(caches) / "engines"))

        def start(variant: str, is_first: bool) -> Row | str:
            command = [*program, *words, "--variants", variant, *shared, *hidden, *(["--fill"] if is_first else [])]
            rows, trouble = run_apart([*command, "--started", repr(time.perf_counter())], part, options.limit)
            return trouble or (rows[-1] if rows else "the process left its variant out")

        return _outcome(name, variants, options.repeats or STARTS, start)


def _outcome(name: str, variants: Sequence[str], repeats: int, start: Start) -> Outcome:
    """All first starts, then the timed ones in turns; a variant that fails is not started again."""
    going, found, trouble = list(variants), dict[str, list[Row]](), list[str]()
    for number in range(FIRST + repeats):
        for variant in list(going):
            row = start(variant, number < FIRST)
            if isinstance(row, str):
                trouble.append(f"{name}, {variant}: {row}")
            elif "failed" in row:
                trouble.append(f"{name}, {variant}: {row['failed']}")
                found[variant] = [row]
            elif "left_out" not in row:
                if number >= FIRST:
                    found.setdefault(variant, []).append(row)
                continue
            going.remove(variant)
    return Outcome(tuple(together(found[variant]) for variant in variants if variant in found), tuple(trouble))


def together(rows: Sequence[Row]) -> Row:
    """One row of several starts; one that failed stands by itself."""
    if "failed" in rows[0]:
        return rows[0]
    found = statistics_of([sample for row in rows for sample in row["samples"]])
    found |= {"repeats": len(rows), "error": max(row["error"] for row in rows)}
    found |= {"errors": {output: max(row["errors"][output] for row in rows) for output in rows[0]["errors"]}}
    found |= {"engine_calls": sum(row["engine_calls"] for row in rows)}
    found |= {"steady_ms": round(median(row["steady_ms"] for row in rows), 4)}
    marks = {mark: round(median(row["marks"][mark] for row in rows), 4) for mark in rows[0]["marks"]}
    return {**rows[0], **found, "marks": marks}
