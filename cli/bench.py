"""The command `bench`: times one call of the eager and of the accelerated model, on random inputs."""

from __future__ import annotations

import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from ..core.formatting import say_error
from ..core.protocols import Tensors
from ..engine_cache import EngineStore
from ..hosts.standalone.model_by_file import DEMO
from ..runtime.checking.measure import commit, load_seconds, milliseconds, statistics_of, versions
from ..runtime.checking.verify import relative_error
from ..runtime.module import AcceleratedModule
from ..runtime.planning.plan import CallShape
from ..runtime.provider import EngineProvider, Made
from ..runtime.requests.make_engines import LoadedModel
from ..runtime.settings.model_settings import Resolution, Settings
from .build import load, make, settings_from
from .errors import OK, CommandError
from .home import open_provider
from .interrupt import prompt_interrupts
from .output import Output

Row = dict[str, Any]
Compute = Callable[[], Tensors]
_SEED = 0
_COLUMNS = ("case", "variant", "ms", "min", "max", "speed", "error", "engine calls")


def bench(store: EngineStore, output: Output, options: Namespace) -> int:
    """Time each resolution; engines that are missing are built first."""
    provider = open_provider(store, options)
    settings = provider.with_preferences(settings_from(options))
    rows: list[Row] = []
    with prompt_interrupts(provider), torch.no_grad():
        model = load(options, provider)
        run = {"host": model.host, "model": options.model, "commit": commit(), "run": uuid.uuid4().hex}
        for resolution in settings.resolutions:
            call = model.call(resolution, options.batch, options.tokens)
            engine = make(provider, model, call, settings)
            name = DEMO if options.model == DEMO else engine.plan.spec.fingerprint.architecture_name.lower()
            case = {"case": _case(name, resolution, options.batch), **_circumstances(engine, call, options)}
            found = _compare(provider, model, engine, call, settings, options)
            rows += [{**case, **row, **run} for row in found]
    output.show({"store": str(store.root), "rows": rows}, lambda: _tell(rows, output))
    return OK


def _compare(
    provider: EngineProvider,
    model: LoadedModel,
    engine: Made,
    call: CallShape,
    settings: Settings,
    options: Namespace,
) -> list[Row]:
    source = model.source
    dtypes = {name: dtype for name, _, dtype in call.inputs}
    inputs = source.architecture.random_inputs(call.shapes, dtypes, source.device, _SEED)
    load_s = load_seconds(provider, source, engine.plan, engine.entry)
    module = AcceleratedModule(provider, settings)
    with module.run(source) as run:  # as in a sampling run

        def eager() -> Tensors:
            return source.eager(inputs)

        def accelerated() -> Tensors:
            return run(inputs, eager)

        reference = source.reference(inputs)
        slow, fast = _measure([eager, accelerated], reference, source.device, options.warmup, options.repeats)
    if module.status.eager_calls:
        reasons = "; ".join(module.status.to_json()["reasons"])
        raise CommandError(f"The model ran without its engine ({engine.plan}): {reasons}")
    facts = {
        "backend": engine.plan.backend.name,
        "precision": engine.plan.spec.precision_name,
        "build_s": engine.entry.manifest.build.seconds,
        "load_s": load_s,
        "size_mb": round(engine.entry.bytes / 2**20, 2),
        "digest": engine.entry.digest,
    }
    return [
        {"variant": "eager", "engine_calls": 0, "precision": source.precision.value, **slow},
        {"variant": "slipstream:compiled", "engine_calls": module.status.engine_calls, **facts, **fast},
    ]


def _measure(variants: list[Compute], reference: Tensors, device: torch.device, warmup: int, repeats: int) -> list[Row]:
    """Error, memory and milliseconds of single calls. The variants take turns, so that other load affects all."""
    rows = [_warm_up(compute, reference, device, warmup) for compute in variants]
    turns = [[milliseconds(compute, device) for compute in variants] for _ in range(repeats)]
    return [{**row, **statistics_of(samples)} for row, samples in zip(rows, zip(*turns, strict=True), strict=True)]


def _warm_up(compute: Compute, reference: Tensors, device: torch.device, warmup: int) -> Row:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup):
        result = compute()
    vram = round(torch.cuda.max_memory_allocated(device) / 2**20, 1) if device.type == "cuda" else None
    return {"error": relative_error(result, reference), "vram_mb": vram}


def _case(name: str, resolution: Resolution, batch: int) -> str:
    """E.g. "sd15-512-b2"."""
    square = resolution.width == resolution.height
    size = str(resolution.width) if square else f"{resolution.width}x{resolution.height}"
    return f"{name}-{size}-b{batch}"


def _circumstances(engine: Made, call: CallShape, options: Namespace) -> Row:
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
        "versions": versions(environment),
    }


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
