"""The ladder: one model from the plain code in full precision to the fastest engine, a means of speed at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..subjects.rows import Row, gpu_of
from ..subjects.variants import LADDER, LADDER_CASE, describe
from .chart import chart

FILE = "ladder.svg"
_ONLY = frozenset(LADDER[:2])
"""Rungs that no other table has, by which a run is known to be the ladder's."""


@dataclass(frozen=True)
class Ladder:
    """
    Attributes:
        rows: from the lowest rung to the highest; those that were not measured, or failed, are missing.
    """

    gpu: str
    rows: tuple[Row, ...]


def is_climbed(rows: Sequence[Row]) -> bool:
    """Whether a run of one case has rungs of its own."""
    return any(row["case"] == LADDER_CASE and row["variant"] in _ONLY for row in rows)


def is_nothing_else(rows: Sequence[Row]) -> bool:
    """Whether a run's rows belong to the ladder alone, and to no other table."""
    return is_climbed(rows) and all(row["variant"] in LADDER for row in rows)


def ladders(rows: Iterable[Row]) -> list[Ladder]:
    """Of each GPU the last run, by the GPU's name; of a run the last row of each rung."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["case"] == LADDER_CASE:
            runs.setdefault((gpu_of(row), row["run"]), []).append(row)
    last = {gpu: found for (gpu, _), found in runs.items() if is_climbed(found)}
    found = [Ladder(gpu, _rungs(last[gpu])) for gpu in sorted(last)]
    return [ladder for ladder in found if ladder.rows]


def _rungs(rows: Sequence[Row]) -> tuple[Row, ...]:
    sound = {row["variant"]: row for row in rows if "failed" not in row}
    return tuple(sound[name] for name in LADDER if name in sound)


def picture(found: Sequence[Ladder], title: str) -> str:
    """The chart, in SVG."""
    return chart([(f"{ladder.gpu}: {title}", ladder.rows) for ladder in found])


def section(found: Sequence[Ladder], title: str, circumstances: Iterable[str]) -> str:
    """The page's part about them, in Markdown; empty where none was measured.

    Args:
        title: of the case.
        circumstances: of each run, in words.
    """
    if not found:
        return ""
    parts = [_table(ladder, said) for ladder, said in zip(found, circumstances, strict=True)]
    rungs = dict.fromkeys(row["variant"] for ladder in found for row in ladder.rows)
    words = "\n".join(f"- `{name}`: {describe(name)}" for name in rungs)
    return "\n".join([_HEAD.format(title=title, file=FILE), *parts, f"{words}\n"])


def _table(ladder: Ladder, circumstances: str) -> str:
    lines = [f"### {ladder.gpu}\n", "| rung | ms | over the first | over the one before | error | VRAM MB |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    first = before = ladder.rows[0]["ms"]
    for row in ladder.rows:
        speed = f"{row['ms']:.2f} | {first / row['ms']:.2f}× | {before / row['ms']:.2f}×"
        held = "" if row["vram_mb"] is None else f"{row['vram_mb']:.0f}"
        lines.append(f"| `{row['variant']}` | {speed} | {row['error']:.1e} | {held} |")
        before = row["ms"]
    return "\n".join([*lines, f"\n{circumstances}\n"])


_HEAD = """## Rung by rung

![Milliseconds of one call, rung by rung]({file})

What each means of speed gives by itself: {title}, from the eager model in fp32 up. A rung that was not measured, or may
not be trusted, is missing. The first has convolutions in TF32, which is how torch computes them unless it is told not
to; "error" is against fp32 without that.
"""
