"""Build one engine from plan to store: traced and compiled in the worker, kept only when it is whole."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...core.dtypes import dtype_of
from ...core.errors import BackendUnavailable, BuildCancelled, BuildFailed, BuildPostponed, StoreError
from ...core.progress import CancelToken, Progress, ProgressCallback
from ...core.protocols import BuildJob
from ...core.spec import EngineSpec
from ...engine_cache import BuildHistory, BuildRecord, EngineStore, Entry
from ...engine_cache.files import store_errors
from ..capture.compiling import compile_in_background
from ..planning.build_estimate import estimator, past_build
from ..planning.plan import Plan
from .worker_pool import WorkerPool
from .worker_process import run_build

log = logging.getLogger(__name__)

WORKER_DEVICE_BYTES = 2 << 30
"""Device memory of a build process: its CUDA context and the tensors on which kernels are tried."""

_NEEDED_BYTES = 512 * 1024**2
_WEIGHTS = "weights.safetensors"


def build_engine(
    plan: Plan,
    store: EngineStore,
    progress: ProgressCallback,
    cancel: CancelToken,
    may_run: Callable[[], bool] = lambda: True,
    workers: WorkerPool | None = None,
) -> Entry:
    """Build `plan`, or return the engine that another process built meanwhile.

    Args:
        workers: see `run_build`.

    Raises:
        BuildCancelled, BuildFailed, UnsupportedModel, BackendUnavailable, StoreError: nothing was kept.
    """
    if reason := plan.backend.why_cannot_build(plan.device) or plan.backend.why_unsupported(plan.spec):
        raise BackendUnavailable(f"{plan} cannot be built here: {reason}")

    def waiting(seconds: float) -> None:
        cancel.raise_if_cancelled(f"The build of {plan}")
        progress(Progress("waiting", None, "another process is building this engine"))

    with store.reserve(plan.key.digest, wait=waiting):
        if (entry := store.trusted(plan.key.digest)) is not None:
            return entry
        store.clean()  # what processes that were killed left behind
        return _build(plan, store, progress, cancel, may_run, workers)


def _build(
    plan: Plan,
    store: EngineStore,
    progress: ProgressCallback,
    cancel: CancelToken,
    may_run: Callable[[], bool],
    workers: WorkerPool | None,
) -> Entry:
    with store.scratch("build-" + plan.key.short) as directory:
        _check_space(directory, plan)
        cancel.raise_if_cancelled(f"The build of {plan}")
        job = _job(plan, store, directory, progress)
        cancel.raise_if_cancelled(f"The build of {plan}")  # writing weights may have taken a while
        history = BuildHistory(store.root)
        try:
            make = run_build if workers is None else functools.partial(run_build, workers=workers)
            built = make(job, progress, cancel, expected=estimator(history, plan), may_run=may_run)
        except (BuildCancelled, BuildPostponed):
            raise
        except BuildFailed:
            _check_space(directory, plan)  # compilers fail in many ways on a full disk
            raise
        phases = {name: round(seconds, 2) for name, seconds in built.phases.items()}
        record = BuildRecord(round(sum(phases.values()), 2), phases)
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in phases.items())
        log.info("Slipstream: built %s in %.0f s (%s)", plan, record.seconds, parts)
        progress(Progress("store", 0.99, "storing the engine"))
        entry = store.put(plan.key, built.artifact, label=str(plan), build=record)
        history.add(past_build(plan, int(built.artifact.details.get("nodes", 0)), record.seconds))
        return entry


def _job(plan: Plan, store: EngineStore, directory: Path, progress: ProgressCallback) -> BuildJob:
    with store_errors("Preparing a build", store.root):
        store.keep.mkdir(exist_ok=True)
    if plan.device.type == "cuda":
        compile_in_background(store.keep)
    job = BuildJob(directory, plan.spec, plan.architecture, plan.device, plan.key.environment, keep=store.keep)
    if plan.save_weights is None:
        return job
    progress(Progress("weights", None, "writing the model's weights for the engine"))
    weights = directory / _WEIGHTS
    plan.save_weights(weights)
    return replace(job, weights=weights)


def needed_bytes(spec: EngineSpec) -> int:
    """Bytes on disk that a build needs; embedded weights take four times their size."""
    if not spec.backend.contains_weights:
        return _NEEDED_BYTES
    return _NEEDED_BYTES + 4 * spec.fingerprint.parameters * dtype_of(spec.precision).itemsize


def device_bytes(plan: Plan) -> int:
    """Bytes of device memory that a build takes, roughly."""
    return WORKER_DEVICE_BYTES + plan.backend.build_bytes(plan.spec)


def _check_space(directory: Path, plan: Plan) -> None:
    free, needed = shutil.disk_usage(directory).free, needed_bytes(plan.spec)
    if free < needed:
        raise StoreError(
            f"Building {plan} needs about {needed >> 20} MB in {directory.parent}, {free >> 20} MB are free; "
            "free some space, prune the engines, or set SLIPSTREAM_HOME to a larger disk"
        )
