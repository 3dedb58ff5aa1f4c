"""The demonstration's results for people: a table on the terminal, and a page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .figures import PLAIN, PSNR_CAP, Figures, RunFigures, psnr

DIFFERENCE_GAIN = 32
"""Levels of difference are multiplied by this in the maps: 8 of 256 are as bright as it gets."""

Picture = NDArray[np.uint8]


# -------------------------------------------------------------------------------------------------- terminal


def legend(figures: Figures) -> str:
    """What the numbers in the table's first column stand for."""
    return "\n".join(f"{index}  {case}" for index, case in enumerate(figures.cases, 1))


def table(figures: Figures) -> Table:
    """One row a run."""
    shown = Table(title=figures.host, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column("", no_wrap=True)
    shown.add_column("run", no_wrap=True)
    for heading in ("s", "ms/step", "speed", "build", "load", "error", "PSNR", "calls"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for index in range(len(figures.cases)):
        for row, run in enumerate(_runs_of(figures, index)):
            shown.add_row("" if row else str(index + 1), *_cells(figures, run))
        shown.add_section()
    return shown


def _runs_of(figures: Figures, case: int) -> list[RunFigures]:
    return [run for run in figures.runs if run.case == case]


def _cells(figures: Figures, run: RunFigures) -> list[str]:
    measured = [_title(run), f"{run.seconds:.2f}", f"{1000 * run.seconds_per_step:.1f}"]
    if run.variant == PLAIN:
        return [*measured, "", "", "", "", "", f"0/{run.eager_calls}"]
    return [
        *measured,
        f"{speedup(figures, run):.2f}×" if run.phase == "warm" else "",
        "" if run.build_seconds is None else f"{run.build_seconds:.0f}",
        "" if run.load_seconds is None else f"{run.load_seconds:.2f}",
        f"{run.relative_error:.0e}",
        _decibels(run.psnr),
        f"{run.engine_calls}/{run.eager_calls}",
    ]


def _title(run: RunFigures) -> str:
    return run.variant if run.variant == PLAIN or run.preset else f"{run.variant}, {run.phase}"


def _decibels(value: float) -> str:
    return "same" if value >= PSNR_CAP else f"{value:.1f}"


def speedup(figures: Figures, run: RunFigures) -> float:
    """How many times as fast as the plain model, per step."""
    plain = figures.find(run.case, PLAIN, "warm")
    return plain.seconds_per_step / run.seconds_per_step if plain else float("nan")


def summary(figures: Figures, seconds: float) -> str:
    """The last lines: what failed, or that nothing did."""
    if failures := figures.failures():
        return "\n".join(["FAILED", *(f"- {failure}" for failure in failures)])
    worst = max(run.relative_error for run in figures.runs if not run.preset)
    presets = "".join(f"\n{name}: {_closeness(runs)}" for name, runs in _presets(figures).items())
    return (
        f"OK after {seconds:.0f} s: {figures.cold_builds} engines built by the first start, {figures.warm_builds} by "
        f"the second; largest difference {worst:.1e}{presets}"
    )


def _presets(figures: Figures) -> dict[str, list[RunFigures]]:
    """The runs of each preset on engines."""
    found: dict[str, list[RunFigures]] = {}
    for run in figures.runs:
        if run.preset and run.is_accelerated:
            found.setdefault(run.preset, []).append(run)
    return found


def _closeness(runs: Sequence[RunFigures]) -> str:
    share = sum(run.computed_steps for run in runs) / sum(run.steps for run in runs)
    return (
        f"{share:.0%} of the steps computed, PSNR of at least {min(run.psnr for run in runs):.1f} dB to the plain "
        "model's picture of all steps"
    )


# ------------------------------------------------------------------------------------------------------ page


def page(figures: Figures, pictures: Sequence[Mapping[str, Picture]], made: str) -> str:
    """A self-contained page.

    Args:
        pictures: for each case, one of each variant; the second variant is the accelerated one.
        made: when, for the footer.
    """
    rows = "".join(_picture_row(figures, index, of_case) for index, of_case in enumerate(pictures))
    return _PAGE.format(
        style=_STYLE,
        verdict=_verdict(figures),
        tiles=_tiles(figures),
        pictures=rows,
        gain=DIFFERENCE_GAIN,
        chart=_chart(figures),
        note=_CPU_NOTE if figures.facts.get("GPU") == "none" else "",
        legend="".join(f"<li>{html.escape(str(case))}</li>" for case in figures.cases),
        table=_table(figures),
        facts=_facts({"host": figures.host, **figures.facts}),
        made=html.escape(made),
    )


def _verdict(figures: Figures) -> str:
    if failures := figures.failures():
        items = "".join(f"<li>{html.escape(failure)}</li>" for failure in failures)
        return f'<div class="verdict bad"><strong>Failed.</strong><ul>{items}</ul></div>'
    return (
        '<div class="verdict good"><strong>The same pictures, on cached engines.</strong> Engines built by the first '
        f"start: {figures.cold_builds}. By the second, which found them on disk: {figures.warm_builds}.</div>"
    )


def _tiles(figures: Figures) -> str:
    warm = [run for run in figures.runs if run.is_accelerated and run.phase == "warm" and not run.preset]
    builds = [run.build_seconds for run in figures.runs if run.build_seconds is not None]
    worst = max(warm, key=lambda run: run.relative_error)
    loads = [run.load_seconds for run in warm if run.load_seconds is not None]
    tiles = [
        (f"{np.median([speedup(figures, run) for run in warm]):.2f}×", "steps a second, against the plain model"),
        (f"{worst.relative_error:.0e}", f"largest difference in {worst.precision} (allowed: {worst.error_limit:.0e})"),
        (f"{sum(builds):.0f} s", f"to build {figures.cold_builds} engines, once"),
        (f"{max(loads, default=0):.1f} s", "at most, to load one at the next start"),
        *(_preset_tile(figures, *preset) for preset in _presets(figures).items()),
    ]
    return "".join(f'<div class="tile"><b>{value}</b><span>{html.escape(text)}</span></div>' for value, text in tiles)


def _preset_tile(figures: Figures, name: str, runs: Sequence[RunFigures]) -> tuple[str, str]:
    speed = np.median([speedup(figures, run) for run in runs])
    return f"{speed:.2f}×", f"with steps skipped too, by the preset {name}: {_closeness(runs)}"


def _picture_row(figures: Figures, index: int, pictures: Mapping[str, Picture]) -> str:
    case, (plain, accelerated, *_) = figures.cases[index], pictures.values()
    largest = int(np.abs(plain.astype(int) - accelerated).max())
    note = (
        "no byte differs"
        if largest == 0
        else f"at most {largest} of 255 levels, PSNR {_decibels(psnr(accelerated, plain))} dB"
    )
    images = [(plain, "plain"), (accelerated, "accelerated"), (difference_map(plain, accelerated), note)]
    images += [
        (pictures[run.variant], f"{run.variant}, PSNR {_decibels(psnr(pictures[run.variant], plain))} dB")
        for run in _runs_of(figures, index)
        if run.preset and run.is_accelerated
    ]
    figures_html = "".join(
        f'<figure><img src="{data_url(image)}" width="{image.shape[1]}" height="{image.shape[0]}" '
        f'alt="{html.escape(text)}"><figcaption>{html.escape(text)}</figcaption></figure>'
        for image, text in images
    )
    return f'<h3>“{html.escape(case.prompt)}” <small>{case.size}</small></h3><div class="row">{figures_html}</div>'


def difference_map(a: Picture, b: Picture) -> Picture:
    """Where and how much two pictures differ, from black over orange to white."""
    heat = np.clip(np.abs(a.astype(float) - b).max(-1) * DIFFERENCE_GAIN / 255, 0, 1)
    ramp = np.stack([heat * 3, heat * 3 - 1, heat * 3 - 2], -1)
    found: Picture = (np.clip(ramp, 0, 1) * 255).astype(np.uint8)
    return found


def data_url(picture: Picture) -> str:
    """The picture as an address that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


_BAR, _GAP, _LEFT, _WIDTH = 22, 14, 10, 760


def _chart(figures: Figures) -> str:
    """Bars of milliseconds a step, after the engines are loaded."""
    groups = [(case, _bars(figures, index)) for index, case in enumerate(figures.cases)]
    longest = max((value for _, bars in groups for _, value in bars), default=1.0)
    parts, y = [], 4
    for case, bars in groups:
        parts.append(f'<text class="label" x="{_LEFT}" y="{y + 12}">{html.escape(str(case))}</text>')
        y += 20
        for name, value in bars:
            width = max(2.0, (_WIDTH - 200) * value / longest)
            kind = "plain" if name == PLAIN else "fast"
            parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="4"/>')
            text = f"{1000 * value:.1f} ms {name}"
            parts.append(f'<text x="{_LEFT + width + 8:.1f}" y="{y + 15}">{html.escape(text)}</text>')
            y += _BAR + 4
        y += _GAP
    body = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {y}" role="img" aria-label="milliseconds a step">{body}</svg>'


def _bars(figures: Figures, case: int) -> list[tuple[str, float]]:
    return [(run.variant, run.seconds_per_step) for run in _runs_of(figures, case) if run.phase == "warm"]


def _table(figures: Figures) -> str:
    shown = table(figures)
    head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in shown.columns)
    cells = zip(*(list(column.cells) for column in shown.columns), strict=True)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _facts(facts: dict[str, Any]) -> str:
    return "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>" for name, value in facts.items())


_STYLE = """
:root { color-scheme: light dark; --paper: #fbfbfa; --ink: #1d2327; --soft: #5d676f; --line: #dfe3e6; --card: #fff;
  --fast: #d9480f; --plain: #adb5bd; --good: #2b8a3e; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e8eaec; --soft: #98a2ab; --line: #2c3238;
  --card: #1c2024; --fast: #ff8a4c; --plain: #5c6670; --good: #69db7c; --bad: #ff8787; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 880px; padding: 40px 24px 64px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 20px; margin: 44px 0 12px; }
h3 { font-size: 15px; font-weight: 600; margin: 20px 0 8px; }
small, .lead, figcaption, .tile span, dt, footer { color: var(--soft); }
small { font-weight: 400; margin-left: 6px; }
.lead { margin: 0 0 24px; }
.verdict { border-left: 4px solid; padding: 10px 16px; background: var(--card); border-radius: 0 8px 8px 0; }
.good { border-color: var(--good); } .bad { border-color: var(--bad); }
.verdict ul { margin: 4px 0 0; padding-left: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin-top: 16px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; font-variant-numeric: tabular-nums; }
.tile span { font-size: 13px; }
.row { display: flex; gap: 12px; align-items: flex-start; }
figure { margin: 0; flex: 1 1 0; min-width: 0; }
img { display: block; width: 100%; height: auto; border-radius: 8px; border: 1px solid var(--line); }
figcaption { font-size: 13px; margin-top: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); } svg .label { fill: var(--soft); }
svg .plain { fill: var(--plain); } svg .fast { fill: var(--fast); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {
  text-align: left; } ol.lead { padding-left: 20px; font-size: 14px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: 14px; }
dd { margin: 0; } footer { margin-top: 48px; font-size: 13px; }
"""

_CPU_NOTE = """<p class="lead">On a CPU most of a step is convolutions and attention, which the plain and the compiled
model leave to the same libraries: little is to be gained here, more on a GPU.</p>"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Slipstream: the demonstration</title>
<style>{style}</style>
</head>
<body>
<h1>Slipstream</h1>
<p class="lead">The built-in tiny model, sampled by the plain model and on engines built for it on this machine,
with all steps computed and with some skipped.</p>
{verdict}
<div class="tiles">{tiles}</div>
<h2>The pictures</h2>
<p class="lead">Same prompt, same noise. The third picture shows where the first two differ, {gain} times brighter.
The last one was made on the engines with some steps skipped.</p>
{pictures}
<h2>Time a step</h2>
{chart}
{note}
<h2>All figures</h2>
<ol class="lead">{legend}</ol>
<div class="scroll">{table}</div>
<h2>Where this was measured</h2>
<dl>{facts}</dl>
<footer>{made}. “cold”: the first start, which builds; “warm”: a new process that finds the engines, medians after
its first picture. “+balanced”: step skipping by that preset; ms/step is the mean of computed and skipped steps.
“build”: seconds; “load”: seconds that the first picture of the new process took more. “error”: ‖found − plain‖ /
‖plain‖ of the final latents, the largest over all pictures compared. “calls”: of engines / of the plain
model.</footer>
</body>
</html>
"""
