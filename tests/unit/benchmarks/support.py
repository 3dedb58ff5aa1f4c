"""Rows as measurements leave them."""

from __future__ import annotations

from typing import Any

from slipstream.benchmarks.in_server import rows as server_rows
from slipstream.benchmarks.subjects.rows import Row, complete


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


def server_row(variant: str, **fields: Any) -> Row:
    """A complete row of two good pictures in a server; `fields` replace what is in it."""
    samples = {"client_s": [2.5, 2.5], "sampler_s": [1.5, 2.0], "decoder_s": [0.5, 0.5], "warmup_s": [9.0, 2.0]}
    samples |= {"before_s": [0.05, 0.05], "step_ms": [50.0, 52.0], "after_s": [0.01, 0.01]}
    ours = {"engine_calls": 40, "eager_calls": 1} if variant.startswith("slipstream") else {}
    found = {
        "case": "sd15-512-20", "flags": [], "comfyui": "0.33.0", "variant": variant, "turn": 1, "samples": samples,
        "pictures": 2, "build_s": 9.0, "error": 1e-2, "died": False, "gpu": "NVIDIA H200", "driver": "580.1",
        "versions": {"torch": "2.11.0", "python": "3.12.3", "slipstream": "1.0"}, "commit": "c" * 40, "run": "first",
        "vram_mb": 5000.0, "peak_mb": 7000.0, **ours,
    }  # fmt: skip
    return server_rows.complete({**found, **fields})
