"""A chart of closeness against cost: a panel a sampler, in colours for dark pages and for light ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pages.svg import card, text

_COLUMNS, _WIDTH, _HEIGHT, _MARGIN = 4, 250, 210, 44
_CLASSES = ("ours", "other")


@dataclass(frozen=True)
class Series:
    """Points (computed steps, dB), from left to right."""

    name: str
    points: tuple[tuple[float, float], ...]


Panel = tuple[str, Sequence[Series]]


def curves(panels: Sequence[Panel]) -> str:
    rows = max(1, -(-len(panels) // _COLUMNS))
    width, height = _COLUMNS * _WIDTH + 20, rows * _HEIGHT + 40
    body = [
        _panel(panel, 10 + place % _COLUMNS * _WIDTH, 36 + place // _COLUMNS * _HEIGHT)
        for place, panel in enumerate(panels)
    ]
    names = list(dict.fromkeys(series.name for _, group in panels for series in group))
    legend = [
        f'<circle class="{kind}" cx="{24 + 180 * place}" cy="18" r="4"/>' + text("value", 34 + 180 * place, 22, name)
        for place, (kind, name) in enumerate(zip(_CLASSES, names, strict=False))
    ]
    return card(width, height, "closeness to the N-step picture against computed steps", _STYLE, [*legend, *body])


def _panel(panel: Panel, left: int, top: int) -> str:
    title, group = panel
    points = [point for series in group for point in series.points]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    low_x, high_x, low_y, high_y = min(xs) - 1, max(xs) + 1, min(ys) - 2, max(ys) + 2
    wide, tall = _WIDTH - _MARGIN - 10, _HEIGHT - 62

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + _MARGIN + wide * (x - low_x) / (high_x - low_x),
            top + 20 + tall * (high_y - y) / (high_y - low_y),
        )

    parts = [text("title", left + _MARGIN, top + 10, title)]
    for y in _ticks(low_y, high_y, 10):
        parts.append(f'<path class="grid" d="M{place(low_x, y)[0]:.1f} {place(low_x, y)[1]:.1f}h{wide}"/>')
        parts.append(text("value", left + 14, place(low_x, y)[1] + 4, f"{y:g}"))
    for x in _ticks(low_x, high_x, 4):
        parts.append(text("value", place(x, low_y)[0] - 6, top + 20 + tall + 16, f"{x:g}"))
    for kind, series in zip(_CLASSES, group, strict=False):
        spots = [place(*point) for point in series.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline class="{kind}" points="{line}"/>')
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in spots]
    parts.append(text("value", left + _MARGIN + wide - 92, top + 20 + tall + 32, "computed steps"))
    parts.append(text("value", left, top + 10, "dB"))
    return "\n".join(parts)


def _ticks(low: float, high: float, step: int) -> list[float]:
    return [float(value) for value in range(-(-int(low) // step) * step, int(high) + 1, step)]


_STYLE = """.card { fill: #ffffff; stroke: #dfe3e6; }
text { font: 12px system-ui, sans-serif; fill: #1d2327; }
.title { font-weight: 600; }
.grid { stroke: #dfe3e6; }
polyline { fill: none; stroke-width: 2; }
circle.ours { fill: #d9480f; } polyline.ours { stroke: #d9480f; }
circle.other { fill: #868e96; } polyline.other { stroke: #868e96; }
@media (prefers-color-scheme: dark) {
.card { fill: #1c2024; stroke: #2c3238; }
text { fill: #e8eaec; }
.grid { stroke: #2c3238; }
circle.ours { fill: #ff8a4c; } polyline.ours { stroke: #ff8a4c; }
}"""
