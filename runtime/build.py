"""Build one engine from plan to store: export here, compile in the worker, keep only what is whole."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.dtypes import dtype_named
from ..core.errors import BackendUnavailable, StoreError
from ..core.progress import CancelToken, Progress, ProgressCallback
from ..core.protocols import BuildJob
from ..engine_cache import BuildRecord, EngineStore, Entry
from .builder import run_build
from .plan import Plan

log = logging.getLogger(__name__)

export_lock = threading.Lock()
"""Held while a model is traced: tracing switches torch-wide flags, so no sampling run may begin meanwhile."""

_BUSY_POLL_SECONDS = 0.2
_NEEDED_BYTES = 512 * 1024**2


def build_engine(
    plan: Plan,
    store: EngineStore,
    progress: ProgressCallback,
    cancel: CancelToken,
    may_run: Callable[[], bool] = lambda: True,
) -> Entry:
    """Build `plan`, or return the engine that another process built meanwhile.

    Raises:
        BuildCancelled, BuildFailed, UnsupportedModel, BackendUnavailable, StoreError: nothing was kept.
    """
    if reason := plan.backend.why_cannot_build(plan.device) or plan.backend.why_unsupported(plan.spec):
        raise BackendUnavailable(f"{plan} cannot be built here: {reason}")

    def waiting(seconds: float) -> None:
        cancel.raise_if_cancelled(f"The build of {plan}")
        progress(Progress("queued", None, "another process is building this engine"))

    with store.reserve(plan.key.digest, wait=waiting):
        if (entry := store.lookup(plan.key.digest)) is not None:
            return entry
        store.clean()  # what processes that were killed left behind
        return _build(plan, store, progress, cancel, may_run)


def _build(
    plan: Plan,
    store: EngineStore,
    progress: ProgressCallback,
    cancel: CancelToken,
    may_run: Callable[[], bool],
) -> Entry:
    with store.scratch("build-" + plan.key.short) as directory:
        _check_space(directory, plan)
        start = time.monotonic()
        job = _export(plan, directory, progress, cancel, may_run)
        exported = time.monotonic()
        expected = expected_seconds(store, plan, int(job.options.get("nodes", 0)))
        artifact = run_build(job, progress, cancel, expected=expected, may_run=may_run)
        phases = {"export": round(exported - start, 2), "compile": round(time.monotonic() - exported, 2)}
        record = BuildRecord(round(sum(phases.values()), 2), phases)
        log.info("Slipstream: built %s in %.0f s", plan, record.seconds)
        progress(Progress("store", 0.99, "storing the engine"))
        return store.put(plan.key, artifact, label=str(plan), build=record)


def _check_space(directory: Path, plan: Plan) -> None:
    free = shutil.disk_usage(directory).free
    if free < _NEEDED_BYTES:
        raise StoreError(
            f"Building {plan} needs about {_NEEDED_BYTES >> 20} MB in {directory.parent}, {free >> 20} MB are free; "
            "free some space, prune the engines, or set SLIPSTREAM_HOME to a larger disk"
        )


def _export(
    plan: Plan, directory: Path, progress: ProgressCallback, cancel: CancelToken, may_run: Callable[[], bool]
) -> BuildJob:
    cancel.raise_if_cancelled(f"The build of {plan}")
    progress(Progress("export", 0.0, "tracing the model"))
    shapes = plan.spec.profile.opt
    dtypes = {name: dtype_named(dtype) for name, dtype in plan.spec.dtypes.items()}
    with _tracing(plan, cancel, may_run):
        module = plan.architecture.skeleton(plan.spec.precision, plan.device)
        example = plan.architecture.random_inputs(shapes, dtypes, plan.device, seed=0)
        job = plan.backend.export(plan.spec, module, example, directory)
    cancel.raise_if_cancelled(f"The build of {plan}")
    return job


@contextlib.contextmanager
def _tracing(plan: Plan, cancel: CancelToken, may_run: Callable[[], bool]) -> Iterator[None]:
    """Hold the export lock, taken at a moment when no sampling run is active."""
    while True:
        with export_lock:
            if may_run():
                yield
                return
        cancel.raise_if_cancelled(f"The build of {plan}")
        cancel.wait(_BUSY_POLL_SECONDS)


def expected_seconds(store: EngineStore, plan: Plan, nodes: int) -> float | None:
    """How long the compiler will take, from the seconds per graph node of earlier builds here; None without any."""
    rates = sorted(
        entry.manifest.build.phases["compile"] / entry.manifest.details["nodes"]
        for entry in store.list()
        if entry.manifest.backend == plan.backend.name
        and entry.manifest.optimize == plan.spec.optimize.value
        and entry.manifest.details.get("nodes")
        and "compile" in entry.manifest.build.phases
    )
    return rates[len(rates) // 2] * nodes if rates and nodes else None
