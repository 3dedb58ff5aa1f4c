"""The chart of a calibration: computed steps against closeness to the full run, on the held-out pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ....sampling.calibration.calibrated import FOUND, SHORTENED, Calibration, Candidate, Choice
from ....sampling.calibration.trial import mean

Point = tuple[float, float]

_WIDTH, _HEIGHT = 960, 640
_LEFT, _TOP, _RIGHT, _BOTTOM = 84, 150, 924, 562
_INK, _GRID, _PAPER = (32, 32, 32), (222, 222, 222), (255, 255, 255)
_RADIUS = 7
_CURVES: tuple[tuple[str, tuple[int, int, int], str, Callable[[Choice], Candidate]], ...] = (
    (FOUND, (0, 90, 181), "circle", lambda choice: choice.found),
    ("built-in presets", (200, 80, 0), "square", lambda choice: choice.preset),
    (SHORTENED, (110, 110, 110), "diamond", lambda choice: choice.shortened),
)


@dataclass(frozen=True)
class _Axes:
    """From values to places in the picture."""

    fewest: float
    most: float
    low: float
    high: float

    def x(self, count: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (count - self.fewest) / (self.most - self.fewest)

    def y(self, decibels: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (decibels - self.low) / (self.high - self.low)


def draw_chart(calibration: Calibration) -> torch.Tensor:
    """A picture as ComfyUI has them: [1, H, W, 3] from 0 to 1."""
    image = Image.new("RGB", (_WIDTH, _HEIGHT), _PAPER)
    draw = ImageDraw.Draw(image)
    axes = _axes(calibration)
    _draw_axes(draw, axes, calibration)
    for row, (label, colour, marker, pick) in enumerate(_CURVES):
        points = [(choice.count, mean(pick(choice).held_out)) for choice in calibration.choices]
        _draw_curve(draw, [(axes.x(count), axes.y(decibels)) for count, decibels in points], colour, marker)
        _draw_legend(draw, row, label, colour, marker)
    proposal = calibration.choice.proposal
    _ring(draw, (axes.x(len(proposal.computed)), axes.y(mean(proposal.held_out))))
    place = _legend_place(len(_CURVES))
    _ring(draw, place)
    draw.text((place[0] + 22, place[1]), "proposed", _INK, _font(18), anchor="lm")
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)[None]


def _axes(calibration: Calibration) -> _Axes:
    counts = [choice.count for choice in calibration.choices]
    values = [mean(pick(choice).held_out) for choice in calibration.choices for *_, pick in _CURVES]
    room = max(0.5, 0.08 * (max(values) - min(values)))
    return _Axes(min(counts) - 1, max(counts) + 1, min(values) - room, max(values) + room)


def _draw_axes(draw: ImageDraw.ImageDraw, axes: _Axes, calibration: Calibration) -> None:
    for decibels in _ticks(axes.low, axes.high):
        draw.line([(_LEFT, axes.y(decibels)), (_RIGHT, axes.y(decibels))], _GRID, 1)
        draw.text((_LEFT - 10, axes.y(decibels)), f"{decibels:g}", _INK, _font(18), anchor="rm")
    for count in sorted({choice.count for choice in calibration.choices}):
        draw.line([(axes.x(count), _BOTTOM), (axes.x(count), _BOTTOM + 6)], _INK, 1)
        draw.text((axes.x(count), _BOTTOM + 10), str(count), _INK, _font(18), anchor="ma")
    draw.rectangle([_LEFT, _TOP, _RIGHT, _BOTTOM], outline=_INK)
    pictures = len(calibration.choice.found.held_out)
    title = f"Closeness to your {calibration.steps}-step pictures"
    draw.text((_LEFT, 16), title, _INK, _font(26))
    draw.text((_LEFT, 54), f"latent PSNR in dB, higher is closer; mean of {pictures} held out", _INK, _font(18))
    draw.text(((_LEFT + _RIGHT) / 2, _HEIGHT - 40), f"computed steps of {calibration.steps}", _INK, _font(20), "ma")


def _draw_curve(draw: ImageDraw.ImageDraw, points: list[Point], colour: tuple[int, int, int], marker: str) -> None:
    for begin, end in itertools.pairwise(points):
        draw.line([begin, end], colour, 3)
    for point in points:
        _mark(draw, point, colour, marker)


def _draw_legend(draw: ImageDraw.ImageDraw, row: int, label: str, colour: tuple[int, int, int], marker: str) -> None:
    left, middle = _legend_place(row)
    draw.line([(left - 14, middle), (left + 14, middle)], colour, 3)
    _mark(draw, (left, middle), colour, marker)
    draw.text((left + 22, middle), label, _INK, _font(18), anchor="lm")


def _legend_place(row: int) -> Point:
    return _LEFT + 16.0 + 205.0 * row, 126.0


def _mark(draw: ImageDraw.ImageDraw, at: Point, colour: tuple[int, int, int], marker: str) -> None:
    x, y = at
    box = [x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS]
    if marker == "circle":
        draw.ellipse(box, colour)
    elif marker == "square":
        draw.rectangle(box, colour)
    else:
        reach = _RADIUS + 2
        draw.polygon([(x, y - reach), (x + reach, y), (x, y + reach), (x - reach, y)], colour)


def _ring(draw: ImageDraw.ImageDraw, at: Point) -> None:
    x, y = at
    reach = _RADIUS + 6
    draw.ellipse([x - reach, y - reach, x + reach, y + reach], outline=_INK, width=3)


def _ticks(low: float, high: float) -> list[float]:
    """Round values, about six."""
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)
