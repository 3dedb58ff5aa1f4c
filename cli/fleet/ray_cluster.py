"""Tasks of a matrix on the machines of a Ray cluster.

Each task is a command of its own on the machine that Ray chooses, with the pack that is installed there. Which machine
builds an engine that several tasks want is decided by leases in the remote store, so that a cluster may be shared.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import BackendUnavailable
from ..errors import FAILED, CommandError
from .tasks import PACK, Outcome, Task

_CPUS = 1.0
_KIND = "accelerator_type:"
"""How Ray's resources begin that name a kind of GPU."""


def run_on_ray(tasks: Sequence[Task], options: Namespace) -> list[Outcome]:
    """Carry out all tasks, each again where its machine or process is lost.

    Raises:
        CommandError: the cluster cannot be reached.
        BackendUnavailable: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise BackendUnavailable("--ray needs the package Ray: pip install ray") from None
    try:
        ray.init(address=options.ray, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise CommandError(f"The Ray cluster at {options.ray} cannot be reached: {error}") from None
    try:
        return _carried_out(ray, tasks, options)
    finally:
        ray.shutdown()


def _carried_out(ray: Any, tasks: Sequence[Task], options: Namespace) -> list[Outcome]:
    run = _remote_command(ray)
    started, outcomes = time.monotonic(), dict[Any, Outcome]()
    offered, waiting = ray.cluster_resources(), {}
    for kind in sorted({task.gpu for task in tasks if task.gpu and f"{_KIND}{task.gpu}" not in offered}):
        print(f"no machine of the cluster has a GPU {kind} now; its builds wait for one", file=sys.stderr, flush=True)
    for task in tasks:
        resources = _resources(task, offered)
        placed = run.options(num_cpus=_CPUS, max_retries=options.attempts, retry_exceptions=True, **resources)
        waiting[placed.remote(str(PACK), task.command(options, None), options.attempts)] = task
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        task = waiting.pop(done[0])
        outcomes[task] = _outcome(ray, task, done[0], round(time.monotonic() - started, 2), options)
        said = outcomes[task].error or "ready"
        print(f"{len(outcomes)} of {len(tasks)}: {task.model} {task.resolution}: {said}", file=sys.stderr, flush=True)
    return [outcomes[task] for task in tasks]


def _resources(task: Task, offered: Mapping[str, float]) -> dict[str, Any]:
    """What a task needs besides a core, so that no two share a GPU: one of its kind, or any where the cluster has some.

    Args:
        offered: by the whole cluster.
    """
    if task.gpu:
        return {"num_gpus": 1, "accelerator_type": task.gpu}
    return {"num_gpus": 1} if offered.get("GPU") else {}


def _outcome(ray: Any, task: Task, reference: Any, seconds: float, options: Namespace) -> Outcome:
    try:
        status, answer, where, attempts = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()
        return Outcome(task, FAILED, seconds, options.attempts, error=lines[-1] if lines else type(error).__name__)
    found = Outcome(task, status, seconds, attempts, where)
    found.engines, found.error = answer.get("engines", []), answer.get("error", "")
    return found


def _remote_command(ray: Any) -> Any:
    """The task that runs a command on a machine of the cluster.

    It is made here and uses the standard library alone, so that Ray sends it whole: the machine's own Python need not
    have this pack imported.
    """

    def run(pack: str, words: list[str], attempts: int) -> tuple[int, dict[str, Any], str, int]:
        import json
        import os
        import platform
        import runpy
        import sys
        import tempfile

        start_and_wait = runpy.run_path(os.path.join(pack, "core", "programs.py"))["run"]
        status, answer, attempt = 1, {}, 0
        with tempfile.TemporaryDirectory(prefix="slipstream-ray-") as home:
            home_words = [] if os.environ.get("SLIPSTREAM_HOME") else ["--home", home]
            while attempt < attempts and status not in (0, 3):
                attempt += 1
                line = [sys.executable, pack, *words, *home_words]
                done = start_and_wait(line)
                status = done.returncode
                try:
                    answer = json.loads(done.stdout)
                except ValueError:
                    status, answer = status or 1, {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        return status, answer, f"{platform.node()}:{os.getpid()}", attempt

    return ray.remote(run)
