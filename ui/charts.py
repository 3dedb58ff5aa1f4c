"""Charts: how much faster this machine's engines are, and what was measured for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..core.formatting import say_backend, say_speed
from ..sampling.saved_preset import SavedPreset
from .wording import FASTER, SLOWER, bar

DOCS = Path(__file__).resolve().parents[1] / "docs"
MEASURED = {
    "benchmarks.svg": "Speed, measured for the documentation",
    "step-skipping.svg": "Step skipping: what the presets cost and how far they are off",
}


def speedups(engines: Iterable[Mapping[str, Any]]) -> str:
    """HTML: a bar for each engine whose speed was measured, the fastest first.

    Lengths are in proportion to the speed, and a line in each shows where your model without Slipstream is.
    """
    timed = sorted((each for each in engines if each["speedup"]), key=lambda each: -each["speedup"])
    if not timed:
        return (
            "<p>No engine of this machine was timed yet; that happens while ComfyUI makes pictures with an engine and "
            "without.</p>"
        )
    longest = max(1.0, *(each["speedup"] for each in timed))
    note = "<p>The line in each bar is your model without Slipstream (1×).</p>"
    return note + "".join(_timed(each, longest) for each in timed)


def _timed(engine: Mapping[str, Any], longest: float) -> str:
    title = f"{engine['label']}, {engine['precision']} {say_backend(engine['backend'])}: {say_speed(engine)}"
    colour = SLOWER if engine["speedup"] < 1 else FASTER
    line = bar(engine["speedup"] / longest, colour, mark=1 / longest)
    return f'<div class="slipstream-speed" style="margin:.6em 0">{escape(title)}{line}</div>'


def calibrated(presets: Iterable[SavedPreset]) -> str:
    """HTML: what Skip Calibrate found here, the closest first; a bar is the share of the steps that are computed."""
    found = sorted(presets, key=lambda each: -each.held_out_db)
    if not found:
        return (
            "<p>Nothing was calibrated here yet. The node Skip Calibrate measures step skipping on your own model.</p>"
        )
    return "".join(map(_calibrated, found))


def _calibrated(preset: SavedPreset) -> str:
    title = f"{preset.name}: {preset.preset().note}"
    return (
        f'<div class="slipstream-preset" style="margin:.6em 0">{escape(title)}'
        f"{bar(len(preset.computed) / preset.steps)}</div>"
    )


def measured(folder: Path = DOCS) -> str:
    """HTML: the charts that lie in the checkout; an installed package has none."""
    found = [(folder / name, title) for name, title in MEASURED.items() if (folder / name).is_file()]
    return "".join(_picture(file, title) for file, title in found)


def _picture(file: Path, title: str) -> str:
    data = quote(file.read_text(encoding="utf-8"))  # as a picture, whatever it holds is not run
    source = f"data:image/svg+xml;charset=utf-8,{data}"
    style = "max-width:100%;background:white"
    return f'<h3>{escape(title)}</h3><img alt="{escape(title)}" src="{source}" style="{style}">'
