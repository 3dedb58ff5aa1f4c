"""The figures that the nodes and Step Skip's help page show, from the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...sampling.closeness import closeness
from ...sampling.measured import Figure
from ...sampling.presets import PRESETS
from .closer import CLOSER
from .samples import protocol
from .samples.results import Row, condition_of, is_judged

LANGUAGES = {"en": ("Preset", "of {} steps", "{} to {}"), "zh": ("预设", "{} 步", "{} 至 {}")}
"""Words of the table on the help pages: a preset, of how many steps, from the least figure to the greatest."""

_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def measured(rows: Sequence[Row]) -> str:
    """What `sampling.measured` reads: by preset the figures of each condition, those of more computed steps last."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in (row for row in rows if is_judged(row) or row.get("case") == CLOSER):
        found.setdefault(row["preset"], []).append(tuple(_figure(row)))
    presets = [
        f"{json.dumps(preset)}: [\n" + ",\n".join(json.dumps(each) for each in figures) + "\n]"
        for preset, figures in found.items()
    ]
    return "{\n" + ",\n".join(presets) + "\n}\n"


def _figure(row: Row) -> Figure:
    steps = int(condition_of(row).rsplit("-", 1)[1])  # ddim_uniform has one more or less
    share = row.get("share", PRESETS[row["preset"]].selection.share)
    picture_db = round(row["decoded"]["preset"]["psnr_db"], 2)
    return Figure(row["sampler"], row["scheduler"], row["cfg"], steps, share, picture_db, round(row["gain_db"], 2))


def with_figures(text: str, language: str = "en") -> str:
    """Step Skip's help page with renewed figures, those of `sampling.measured`.

    Args:
        language: of the page, one of `LANGUAGES`.
    """
    before, _, behind = text.partition(_BEGIN)
    _, _, after = behind.partition(_END)
    preset, of_steps, words = LANGUAGES[language]
    head = " | ".join(of_steps.format(steps) for steps in protocol.STEPS)
    lines = [f"| {preset} | {head} |", "|---" * (1 + len(protocol.STEPS)) + "|"]
    for name in PRESETS:
        cells = [closeness(PRESETS[name], steps, words) for steps in protocol.STEPS]
        lines.append(" | ".join([f"| `{name}`", *cells]) + " |")
    return "\n".join([before + _BEGIN, "", *lines, "", _END + after])
