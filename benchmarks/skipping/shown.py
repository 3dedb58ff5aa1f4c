"""The figures that the nodes and Step Skip's help page show, from the rows."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...sampling.measured import CFG, between
from ...sampling.presets import PRESETS
from .samples import protocol
from .samples.results import EXEMPT, Row, is_judged

LANGUAGES = {"en": ("Preset", "of {} steps", "{} to {}"), "zh": ("预设", "{} 步", "{} 至 {}")}
"""Words of the table on the help pages: a preset, of how many steps, from the least figure to the greatest."""

_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def measured(rows: Sequence[Row]) -> str:
    """What `sampling.measured` reads: dB to the N-step picture by preset and steps, from the least close sampler to the
    closest, where it is shipped; of decoded pictures, which is what people look at."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in (row for row in rows if is_shown(row)):
        nominal = min(protocol.STEPS, key=lambda steps: abs(steps - row["steps"]))  # ddim_uniform has one more or less
        of_preset = found.setdefault(row["preset"], {})
        of_preset.setdefault(str(nominal), []).append(row["decoded"]["preset"]["psnr_db"])
    ranges = {
        preset: {steps: [round(min(each)), round(max(each))] for steps, each in sorted(by_steps.items())}
        for preset, by_steps in found.items()
    }
    return json.dumps(ranges, indent=2) + "\n"


def is_shown(row: Row) -> bool:
    """Whether people can get it by the preset, guided as most of them do."""
    return is_judged(row) and row["cfg"] == CFG and (row["shipped"] or row["preset"] == EXEMPT)


def with_figures(text: str, figures: str, language: str = "en") -> str:
    """Step Skip's help page with renewed figures.

    Args:
        figures: see `measured`.
        language: of the page, one of `LANGUAGES`.
    """
    before, _, behind = text.partition(_BEGIN)
    _, _, after = behind.partition(_END)
    by_preset, (preset, of_steps, words) = json.loads(figures), LANGUAGES[language]
    head = " | ".join(of_steps.format(steps) for steps in protocol.STEPS)
    lines = [f"| {preset} | {head} |", "|---" * (1 + len(protocol.STEPS)) + "|"]
    for name in PRESETS:
        found = [by_preset.get(name, {}).get(str(steps)) for steps in protocol.STEPS]
        cells = ["–" if each is None else between(each[0], each[1], words) for each in found]
        lines.append(" | ".join([f"| `{name}`", *cells]) + " |")
    return "\n".join([before + _BEGIN, "", *lines, "", _END + after])
