"""Measured closeness of presets to the full run, shown beside them; see `docs/step-skipping.md`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().with_name("measured.json")
"""By preset and number of steps: dB with the least close sampler and with the closest. `benchmarks/` writes it."""

CFG = 4.0


def closeness(preset: str, steps: int) -> str:
    """PSNR in dB of the decoded picture to that of all steps, over the samplers that were measured; else a dash."""
    found = _figures().get(preset, {}).get(str(steps))
    return "–" if found is None else between(*found)


def between(least: int, most: int, words: str = "{} to {}") -> str:
    return str(least) if least == most else words.format(least, most)


@functools.cache
def _figures() -> dict[str, Any]:
    try:
        return dict(json.loads(MEASURED.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
