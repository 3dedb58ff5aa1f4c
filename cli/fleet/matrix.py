"""`slipstream build --matrix`: engines for many models, each build a process of its own, here or on a Ray cluster."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from ...core.formatting import say_seconds
from ...core.programs import run
from ...core.spec import Optimize
from ...engine_cache import EngineStore
from ..errors import FAILED, MISSING, OK, CommandError
from ..output import Output
from .ray_cluster import run_on_ray
from .tasks import PACK, Outcome, Task

_COLUMNS = ("model", "resolution", "where", "outcome", "took")
_WORDS = ("precision", "optimize", "backend", "engines", "batch", "tokens", "max_batch", "max_tokens")
_KNOWN = {"model", "resolutions", "bake", "gpu", *_WORDS}


def build_matrix(store: EngineStore, output: Output, options: Namespace) -> int:
    """Carry out all tasks of a file, and report on each.

    Raises:
        CommandError: the file cannot be read, or the Ray cluster cannot be reached.
    """
    tasks = read_matrix(options.matrix)
    if (options.check or options.remote) and any(Optimize.BLOCKS.value in task.words for task in tasks):
        raise CommandError(
            f"{options.matrix} names optimize: blocks, which goes without --check, --remote and --ray; put such models "
            "into a file of their own"
        )
    if options.ray:
        outcomes = run_on_ray(tasks, options)
    else:
        outcomes = [run_here(task, options, store.root) for task in tasks]
    rows = [outcome.to_json() for outcome in outcomes]

    def tell() -> None:
        output.table(_COLUMNS, [_row(outcome) for outcome in outcomes])
        good = sum(outcome.status == OK for outcome in outcomes)
        output.line(f"{good} of {len(outcomes)} builds {'are there' if options.check else 'succeeded'}")

    output.show({"store": options.remote or str(store.root), "builds": rows}, tell)
    statuses = {outcome.status for outcome in outcomes}
    return OK if statuses <= {OK} else MISSING if statuses <= {OK, MISSING} else FAILED


def _row(outcome: Outcome) -> tuple[str, ...]:
    words = {OK: "ready", MISSING: "missing"}.get(outcome.status, f"failed: {outcome.error}")
    return outcome.task.model, outcome.task.resolution, outcome.where, words, say_seconds(outcome.seconds)


def read_matrix(file: Path) -> list[Task]:
    """The tasks of a YAML (or JSON) file: each model × size × kind of GPU.

    Raises:
        CommandError: it cannot be read; the message says where.
    """
    data = _parsed(file)
    entries = data.get("models") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise CommandError(f"{file} lists no models: it takes models: and under it entries with model and resolutions")
    defaults = data.get("defaults") or {}
    tasks = [task for number, entry in enumerate(entries, 1) for task in _tasks(file, number, entry, defaults)]
    return list(dict.fromkeys(tasks))


def _parsed(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from None
    if file.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise CommandError(f"{file} is no JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise CommandError("YAML needs a package: pip install pyyaml; or write the file as .json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CommandError(f"{file} is no YAML: {error}") from None


def _tasks(file: Path, number: int, entry: Any, defaults: Any) -> list[Task]:
    where = f"{file}, model {number}"
    if not isinstance(entry, dict) or not isinstance(defaults, dict):
        raise CommandError(f"{where}: write model: and resolutions:")
    given = {**defaults, **entry}
    if unknown := sorted(set(map(str, given)) - _KNOWN):
        raise CommandError(f"{where}: {', '.join(unknown)} is not known; there are {', '.join(sorted(_KNOWN))}")
    sizes, gpus = _list(given.get("resolutions")), _list(given.get("gpu")) or [None]
    if not isinstance(given.get("model"), str) or not sizes:
        raise CommandError(f"{where}: write model: (a file, or demo) and resolutions: (such as [512x512])")
    words = [word for name in _WORDS if name in given for word in (f"--{name.replace('_', '-')}", str(given[name]))]
    words += ["--bake"] if given.get("bake") else []
    return [Task(given["model"], str(size), tuple(words), gpu) for size in sizes for gpu in gpus]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def run_here(task: Task, options: Namespace, home: Path) -> Outcome:
    """Carry out a task in a process of its own on this machine; again where the process was killed or failed."""
    started = time.monotonic()
    print(f"{task.model} {task.resolution}", file=sys.stderr, flush=True)
    attempt, status = 0, FAILED
    answer: dict[str, Any] = {}
    while attempt < options.attempts and status not in (OK, MISSING):
        attempt += 1
        status, answer = run_command(task.command(options, home))
    found = Outcome(task, status, round(time.monotonic() - started, 2), attempt)
    found.engines, found.error = answer.get("engines", []), answer.get("error", "")
    return found


def run_command(words: list[str]) -> tuple[int, dict[str, Any]]:
    """Run one `slipstream --json` command in a process; its status and its answer."""
    done = run([sys.executable, str(PACK), *words])
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return done.returncode or FAILED, {"error": lines[-1] if lines else f"ended with status {done.returncode}"}
    return done.returncode, answer if isinstance(answer, dict) else {}
