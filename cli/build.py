"""The command `build` for one model: its engines, made before any picture needs them."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

from ..core.formatting import SHOWN, say_engine_error, say_seconds
from ..core.progress import Progress, ProgressCallback
from ..core.spec import Optimize
from ..engine_cache import EngineStore
from ..engine_cache.travel.remote_store import RemoteStore
from ..hosts.standalone.model_by_file import build_blocks_of, load_model
from ..runtime.building.build_queue import ENDED, BuildQueue, Ticket
from ..runtime.module import AcceleratedModule
from ..runtime.planning.build_estimate import say_estimate
from ..runtime.planning.plan import CallShape
from ..runtime.provider import EngineProvider, HostHooks, Made
from ..runtime.reporting.engine_info import summary
from ..runtime.requests.make_engines import LoadedModel
from ..runtime.settings.model_settings import BuildPolicy, Settings
from .errors import FAILED, MISSING, OK
from .home import open_provider
from .interrupt import prompt_interrupts
from .output import Output, progress_bar
from .sharing import shared

_COLUMNS = ("id", "engine", "backend", "precision", "outcome", "error")


def build(store: EngineStore, output: Output, options: Namespace) -> int:
    """Build, load and check the engines of all resolutions; those that exist are only checked."""
    started = time.monotonic()
    provider = open_provider(store, options)
    settings = provider.with_preferences(settings_from(options))
    with prompt_interrupts(provider):
        by = _by_blocks if settings.optimize is Optimize.BLOCKS else _by_sizes
        host, rows, error = by(provider, settings, options)
    data: dict[str, Any] = {
        "store": str(store.root),
        "host": host,
        "model": options.model,
        "seconds": round(time.monotonic() - started, 2),
        "engines": rows,
    }
    data |= {"error": error} if error else {}

    def tell() -> None:
        output.table(_COLUMNS, [_row(row) for row in rows])
        output.line(f"{host}, engines in {store.root}")
        if error:
            output.line(error)

    output.show(data, tell)
    return FAILED if error else OK


_Built = tuple[str, list[dict[str, Any]], str]
"""The host, what is told of each engine, and what went wrong with others; empty where nothing did."""


def _by_sizes(provider: EngineProvider, settings: Settings, options: Namespace) -> _Built:
    """Engines of the whole model, all of which are there."""
    model = load(options, provider)
    engines: dict[str, Made] = {}
    for resolution in settings.resolutions:
        call = model.call(resolution, options.batch, options.tokens)
        with shared(provider, model, call, settings, options.remote) as sharing:
            made = make(provider, model, call, settings)
            sharing.push(made.entry)
        engines.setdefault(made.entry.digest, made)  # one may be for several resolutions
    return model.host, [_facts(engine) for engine in engines.values()], ""


def _by_blocks(provider: EngineProvider, settings: Settings, options: Namespace) -> _Built:
    """Engines of the model's blocks."""
    before = {entry.digest: entry.manifest.created for entry in provider.store.list()}
    module = AcceleratedModule(provider, replace(settings, policy=BuildPolicy.FIRST_USE), by_hand=True)
    with progress_bar(f"blocks of {options.model}") as progress:
        asked = _follow(provider.blocks.queue, progress)
        host, engines = build_blocks_of(options.model, options.comfyui, module, options.batch, options.tokens)
    found = [(entry, before.get(entry.digest) != entry.manifest.created) for entry in engines]
    failed = [ticket for ticket in asked if ticket.error is not None]
    error = f"{len(failed)} of {len(asked)} builds failed: {failed[0].plan}: {failed[0].error}" if failed else ""
    return host, [{**summary(entry), "built": is_new, "estimate_s": None} for entry, is_new in found], error


def _follow(queue: BuildQueue, progress: ProgressCallback) -> dict[Ticket, None]:
    """Tell how many of the builds that are asked for from now on are over; returns these builds, which become more."""
    asked: dict[Ticket, None] = {}

    def tell(ticket: Ticket) -> None:
        asked[ticket] = None
        tickets = [*asked]
        done = sum(each.state in ENDED for each in tickets)
        progress(Progress("compile", done / len(tickets), f"{done} of {len(tickets)} builds are over"))

    queue.listen(tell)
    return asked


def check(store: EngineStore, output: Output, options: Namespace) -> int:
    """Say which engines are there and which are missing; nothing is built."""
    provider = open_provider(store, options)
    settings = provider.with_preferences(settings_from(options))
    model = load(options, provider)
    remote = RemoteStore(options.remote) if options.remote else None
    rows: dict[str, dict[str, Any]] = {}
    for resolution in settings.resolutions:
        plans = provider.plans(model.source, model.call(resolution, options.batch, options.tokens), settings)
        there = next((plan for plan in plans if _is_there(plan.key.digest, store, remote)), None)
        plan = there or plans[0]
        rows[plan.key.digest] = {"digest": plan.key.digest, "label": str(plan), "ready": there is not None}
    missing = [row for row in rows.values() if not row["ready"]]

    def tell() -> None:
        for row in rows.values():
            output.line(f"{row['digest'][:SHOWN]}  {row['label']}: {'ready' if row['ready'] else 'missing'}")
        output.line(f"{len(rows) - len(missing)} engines ready, {len(missing)} missing")

    output.show({"store": str(store.root), "model": options.model, "engines": list(rows.values())}, tell)
    return MISSING if missing else OK


def _is_there(digest: str, store: EngineStore, remote: RemoteStore | None) -> bool:
    """Whether this machine has an engine that it would load, or would get it from `remote`."""
    if store.trusted(digest) is not None:
        return True
    return remote is not None and remote.why_not_pulled(digest, store.keyring) is None


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
    return row["digest"][:SHOWN], row["label"], row["backend"], row["precision"], outcome, say_engine_error(row)
