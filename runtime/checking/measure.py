"""What one call costs, and on what machine: for `slipstream bench` and for the benchmarks."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.environment import Environment
from ...core.programs import FAILURES, run
from ...core.protocols import ModelSource
from ...core.streams import on_device
from ...core.version import __version__
from ...engine_cache import Entry

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..provider import EngineProvider

ROOT = Path(__file__).resolve().parents[2]


def milliseconds(compute: Callable[[], object], device: torch.device) -> float:
    """Of one call, from an idle device until its last result is there."""
    if device.type != "cuda":
        started = time.perf_counter()
        compute()
        return (time.perf_counter() - started) * 1000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with on_device(device):
        torch.cuda.synchronize()
        begin.record()
        compute()
        end.record()
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def statistics_of(samples: Sequence[float]) -> dict[str, Any]:
    """Median, smallest and largest of at least one sample in ms, and the samples themselves."""
    figures = {"ms": statistics.median(samples), "ms_min": min(samples), "ms_max": max(samples)}
    return {name: round(value, 4) for name, value in figures.items()} | {
        "samples": [round(sample, 4) for sample in samples]
    }


def load_seconds(provider: EngineProvider, source: ModelSource, plan: Plan, entry: Entry) -> float:
    """Seconds from the store until it is ready to compute, without the check of its results."""
    provider.pool.clear()
    started = time.perf_counter()
    loaded = provider.pool.take(plan, entry, source.device)
    loaded.bind(source.bind(plan.spec.precision))
    seconds = time.perf_counter() - started
    provider.pool.give_back(loaded)
    return round(seconds, 4)


def versions(environment: Environment) -> dict[str, str]:
    """Of all that decides how fast a call is; what is not here is left out."""
    cudnn = torch.backends.cudnn.version() if environment.gpu else None
    found = {
        "torch": environment.torch,
        "triton": _version("triton"),
        "cuda": environment.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "slipstream": __version__,
        "python": platform.python_version(),
        **environment.versions,
    }
    return {name: version for name, version in found.items() if version is not None}


def commit() -> str | None:
    """Of this pack, where it is a git clone."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = run(["git", "rev-parse", "HEAD"], folder=ROOT)
    except FAILURES:
        return None
    return None if done.returncode else str(done.stdout).strip()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
