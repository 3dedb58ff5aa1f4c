"""The command: one process a case, rows kept whatever becomes of the others."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from threading import Lock

from ...core.errors import SlipstreamError
from ...core.spec import Optimize, Quantised
from ...runtime.checking.measure import commit
from ...runtime.settings.model_settings import NUMBERS, BuildPolicy
from ..subjects.arguments import count, list_of
from ..subjects.cases import CASES, Case, enter
from ..subjects.rows import RESULTS, Row, append, result_file
from ..subjects.setup import SetupContext
from ..subjects.variants import (
    COLD_STARTED,
    EAGER,
    LADDER_CASE,
    MAX,
    RIVAL,
    RIVAL_COMPILED,
    SAGE,
    SWITCHED,
    USUAL,
    Variant,
    ladder_to_measure,
    of_tables,
)
from . import turns
from .building import Builders, Task, build, tasks_of
from .case_process import PROGRAM, Outcome, end_all, run_apart, task_of
from .cold_start import STARTS, measure_cold
from .turns import GpuTurn

_REPEATS = 30
OK, FAILED, INTERRUPTED = 0, 1, 130

_SIDE_BY_SIDE = (
    "all cases are set up at once, and timed one at a time when all are: saves hours where there is memory for all of "
    "them; what tries out kernels (max-autotune) chooses better without"
)

_LIMIT = (
    "for one case, or with --cold-start for one start; what was measured by then is kept. With --side-by-side for "
    "setting up: what is not ready by then is not measured, and the rest is timed"
)
_SHARED_LOCK = (
    "of --side-by-side: commands that are started together with the same FILE, as one for each GPU of a machine "
    "(CUDA_VISIBLE_DEVICES), time one case at a time among all of them; it is made, and stays behind"
)
_BUILDERS = (
    "processes that build engines beside --side-by-side, each with a model of its own on the GPU: a case builds one "
    "after another; default: none"
)


def main(words: Sequence[str]) -> int:
    """Measure; 0: every row may be trusted, 1: some failed or are missing, 2: wrong usage, 130: interrupted."""
    parser = make_parser()
    options = parser.parse_args(words)
    if reason := _why_not(options):
        parser.error(reason)
    try:
        if options.engines_of:
            return _build_here(options)
        if options.case_in_this_process:
            return _start_here(options) if options.cold_start else _measure_here(options)
        if options.profile:
            return _profile_here(options)
        return _measure_all(options, words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (SlipstreamError, OSError, ValueError) as error:
        _say(str(error))
        return FAILED


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Times single calls of models at real size, and whole pictures."
    )
    add = parser.add_argument
    usual = ",".join(case.name for case in CASES.values() if case.usual)
    add("--cases", type=list_of(_case_name), metavar="A,B", help=f"of {', '.join(CASES)}; default: {usual}")
    rivals = f"{RIVAL}, {RIVAL_COMPILED}, {RIVAL_COMPILED}+{Quantised.INT8.value}, {EAGER}+{SAGE}"
    says = f"default: %(default)s; where their packages are installed also {rivals}"
    add("--variants", type=list_of(Variant.of), default=",".join(USUAL), metavar="A,B", help=says)
    group = parser.add_mutually_exclusive_group()
    tables = f"each case by the variants of its table, and the ladder of {LADDER_CASE}; --variants is not read then"
    group.add_argument("--tables", action="store_true", help=f"{tables}; default of --cases: all that need a GPU")
    ladder = f"{LADDER_CASE} alone, from the plain model in fp32 to 8 bits rung by rung"
    group.add_argument("--ladder", action="store_true", help=f"{ladder}; --cases and --variants are not read then")
    switch = "what the first call costs after a change of size, and of batch, where both are loaded"
    group.add_argument("--switch", action="store_true", help=f"{switch}; --variants is not read then")
    cold = "from a process's start to its first picture, with engines and compiled code on the disk"
    of_cold = f"{cold}; --variants and --warmup are not read then; default of --cases: all pictures that need a GPU"
    group.add_argument("--cold-start", action="store_true", help=of_cold)
    repeats = f"timed calls or pictures; default: {_REPEATS}; with --cold-start timed starts; default: {STARTS}"
    add("--repeats", type=count, metavar="N", help=repeats)
    add("--warmup", type=count, default=5, metavar="N", help="of them before; default: %(default)s")
    add("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    add("--optimize", choices=["balanced", MAX], default="balanced", help="build time to spend on our engines")
    add("--precision", choices=[*NUMBERS], help="of our engines; default: the model's own")
    add("--store", type=Path, metavar="FOLDER", help="of engines; default: none, they are built anew")
    add("--limit", type=count, metavar="SECONDS", help=_LIMIT)
    add("--comfyui", type=Path, metavar="FOLDER", help="default: COMFYUI_DIR, else the one that this pack lies in")
    add("--side-by-side", action="store_true", help=_SIDE_BY_SIDE)
    add("--builders", type=count, metavar="N", help=_BUILDERS)
    add("--lock", type=Path, metavar="FILE", help=_SHARED_LOCK)
    add("--commit", help="of the code that is measured, where its folder is no git clone")
    add("--profile", action="store_true", help="instead of rows: where one call's or picture's time goes, by variant")
    add("--case-in-this-process", help=argparse.SUPPRESS)
    add("--part", type=Path, help=argparse.SUPPRESS)
    add("--run", help=argparse.SUPPRESS)
    add("--caches", type=Path, help=argparse.SUPPRESS)
    add("--fill", action="store_true", help=argparse.SUPPRESS)
    add("--engines-of", help=argparse.SUPPRESS)
    add("--started", type=float, help=argparse.SUPPRESS)
    return parser


def _why_not(options: Namespace) -> str | None:
    """Why these options make no sense together."""
    if options.cold_start and (options.side_by_side or options.profile or options.lock):
        return "--cold-start times one process after another: leave out --side-by-side, --lock and --profile"
    if options.side_by_side and options.profile:
        return "--side-by-side times nobody before all are set up: leave out --profile"
    if options.builders and not options.side_by_side:
        return "--builders build beside cases that are set up: add --side-by-side"
    if options.lock and not options.side_by_side:
        return "--lock is shared by commands whose cases are set up at once: add --side-by-side"
    if options.lock and (options.lock.is_dir() or not options.lock.absolute().parent.is_dir()):
        return f"--lock {options.lock}: a file in a folder that is there is wanted"
    if options.side_by_side and (reason := turns.why_not()):
        return reason
    if not options.cold_start and (cold := [each.name for each in options.variants if each.is_cold]):
        return f"{cold[0]} is measured by --cold-start"
    return None


def _case_name(text: str) -> str:
    if text not in CASES:
        raise ValueError(f"{text!r} is no case; there are {', '.join(CASES)}")
    return text


# The command's own process


def _measure_all(options: Namespace, words: Sequence[str]) -> int:
    failures: list[str] = []
    writing = Lock()

    def measure_part(part: tuple[str, tuple[Variant, ...]], shared: Sequence[str] = ()) -> None:
        name, variants = part
        _say(f"{name}: {CASES[name].title}")
        outcome = _outcome(name, _with(options, variants), [*words, *shared])
        with writing:
            _keep(name, outcome, options.out)
            failures.extend(outcome.trouble)

    if options.side_by_side:
        _side_by_side(measure_part, options, words)
    else:
        for part in parts(options):
            measure_part(part)
    for failure in failures:
        _say(f"FAILED {failure}")
    return FAILED if failures else OK


def _outcome(name: str, options: Namespace, words: Sequence[str]) -> Outcome:
    if options.cold_start:
        return measure_cold(name, options, [each.name for each in wanted(options)], words)
    return measure_apart(name, options, [*words, "--variants", ",".join(each.name for each in options.variants)])


def _keep(name: str, outcome: Outcome, folder: Path) -> None:
    for row in outcome.rows:
        _say(_line(row))
    if outcome.rows:
        file = result_file(folder, outcome.rows[0], date.today())
        append(file, outcome.rows)
        _say(f"{name}: {len(outcome.rows)} rows added to {file}")


def _side_by_side(measure_part: Callable[..., None], options: Namespace, words: Sequence[str]) -> None:
    """All at once. When this process is interrupted, theirs are ended, and what they wrote is kept."""
    wanted_parts = parts(options)
    tasks = tasks_of((name, wanted(_with(options, variants))) for name, variants in wanted_parts)
    with tempfile.TemporaryDirectory(prefix="slipstream-turns-", ignore_cleanup_errors=True) as folder:
        lock = options.lock or Path(folder) / "lock"
        shared = ["--lock", str(lock)]
        if options.builders and not options.store:
            shared += ["--store", os.path.join(folder, "engines")]

        def build_apart(task: Task, limit: int | None) -> str | None:
            part, hidden = task_of(task.case, options.out)
            own = "--variants", task.variant, "--engines-of", task.part
            return run_apart([*PROGRAM, *words, *shared, *own, *hidden], part, limit)[1]

        builders = Builders(lock, options.limit or math.inf, build_apart, _say)
        with ThreadPoolExecutor(options.builders or 1) as building, ThreadPoolExecutor(len(wanted_parts)) as cases:
            futures: list[Future[None]] = []
            try:
                for part in wanted_parts:
                    futures.append(cases.submit(measure_part, part, shared))
                    futures[-1].add_done_callback(lambda _, name=part[0]: builders.ended.add(name))  # type: ignore[misc]
                futures += [building.submit(builders, task) for task in tasks if options.builders]
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                builders.stop()
                end_all()
                raise


def parts(options: Namespace) -> list[tuple[str, tuple[Variant, ...]]]:
    """Cases and the variants of each, as they are measured one after another."""
    rungs = LADDER_CASE, _variants_of(ladder_to_measure())
    if options.ladder:
        return [rungs]
    if options.cold_start:
        return [(name, _variants_of(COLD_STARTED)) for name in cases_of(options)]
    if options.switch:
        return [(name, _variants_of(SWITCHED)) for name in cases_of(options)]
    if not options.tables:
        return [(name, options.variants) for name in cases_of(options)]
    found = [(name, _variants_of(of_tables(CASES[name]))) for name in cases_of(options)]
    return [*found, rungs] if LADDER_CASE in cases_of(options) else found


def _with(options: Namespace, variants: Sequence[Variant]) -> Namespace:
    return Namespace(**{**vars(options), "variants": variants})


def cases_of(options: Namespace) -> list[str]:
    """Those that are named, or else the usual ones; of tables, and pictures of cold starts, all that need a GPU."""
    if options.cases is not None:
        return list(options.cases)
    if options.cold_start:
        return [name for name, case in CASES.items() if case.is_job and case.needs_gpu]
    return [name for name, case in CASES.items() if (case.needs_gpu if options.tables else case.usual)]


def _variants_of(names: Sequence[str]) -> tuple[Variant, ...]:
    return tuple(map(Variant.of, names))


def measure_apart(name: str, options: Namespace, words: Sequence[str], program: Sequence[str] = PROGRAM) -> Outcome:
    """One case in a process of its own."""
    part, hidden = task_of(name, options.out)
    lines, trouble = run_apart([*program, *words, *hidden], part, None if options.side_by_side else options.limit)
    rows = {line["variant"]: line for line in lines if "left_out" not in line}
    left_out = {line["variant"] for line in lines if "left_out" in line}
    missing = [each.name for each in wanted(options) if each.name not in {*rows, *left_out}]
    found = [f"{name}, {variant}: {row['failed']}" for variant, row in rows.items() if "failed" in row]
    if trouble or missing:
        reached = f"; not reached: {', '.join(missing)}" if missing else ""
        found.append(f"{name}: {trouble or 'the process left variants out'}{reached}")
    return Outcome(tuple(rows.values()), tuple(found))


def wanted(options: Namespace) -> list[Variant]:
    """The variants to measure, with the levers that options put on our engines."""
    levers = (MAX if options.optimize == Optimize.MAX.value else None, options.precision)
    found = []
    for variant in options.variants:
        for lever in levers:
            variant = variant.with_lever(lever)
        found.append(variant)
    return list(dict.fromkeys(found))


def _line(row: Row) -> str:
    """A row for people."""
    if row["ms"] is None:
        return f"{row['case']}  {row['variant']}  failed: {row['failed']}"
    steady = f", steady {row['steady_ms']:.2f} ms" if "steady_ms" in row else ""
    figures = f"{row['ms']:.2f} ms ({row['ms_min']:.2f} … {row['ms_max']:.2f}){steady}"
    error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
    return f"{row['case']}  {row['variant']}  {figures}  error {error}"


def _say(text: str) -> None:
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)


# The process of one case


def _measure_here(options: Namespace) -> int:
    started = time.monotonic()
    with GpuTurn(options.lock) as place, _opened(options, options.case_in_this_process) as (case, setup_context):
        from .measure import Schedule, measure  # takes seconds, in which nobody must be timed

        common = _common(options)
        until = started + options.limit if options.side_by_side and options.limit else None
        schedule = Schedule(options.repeats or _REPEATS, options.warmup, common, place, until)
        measure(case, wanted(options), schedule, setup_context, lambda row: _write(options.part, row))
    return OK


def _build_here(options: Namespace) -> int:
    with _opened(options, options.case_in_this_process) as (case, setup_context):
        (variant,) = wanted(options)
        build(case, variant, options.engines_of, setup_context)
    return OK


def _start_here(options: Namespace) -> int:
    """One variant, timed since before this process was started: what can wait is done afterwards."""
    from .first_picture import IMPORTS, Marks, start

    marks = Marks(options.started)
    (variant,) = wanted(options)
    with _opened(options, options.case_in_this_process) as (case, setup_context):
        marks(IMPORTS)
        builds = BuildPolicy.FIRST_USE if options.fill else BuildPolicy.MANUAL
        setup_context = replace(setup_context, compiled=options.caches / "compiled", builds=builds)
        row = start(case, variant, setup_context, marks, options.caches / f"{case.name}.pt")
    _write(options.part, row if "left_out" in row else {**row, **_common(options)})
    return OK


def _common(options: Namespace) -> Row:
    return {"commit": options.commit or commit(), "run": options.run}


def _profile_here(options: Namespace) -> int:
    """One process for all: compiled code and engines of one case do not slow another's GPU work down."""
    from .profiling import profile_case

    for name, variants in parts(options):
        with _opened(options, name) as (case, setup_context):
            for found in profile_case(case, wanted(_with(options, variants)), setup_context):
                print(*found.lines(), "", sep="\n", flush=True)
    return OK


@contextmanager
def _opened(options: Namespace, name: str) -> Iterator[tuple[Case, SetupContext]]:
    """A case and where its variants are set up, with ComfyUI entered.

    Raises:
        ValueError: there is no ComfyUI, or no GPU.
    """
    from ...engine_cache import EngineStore
    from ...hosts.comfy.building import without_server

    checkout = without_server.find_checkout(options.comfyui)
    if checkout is None:
        raise ValueError("No ComfyUI was found; name the folder of yours with --comfyui FOLDER or COMFYUI_DIR")
    enter(checkout)
    case = CASES[name]
    if case.needs_gpu and not _has_gpu():
        raise ValueError(f"{case.name} needs a CUDA GPU, and there is none; tiny-sd15-64-b2 runs on any machine")
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmarks-", ignore_cleanup_errors=True) as scratch:
        store = EngineStore(options.store or Path(scratch) / "engines")
        yield case, SetupContext(store, Path(scratch), lambda text: _say(f"{case.name}: {text}"))


def _write(part: Path, row: Row) -> None:
    if "left_out" in row:
        _say(f"{row['case']}: {row['variant']} is left out: {row['left_out']}")
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
