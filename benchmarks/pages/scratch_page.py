"""The page's part about a model without any engine yet: what the first pictures are made by, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..in_server.from_scratch import PREFIX
from ..subjects.rows import Row, gpu_of, last_of_each, read

_Made = Callable[[dict[str, Any]], bool]
"""Whether a picture was made in some way."""


def read_rows(folder: Path) -> list[Row]:
    """Return the last row of each GPU, case and variant.

    Raises:
        ValueError: a line is no row.
    """
    files = sorted(folder.glob(f"{PREFIX}*.jsonl"), key=lambda file: file.stem[-len("2026-01-31") :])
    return last_of_each(row for file in files for row in read(file))


def section(rows: Sequence[Row]) -> str:
    """Return the whole part; empty where nothing was measured."""
    if not rows:
        return ""
    parts = [_HEAD]
    for gpu in dict.fromkeys(map(gpu_of, rows)):
        lines = [_line(row) for row in rows if gpu_of(row) == gpu]
        parts += [f"### {gpu}: from an empty store\n", _COLUMNS, *lines, "", *_builds(gpu, rows), ""]
    return "\n".join(parts)


def _line(row: Row) -> str:
    pictures = row["pictures"]
    cells = [row["case"], f"`{row['variant']}`", f"{pictures[0]['client_s']:.1f}" if pictures else ""]
    by_model, by_blocks, by_whole = (_steps(pictures, made) for made in (_by_model, _by_blocks, _by_whole))
    cells += [by_model, _since(pictures, _by_blocks), by_blocks, _since(pictures, _by_whole), by_whole]
    return f"| {' | '.join(cells)} |"


def _builds(gpu: str, rows: Sequence[Row]) -> list[str]:
    return [
        f"Builds of `{row['case']}`, `{row['variant']}`: "
        + "; ".join(f"{each['what']} {each['seconds']} s ({each['parts']})" for each in row["builds"])
        + "."
        for row in rows
        if gpu_of(row) == gpu and row["builds"]
    ]


def _since(pictures: Sequence[dict[str, Any]], made: _Made) -> str:
    return next((f"{picture['at_s']:.0f}" for picture in pictures if made(picture)), "")


def _steps(pictures: Sequence[dict[str, Any]], made: _Made) -> str:
    """The last three: engines come one after another."""
    found = [picture["step_ms"] for picture in pictures if made(picture) and "step_ms" in picture]
    return f"{median(found[-3:]):.1f}" if found else ""


def _by_model(picture: dict[str, Any]) -> bool:
    return not picture.get("engine_calls")


def _by_blocks(picture: dict[str, Any]) -> bool:
    return bool(picture.get("of_blocks"))


def _by_whole(picture: dict[str, Any]) -> bool:
    return bool(picture.get("engine_calls", 0) > picture.get("of_blocks", 0))


_COLUMNS = """\
| case | variant | first picture s | step ms | blocks from s | step ms | whole from s | step ms |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""

_HEAD = """## The first pictures, without any engine yet

A new ComfyUI server, an empty store of engines, and empty caches of torch and triton. Pictures follow one another with
some seconds of rest, in which builds run, as they do by default. "from" is when the first picture was asked for in
which engines of blocks, or one of the whole model, took part, counted from the first picture's prompt. "step" is the
median step of the last three pictures that were made in this way; the model's own where no engine took part.
"""
