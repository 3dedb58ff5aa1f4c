"""Charts of the page: bars of milliseconds, with colours for dark pages and for light ones."""

from __future__ import annotations

from collections.abc import Sequence

from ..subjects.rows import Row
from ..subjects.variants import OURS
from .svg import card, text

_WIDTH, _LEFT, _BAR, _STEP = 760, 24, 18, 23
_LONGEST = _WIDTH - 2 * _LEFT - 360  # leaves room for the words behind a bar

Section = tuple[str, Sequence[Row]]


def chart(sections: Sequence[Section]) -> str:
    """A picture on a card of its own, with one group of bars a section, each to its own scale."""
    parts, y = [], 34
    for title, rows in sections:
        parts.append(text("title", _LEFT, y, title))
        y += 12
        longest = max((row["ms"] for row in rows), default=1.0)
        for row in rows:
            parts += _bar(row, y, longest)
            y += _STEP
        y += 30
    if not sections:
        parts.append(text("title", _LEFT, y, "Nothing has been measured yet"))
        y += 20
    return card(_WIDTH, y, "milliseconds of one call", _STYLE, parts)


def _bar(row: Row, y: int, longest: float) -> list[str]:
    width = max(2.0, _LONGEST * row["ms"] / longest)
    kind = "ours" if row["variant"].startswith(OURS) else "other"
    return [
        f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3"/>',
        text("value", _LEFT + width + 8, y + 14, f"{row['ms']:.1f} ms  {row['variant']}"),
    ]


_STYLE = """.card { fill: #ffffff; stroke: #dfe3e6; }
text { font: 13px system-ui, sans-serif; fill: #1d2327; white-space: pre; }
.title { font-weight: 600; }
.other { fill: #adb5bd; }
.ours { fill: #d9480f; }
@media (prefers-color-scheme: dark) {
.card { fill: #1c2024; stroke: #2c3238; }
text { fill: #e8eaec; }
.other { fill: #5c6670; }
.ours { fill: #ff8a4c; }
}"""
