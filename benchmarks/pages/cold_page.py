"""The page's part about cold starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..subjects.rows import Row, gpu_of, is_of_cold, last_of_each
from . import tables

_MARKS = ("imports", "model", "ready", "picture")


def cold_starts(rows: Iterable[Row]) -> list[Row]:
    """Of each GPU, case and variant the last row, by GPU and in the order in which they were measured."""
    return last_of_each(filter(is_of_cold, rows))


def section(found: Sequence[Row], circumstances: Iterable[str]) -> str:
    """See `tables.section`."""
    return tables.section(_HEAD, _table, found, circumstances)


def _table(gpu: str, rows: Sequence[Row]) -> str:
    columns = "case | variant | start to first picture s | of which imports | model | ready | first picture"
    lines = [f"### {gpu}: cold starts\n", f"| {columns} | a later picture ms |"]
    lines.append(f"| --- | --- |{' ---: |' * 6}")
    lines += [_line(row) for row in rows if gpu_of(row) == gpu]
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    marks = [row["marks"][mark] for mark in _MARKS]
    spent = " | ".join(f"{end - begin:.2f}" for begin, end in zip([0.0, *marks], marks, strict=False))
    return f"| {row['case']} | `{row['variant']}` | {row['ms'] / 1000:.2f} | {spent} | {row['steady_ms']:.2f} |"


_HEAD = """## From a cold start

How long a process takes from its start to its first picture, by the clock. Each start is a process of its own, after
one that is not counted: engines are in the store by then, and torch finds what it has compiled in its cache on the
disk, as a second start of ComfyUI would. "imports" is Python, torch and ComfyUI's own modules, without its server or
any other custom node. "model" is the model with random weights, made in memory, where ComfyUI would read a file.
"ready" is the time until the first step is computed: engines are found, loaded and checked by then, or code is
compiled. "first picture" is the rest of that picture, with what the VAE's decoder needs to be ready. All columns but
the last are in seconds. What a picture is compared with is computed after these times.
"""
