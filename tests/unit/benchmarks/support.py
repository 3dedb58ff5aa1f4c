"""Rows as measurements leave them."""

from __future__ import annotations

from typing import Any

from slipstream.benchmarks.rows import Row, complete


def row(variant: str, ms: float | None = 10.0, **fields: Any) -> Row:
    """A complete row of a good measurement; `fields` replace what is in it."""
    samples = [] if ms is None else [ms, ms]
    found = {
        "case": "sd15-512-b2", "variant": variant, "ms": ms, "ms_min": ms, "ms_max": ms, "repeats": 2, "warmup": 1,
        "samples": samples, "error": 1e-3, "gpu": "NVIDIA H200", "driver": "580.1", "precision": "fp16",
        "versions": {"torch": "2.11.0", "cuda": "13.0", "comfyui": "0.33.0", "slipstream": "1.0", "python": "3.12.0"},
        "shapes": {"x": [2, 4, 64, 64]}, "engine_calls": 0, "seed": 0, "commit": "c" * 40, "run": "first",
    }  # fmt: skip
    return complete({**found, **fields})
