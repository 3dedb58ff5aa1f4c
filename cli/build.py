"""The command `build`: engines for a model, made before any picture needs them."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

from ..core.formatting import SHOWN, say_error, say_seconds
from ..core.progress import Progress
from ..engine_cache import EngineStore
from ..hosts.standalone.model_by_file import load_model
from ..runtime.planning.build_estimate import say_estimate
from ..runtime.planning.plan import CallShape
from ..runtime.provider import EngineProvider, HostHooks, Made
from ..runtime.reporting.engine_info import summary
from ..runtime.requests.make_engines import LoadedModel
from ..runtime.settings.model_settings import Settings
from .errors import OK
from .home import open_provider
from .interrupt import prompt_interrupts
from .output import Output, progress_bar

_COLUMNS = ("id", "engine", "backend", "precision", "outcome", "error")


def build(store: EngineStore, output: Output, options: Namespace) -> int:
    """Build, load and check the engines of all resolutions; those that exist are only checked."""
    started = time.monotonic()
    provider = open_provider(store, options)
    settings = provider.with_preferences(settings_from(options))
    with prompt_interrupts(provider):
        model = load(options, provider)
        engines: dict[str, Made] = {}
        for resolution in settings.resolutions:
            made = make(provider, model, model.call(resolution, options.batch, options.tokens), settings)
            engines.setdefault(made.entry.digest, made)  # one may be for several resolutions
    rows = [_facts(engine) for engine in engines.values()]
    data = {
        "store": str(store.root),
        "host": model.host,
        "model": options.model,
        "seconds": round(time.monotonic() - started, 2),
        "engines": rows,
    }

    def tell() -> None:
        output.table(_COLUMNS, [_row(row) for row in rows])
        output.line(f"{model.host}, engines in {store.root}")

    output.show(data, tell)
    return OK


def settings_from(options: Namespace) -> Settings:
    """What the user chose."""
    chosen = Settings.of_text(
        backend=options.backend,
        precision=options.precision,
        optimize=options.optimize,
        engines=options.engines,
        max_batch=options.max_batch,
        max_tokens=options.max_tokens,
        bake=options.bake,
    )
    return replace(chosen, resolutions=options.resolution)


def load(options: Namespace, provider: EngineProvider) -> LoadedModel:
    """The model that the user named."""
    with progress_bar(options.model) as progress:
        progress(Progress("load", None, "loading the model"))
        return load_model(options.model, options.comfyui, provider.weights_memo)


def make(provider: EngineProvider, model: LoadedModel, call: CallShape, settings: Settings) -> Made:
    """An engine from the store, or built now; compared with the model once per set of weights.

    Raises:
        SlipstreamError: why there is none, or that it computes something else.
    """
    prepared = provider.prepare(model.source, call, settings)
    with progress_bar(str(prepared.plans[0])) as progress:
        if prepared.found is None:
            progress(Progress("start", 0.0, f"building the engine{say_estimate(prepared.expected)}"))
        return provider.make(model.source, call, settings, HostHooks(progress), prepared)


def _facts(engine: Made) -> dict[str, Any]:
    estimate = None if engine.expected is None else round(engine.expected, 2)
    return {**summary(engine.entry), "built": engine.is_new, "estimate_s": estimate}


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    outcome = f"built in {say_seconds(row['build_s'])}" if row["built"] else "was there"
    return row["digest"][:SHOWN], row["label"], row["backend"], row["precision"], outcome, say_error(row["error"])
