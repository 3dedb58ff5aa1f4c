"""The command `bench`: one call of the model, plain and accelerated, on random inputs."""

from __future__ import annotations

import statistics
import subprocess
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..core.protocols import Tensors
from ..engine_cache import EngineStore
from ..runtime.module import AcceleratedModule
from ..runtime.plan import CallShape
from ..runtime.provider import EngineProvider
from ..runtime.settings import Resolution, Settings
from ..runtime.verify import relative_error
from .build import Obtained, load, obtain, settings_from
from .errors import OK, CommandError
from .interrupt import prompt_interrupts
from .models import DEMO, LoadedModel
from .output import Output
from .words import say_error

Row = dict[str, Any]
Compute = Callable[[], Tensors]
_SEED = 0
_COLUMNS = ("case", "variant", "ms", "min", "max", "speed", "error", "engine calls")


def bench(store: EngineStore, output: Output, options: Namespace) -> int:
    """Time each resolution; engines that are missing are built first."""
    settings = settings_from(options)
    provider = EngineProvider(store)
    rows: list[Row] = []
    with prompt_interrupts(provider), torch.no_grad():
        model = load(options, provider)
        run = {"host": model.host, "model": options.model, "commit": _commit(), "run": uuid.uuid4().hex}
        for resolution in settings.resolutions:
            call = model.call(resolution, options.batch, options.tokens)
            engine = obtain(provider, model, call, settings)
            name = DEMO if options.model == DEMO else engine.plan.spec.fingerprint.architecture_name.lower()
            case = {"case": _case(name, resolution, options.batch), **_circumstances(engine, call, options)}
            found = _compare(provider, model, engine, call, settings, options)
            rows += [{**case, **row, **run} for row in found]
    output.show({"store": str(store.root), "rows": rows}, lambda: _tell(rows, output))
    return OK


def _compare(
    provider: EngineProvider,
    model: LoadedModel,
    engine: Obtained,
    call: CallShape,
    settings: Settings,
    options: Namespace,
) -> list[Row]:
    source = model.source
    dtypes = {name: dtype for name, _, dtype in call.inputs}
    inputs = source.architecture.random_inputs(call.shapes, dtypes, source.device, _SEED)
    load_s = _load_seconds(provider, model, engine)
    module = AcceleratedModule(provider, settings)
    with module.run(source) as run:  # the very way that a picture's calls take

        def eager() -> Tensors:
            return source.eager(inputs)

        def accelerated() -> Tensors:
            return run(inputs, eager)

        reference = source.reference(inputs)
        plain, fast = _measure([eager, accelerated], reference, source.device, options.warmup, options.repeats)
    if module.status.eager_calls:
        reasons = "; ".join(module.status.to_json()["reasons"])
        raise CommandError(f"The plain model ran instead of {engine.plan}: {reasons}")
    facts = {
        "backend": engine.plan.backend.name,
        "precision": engine.plan.spec.precision.value,
        "build_s": engine.entry.manifest.build.seconds,
        "load_s": load_s,
        "size_mb": round(engine.entry.bytes / 2**20, 2),
        "digest": engine.entry.digest,
    }
    return [
        {"variant": "eager", "engine_calls": 0, "precision": source.precision.value, **plain},
        {"variant": "slipstream:compiled", "engine_calls": module.status.engine_calls, **facts, **fast},
    ]


def _measure(variants: list[Compute], reference: Tensors, device: torch.device, warmup: int, repeats: int) -> list[Row]:
    """Error, memory and milliseconds of single calls. The variants take turns, so that a busy moment hits all."""
    rows = [_warm_up(compute, reference, device, warmup) for compute in variants]
    turns = [[_one_call(compute, device) for compute in variants] for _ in range(repeats)]
    return [{**row, **_statistics(samples)} for row, samples in zip(rows, zip(*turns, strict=True), strict=True)]


def _warm_up(compute: Compute, reference: Tensors, device: torch.device, warmup: int) -> Row:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup):
        result = compute()
    vram = round(torch.cuda.max_memory_allocated(device) / 2**20, 1) if device.type == "cuda" else None
    return {"error": relative_error(result, reference), "vram_mb": vram}


def _statistics(samples: Sequence[float]) -> Row:
    figures = {"ms": statistics.median(samples), "ms_min": min(samples), "ms_max": max(samples)}
    return {name: round(value, 4) for name, value in figures.items()} | {
        "samples": [round(sample, 4) for sample in samples]
    }


def _one_call(compute: Compute, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        compute()
        return (time.perf_counter() - started) * 1000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    compute()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def _load_seconds(provider: EngineProvider, model: LoadedModel, engine: Obtained) -> float:
    """From the store to ready to compute, the check of its numbers apart."""
    provider.pool.clear()
    started = time.perf_counter()
    loaded = provider.pool.take(engine.plan, engine.entry, model.source.device)
    loaded.engine.update_weights(model.source.weights(engine.plan.spec.precision))
    seconds = time.perf_counter() - started
    provider.pool.give_back(loaded)
    return round(seconds, 4)


def _case(name: str, resolution: Resolution, batch: int) -> str:
    """E.g. "sd15-512-b2"."""
    square = resolution.width == resolution.height
    size = str(resolution.width) if square else f"{resolution.width}x{resolution.height}"
    return f"{name}-{size}-b{batch}"


def _circumstances(engine: Obtained, call: CallShape, options: Namespace) -> Row:
    environment = engine.plan.key.environment
    return {
        "repeats": options.repeats,
        "warmup": options.warmup,
        "shapes": {name: list(shape) for name, shape in call.shapes.items()},
        "seed": _SEED,
        "gpu": environment.gpu,
        "cpu": environment.cpu,
        "threads": environment.threads,
        "driver": environment.driver,
        "versions": {"torch": environment.torch, "slipstream": __version__, **environment.versions},
    }


def _commit() -> str | None:
    """Of this pack, where it is a git clone."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _tell(rows: list[Row], output: Output) -> None:
    eager = {row["case"]: row["ms"] for row in rows if row["variant"] == "eager"}
    output.table(
        _COLUMNS,
        [
            (
                row["case"],
                row["variant"],
                f"{row['ms']:.2f}",
                f"{row['ms_min']:.2f}",
                f"{row['ms_max']:.2f}",
                f"{eager[row['case']] / row['ms']:.2f}×",
                say_error(row["error"]),
                str(row["engine_calls"]),
            )
            for row in rows
        ],
    )
