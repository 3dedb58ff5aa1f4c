"""Rows of pictures made in a server: one JSON object a line, one row for each variant and turn."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from ..subjects.rows import CPU, Row
from .gpu import Reading
from .variants import OURS

PREFIX = "server-"
"""How the names of files with these rows begin."""

FIGURES = ("client_s", "sampler_s", "decoder_s", "encoder_s", "before_s", "first_step_ms", "step_ms", "after_s")
"""Of each picture: seconds by the client, in sampler nodes, in the decoder node, in the node that encodes a text, and
before the first call of the model, milliseconds from the first call to the second and from call to call, and seconds
after the last call."""

FIELDS = (
    "case", "flags", "comfyui", "variant", "patch", "turn", *FIGURES, "pictures", "samples", "build_s", "vram_mb",
    "peak_mb", "build_peak_mb", "watts", "mhz", "model_calls", "engine_calls", "eager_calls", "blocks",
    "blocks_on_engines", "reasons", "error", "errors", "effect", "died", "step_ms_synchronised", "gpu", "driver",
    "versions", "commit", "run",
)  # fmt: skip
"""Of every row; `reasons` say why eager models ran, with how often each was given. A row of which something went wrong
has one more field, `failed`: what.

`patch` is a key of `PATCHES`; empty in rows without one that those with one are compared with, and None in all others.
With a patch, `error` is against the plain workflow with the same patch, and `effect` is how far the plain workflow's
picture is from the one without it. `blocks` are calls of single blocks, where models went by blocks."""

MOST_EAGER = 0.05
"""Of all calls, the share that eager models may have computed in a row of Slipstream that is shown as its speed."""


def complete(row: Row) -> Row:
    """Return a row with all fields in their order, None for what is not known or not finite."""
    unknown = set(row) - {*FIELDS, "failed"}
    assert not unknown, unknown
    known = {name: _plain(row.get(name)) for name in FIELDS}
    return {**known, "failed": row["failed"]} if row.get("failed") else known


def result_file(folder: Path, gpu: str | None, day: date, prefix: str = PREFIX) -> Path:
    """Return the file for rows of a GPU, e.g. "server-nvidia-h200-2026-01-31.jsonl"."""
    name = re.sub(r"[^a-z0-9]+", "-", (gpu or CPU).lower()).strip("-")
    return folder / f"{prefix}{name}-{day.isoformat()}.jsonl"


def figures_of(client_s: float, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a picture's `FIGURES`, less those of nodes that did not run.

    Of several samplers the seconds are added up; the step is the last one's.

    Args:
        nodes: the probe's figures of each sampler, decoder and encoder, in the order in which they ran.
    """
    found = {"client_s": client_s}
    for node in nodes:
        name = f"{node['node']}_s"
        found[name] = found.get(name, 0.0) + node["seconds"]
    samplers = [node for node in nodes if node["node"] == "sampler"]
    called = [node for node in samplers if node["calls"]]
    if called:
        found["before_s"] = sum(node["before"] for node in called)
        found["after_s"] = sum(node["after"] for node in called)
    if called and called[-1]["steps"]:
        found["first_step_ms"] = 1000 * called[-1]["steps"][0]
        found["step_ms"] = 1000 * median(called[-1]["steps"])
    return found


def medians_of(pictures: Sequence[Mapping[str, float]]) -> Row:
    """Return `samples`, a list of single pictures' figures for each of `FIGURES`, and the medians by themselves."""
    samples = {name: [picture[name] for picture in pictures if name in picture] for name in FIGURES}
    samples = {name: [round(value, 6) for value in values] for name, values in samples.items() if values}
    return {**{name: round(median(values), 6) for name, values in samples.items()}, "samples": samples}


def of_readings(readings: Sequence[Reading]) -> Row:
    """Return the highest memory in use, and median power and clock, of what was read while pictures ran."""
    watts = [reading.watts for reading in readings if reading.watts is not None]
    clocks = [reading.mhz for reading in readings if reading.mhz is not None]
    return {
        "peak_mb": highest_mb(readings),
        "watts": round(median(watts), 1) if watts else None,
        "mhz": round(median(clocks)) if clocks else None,
    }


def highest_mb(readings: Iterable[Reading]) -> float | None:
    """Return the highest memory in use, in MiB; None where nothing was read."""
    return max((round(reading.used_mb, 1) for reading in readings), default=None)


def counts_as_headline(row: Row) -> bool:
    """Whether a row may be shown as its variant's speed.

    The server lived, the picture was compared, and of Slipstream's calls at most `MOST_EAGER` went to eager models.
    """
    if is_of_patches(row) or row["died"] or "failed" in row or row["error"] is None or not math.isfinite(row["error"]):
        return False
    return not is_ours(row) or is_served(row)


def is_of_patches(row: Row) -> bool:
    """Whether a row is one of those that show what patches leave of the speed, and nothing else."""
    return row.get("patch") is not None


def is_ours(row: Row) -> bool:
    """Whether Slipstream's nodes were in the workflow."""
    return str(row["variant"]).partition("+")[0] == OURS


def is_served(row: Row) -> bool:
    """Whether engines computed nearly all calls."""
    if row["engine_calls"] is None or row["eager_calls"] is None:
        return False
    calls = int(row["engine_calls"]) + int(row["eager_calls"])
    return calls > 0 and row["eager_calls"] / calls <= MOST_EAGER


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
