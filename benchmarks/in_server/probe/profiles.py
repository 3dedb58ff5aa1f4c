"""Where a sampler's time goes: the GPU's kernels by torch's profiler, or Python's functions by cProfile."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KERNELS, FUNCTIONS = PROFILES = ("kernels", "functions")
"""Wishes of a prompt, and the last words of the files' names."""

_MOST = 120


def profiled(what: str, file: Path, compute: Callable[[], Any]) -> Any:
    """Return what `compute` returns, and write a table of where its time went: of `PROFILES`, which is named."""
    return (_kernels if what == KERNELS else _functions)(file, compute)


def _kernels(file: Path, compute: Callable[[], Any]) -> Any:
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        result = compute()
    spent: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in found.events():
        spent[event.name].append(event.time_range.elapsed_us())
        spans.append((event.time_range.start, event.time_range.end))
    rows = sorted(spent.items(), key=lambda row: -sum(row[1]))
    lines = [f"{sum(times) / 1000:10.3f} ms  {len(times):6}  {name}" for name, times in rows]
    file.write_text("\n".join([*_gaps(sorted(spans)), "", *lines]) + "\n", encoding="utf-8")
    return result


def _gaps(spans: list[tuple[float, float]]) -> list[str]:
    """The longest times in which the GPU did nothing, in ms from the first kernel on."""
    gaps, reached = [], spans[0][0] if spans else 0.0
    for start, end in spans:
        gaps.append((start - reached, reached - spans[0][0]))
        reached = max(reached, end)
    longest = sorted(gaps, reverse=True)[:20]
    return [f"idle {length / 1000:10.3f} ms from {start / 1000:10.3f} ms on" for length, start in longest if length > 0]


def _functions(file: Path, compute: Callable[[], Any]) -> Any:
    found = cProfile.Profile()
    result = found.runcall(compute)
    text = io.StringIO()
    for order in ("cumulative", "tottime"):
        pstats.Stats(found, stream=text).sort_stats(order).print_stats(_MOST)
    file.write_text(text.getvalue(), encoding="utf-8")
    return result
